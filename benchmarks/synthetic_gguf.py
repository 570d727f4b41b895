"""Writes random GGUF pairs in the shapes of published models, with a dialled acceptance.

    python -m benchmarks.synthetic_gguf --shape qwen3.5-0.8b --type Q4_0 --out /tmp/pair

The text is that of ``synthetic_pair``: branches add almost nothing to the embeddings, and the output layer
has the embedding of each token in its successor's row. With an MTP head texts have mostly the lower ids, as
those of real tokenizers do, so that a head may draft these alone. Blocks are drawn as they are stored, so a
file takes seconds and never stands in memory as numbers. The draft is a small Llama with the target's
vocabulary.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from benchmarks.synthetic_pair import cycle, mistaken, successors

CONTEXT = 32768
# A text with an MTP head has this share of the lowest ids, if there are twice as many, and others.
COMMON, COMMON_SHARE = 32768, 0.97
# What adds to the embeddings is this many times smaller than other matrices.
SMALL = 1e-3


@dataclass(frozen=True)
class Shape:
    """Has what all architectures share. The last of every ``interval`` layers attends, where others recur."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocab_size: int
    interval: int = 1
    value_heads: int = 0  # Gated DeltaNet has 16 heads of keys, and all are of 128 numbers
    attention: tuple[int, ...] = ()  # layers of LFM2 that attend
    experts: tuple[int, int] = (0, 0)  # there are, and a token has


SHAPES = {
    "qwen3.5-0.8b": Shape("qwen35", 1024, 24, 8, 2, 256, 3584, 248320, interval=4, value_heads=16),
    "qwen3.5-4b": Shape("qwen35", 2560, 32, 16, 4, 256, 9216, 248320, interval=4, value_heads=32),
    "lfm2-1.2b": Shape("lfm2", 2048, 16, 32, 8, 64, 8192, 65536, attention=(2, 5, 8, 10, 12, 14)),
    "gemma3-270m": Shape("gemma3", 640, 18, 4, 1, 256, 2048, 262144),
    "llama-290m": Shape("llama", 1024, 24, 16, 8, 64, 2816, 8192),
    "llama-8b": Shape("llama", 4096, 32, 32, 8, 128, 14336, 128256),
    # Qwen3-30B-A3B has 48 such layers and 151,936 tokens.
    "a3b": Shape("qwen3moe", 2048, 4, 32, 4, 128, 768, 4096, experts=(128, 8)),
}


def draft_of(target: Shape) -> Shape:
    return Shape("llama", 256, 2, 4, 4, 64, 768, target.vocab_size)


class File:
    """Is a file in the making, whose matrices are of the type ``kind``."""

    def __init__(self, path: Path, shape: Shape, kind: str, seed: int) -> None:
        self.shape = shape
        self.kind = GGMLQuantizationType[kind]
        self.draws = np.random.default_rng(seed)
        self.writer = GGUFWriter(path, shape.architecture)

    def blocks(self, rows: int, columns: int, factor: float = 1.0) -> np.ndarray:
        """Draws a matrix as it is stored; its numbers are about zero and, times ``factor``, of the size that
        keeps the size of what they multiply."""
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        assert columns % block == 0, (columns, block)
        data = self.draws.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
        scale = factor * SCALES[self.kind.name] / columns**0.5
        if self.kind.name == "MXFP4":
            data[:, :, 0] = max(1, round(127 + np.log2(scale)))
        else:
            for place, times in PLACES[self.kind.name].items():
                data[:, :, place : place + 2] = np.array([times * scale], np.float16).view(np.uint8)
        return data.reshape(rows, -1)

    def matrix(self, name: str, rows: int, columns: int, factor: float = 1.0, number: int = 0) -> None:
        """Adds a matrix, or ``number`` of them in one tensor."""
        data = self.blocks(max(1, number) * rows, columns, factor)
        if number:
            data = data.reshape(number, rows, -1)
        self.writer.add_tensor(name, data, raw_dtype=self.kind)

    def numbers(self, name: str, *shape: int, mean: float = 1.0, deviation: float = 0.02) -> None:
        self.writer.add_tensor(name, self.draws.normal(mean, deviation, shape).astype(np.float32))

    def embeddings(self, following: torch.Tensor) -> None:
        """Adds those of all tokens, and the output layer that says ``following[token]`` after each."""
        vocab, hidden = self.shape.vocab_size, self.shape.hidden
        rows, output = self.blocks(vocab, hidden, hidden**0.5), self.blocks(vocab, hidden)
        output[following.numpy()] = rows
        self.writer.add_tensor("token_embd.weight", rows, raw_dtype=self.kind)
        if self.shape.architecture != "gemma3":  # whose output layer is the embeddings
            self.writer.add_tensor("output.weight", output, raw_dtype=self.kind)
        # LFM2 calls its last norm by another name.
        is_lfm2 = self.shape.architecture == "lfm2"
        self.numbers(f"{'token_embd' if is_lfm2 else 'output'}_norm.weight", hidden, deviation=0.0)

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


# Standard deviations of stored numbers are one over these. Scales stand at these bytes of a block,
# times these factors. Q4_K takes something off, for numbers of 0 to 15 to be about zero.
SCALES = {"Q4_0": 1 / 4.6, "Q8_0": 1 / 73.9, "Q4_K": 1 / 150, "MXFP4": 1 / 4.2}
PLACES = {"Q4_0": {0: 1.0}, "Q8_0": {0: 1.0}, "Q4_K": {0: 1.0, 2: 7.5}}


def attention(file: File, name: str, output: str = "attn_output", gated: bool = False) -> None:
    shape = file.shape
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    file.matrix(f"{name}.attn_q.weight", (1 + gated) * queries, shape.hidden)
    file.matrix(f"{name}.attn_k.weight", keys, shape.hidden)
    file.matrix(f"{name}.attn_v.weight", keys, shape.hidden)
    file.matrix(f"{name}.{output}.weight", shape.hidden, queries, SMALL)
    if shape.architecture != "llama":
        file.numbers(f"{name}.attn_q_norm.weight", shape.head_size)
        file.numbers(f"{name}.attn_k_norm.weight", shape.head_size)


def delta_rule(file: File, name: str) -> None:
    hidden, heads = file.shape.hidden, file.shape.value_heads
    keys, values = 16 * 128, heads * 128
    file.matrix(f"{name}.attn_qkv.weight", 2 * keys + values, hidden)
    file.matrix(f"{name}.attn_gate.weight", values, hidden)
    file.matrix(f"{name}.ssm_beta.weight", heads, hidden)
    file.matrix(f"{name}.ssm_alpha.weight", heads, hidden)
    file.matrix(f"{name}.ssm_out.weight", hidden, values, SMALL)
    file.numbers(f"{name}.ssm_conv1d.weight", 2 * keys + values, 4, deviation=0.5)
    file.numbers(f"{name}.ssm_a", heads, mean=-1.0, deviation=0.1)  # all are below zero
    file.numbers(f"{name}.ssm_dt.bias", heads, mean=-2.0)
    file.numbers(f"{name}.ssm_norm.weight", 128)


def short_conv(file: File, name: str) -> None:
    hidden = file.shape.hidden
    file.matrix(f"{name}.shortconv.in_proj.weight", 3 * hidden, hidden)
    file.matrix(f"{name}.shortconv.out_proj.weight", hidden, hidden, SMALL)
    file.numbers(f"{name}.shortconv.conv.weight", hidden, 3, deviation=0.5)


def mlp(file: File, name: str) -> None:
    shape, (number, _) = file.shape, file.shape.experts
    end = "_exps" if number else ""
    if number:
        file.numbers(f"{name}.ffn_gate_inp.weight", number, shape.hidden, mean=0.0)
    file.matrix(f"{name}.ffn_gate{end}.weight", shape.mlp, shape.hidden, number=number)
    file.matrix(f"{name}.ffn_up{end}.weight", shape.mlp, shape.hidden, number=number)
    file.matrix(f"{name}.ffn_down{end}.weight", shape.hidden, shape.mlp, SMALL, number)


def mtp_head(file: File, layer: int, acceptance: float) -> None:
    """Adds a layer that predicts a further token, as one more of the file's layers with attention.

    It makes its state of the embedding and of as much noise as leaves the right token the most likely of all
    for a share ``acceptance`` of the tokens.
    """
    hidden, name = file.shape.hidden, f"blk.{layer}"
    quantile = NormalDist().inv_cdf
    noise = hidden**0.5 / (quantile(1 - 1 / file.shape.vocab_size) + quantile(acceptance))
    of_embeddings = np.eye(hidden) + noise * file.draws.normal(0.0, hidden**-0.5, (hidden, hidden))
    projection = np.concatenate([of_embeddings, np.zeros((hidden, hidden))], axis=1).astype(np.float32)
    stored = GGMLQuantizationType.Q8_0
    data = gguf.quantize(projection, stored)
    file.writer.add_tensor(f"{name}.nextn.eh_proj.weight", data, raw_dtype=stored)
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        file.numbers(f"{name}.nextn.{norm}.weight", hidden, deviation=0.0)
    file.numbers(f"{name}.attn_norm.weight", hidden)
    file.numbers(f"{name}.post_attention_norm.weight", hidden)
    attention(file, name, gated=True)
    mlp(file, name)


def uneven_cycle(vocab_size: int, seed: int) -> torch.Tensor:
    """Returns all tokens, [vocab]: first those of a text, of which ``COMMON_SHARE`` are low ids, at random
    places."""
    order = cycle(vocab_size, seed)
    if vocab_size < 2 * COMMON:
        return order
    common, rare = order[order < COMMON], order[order >= COMMON]
    num_rare = round(COMMON / COMMON_SHARE) - COMMON
    text = torch.cat([common, rare[:num_rare]])
    return torch.cat([text[cycle(len(text), seed)], rare[num_rare:]])


def mixer_of(shape: Shape, layer: int) -> Callable[[File, str], None]:
    if shape.attention:
        return attention if layer in shape.attention else short_conv
    if shape.value_heads:
        is_attention = layer % shape.interval == shape.interval - 1
        return (lambda file, name: attention(file, name, gated=True)) if is_attention else delta_rule
    return attention


def add_metadata(file: File, num_further: int) -> None:
    shape, writer = file.shape, file.writer
    writer.add_block_count(shape.layers + num_further)
    if num_further:
        writer.add_uint32(f"{shape.architecture}.nextn_predict_layers", num_further)
    writer.add_context_length(CONTEXT)
    if shape.architecture == "gemma3":
        writer.add_sliding_window(512)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    if shape.attention:
        kv_heads = [shape.kv_heads * (layer in shape.attention) for layer in range(shape.layers)]
        writer.add_array("lfm2.attention.head_count_kv", kv_heads)
        writer.add_shortconv_l_cache(3)
    else:
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_key_length(shape.head_size)
        writer.add_value_length(shape.head_size)
    if shape.value_heads:
        writer.add_rope_dimension_count(shape.head_size // 4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(128)
        writer.add_ssm_group_count(16)
        writer.add_ssm_time_step_rank(shape.value_heads)
        writer.add_ssm_inner_size(128 * shape.value_heads)
        writer.add_uint32("qwen35.full_attention_interval", shape.interval)
    elif not shape.attention:
        writer.add_rope_dimension_count(shape.head_size)
    number, chosen = shape.experts
    if number:
        writer.add_expert_count(number)
        writer.add_expert_used_count(chosen)
        writer.add_expert_feed_forward_length(shape.mlp)


def add_tokenizer(file: File) -> None:
    """Adds one with a token for each byte, and a word of its own for each other token."""
    first = [
        ("<unk>", gguf.TokenType.UNKNOWN),
        ("<s>", gguf.TokenType.CONTROL),
        ("</s>", gguf.TokenType.CONTROL),
    ]
    first += [(f"<0x{byte:02X}>", gguf.TokenType.BYTE) for byte in range(256)] + [
        ("▁", gguf.TokenType.NORMAL)
    ]
    others = [f"▁t{token}" for token in range(len(first), file.shape.vocab_size)]
    file.writer.add_tokenizer_model("llama")
    file.writer.add_token_list([text for text, _ in first] + others)
    file.writer.add_token_scores([0.0] * file.shape.vocab_size)
    file.writer.add_token_types([kind for _, kind in first] + [gguf.TokenType.NORMAL] * len(others))
    file.writer.add_add_bos_token(False)


def write(
    path: Path,
    shape: Shape,
    kind: str,
    following: torch.Tensor,
    seed: int = 0,
    mtp_acceptance: float | None = None,
) -> Path:
    """Writes a model that says ``following[token]`` after each token, with an MTP head if that has an
    acceptance."""
    file = File(path, shape, kind, seed)
    add_metadata(file, 0 if mtp_acceptance is None else 1)
    add_tokenizer(file)
    file.embeddings(following)
    # Qwen3.5 has the norm before its MLP under the name of one after attention.
    second = "post_attention_norm" if shape.value_heads else "ffn_norm"
    for layer in range(shape.layers):
        name = f"blk.{layer}"
        if shape.architecture == "gemma3":
            file.numbers(f"{name}.post_attention_norm.weight", shape.hidden, mean=SMALL)
            file.numbers(f"{name}.post_ffw_norm.weight", shape.hidden, mean=SMALL)
        file.numbers(f"{name}.attn_norm.weight", shape.hidden)
        file.numbers(f"{name}.{second}.weight", shape.hidden)
        mixer_of(shape, layer)(file, name)
        mlp(file, name)
    if mtp_acceptance is not None:
        mtp_head(file, shape.layers, mtp_acceptance)
    file.close()
    return path


def ensure(folder: Path, name: str, kind: str, acceptance: float, *, mtp: bool = False) -> tuple[str, str]:
    """Returns the target and its draft, a file of the same type or ``mtp``: written unless they are there."""
    shape = SHAPES[name]
    order = (uneven_cycle if mtp else cycle)(shape.vocab_size, 0)
    target = folder / f"{name}{'-with-mtp' * mtp}.{kind}.gguf"
    draft = folder / f"{name}-draft.{kind}.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        write(target, shape, kind, successors(order), mtp_acceptance=acceptance if mtp else None)
    if not mtp and not draft.exists():
        write(draft, draft_of(shape), kind, mistaken(order, acceptance, 0), seed=1)
    return str(target), "mtp" if mtp else str(draft)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--type", choices=SCALES, default="Q4_0", help="of all matrices")
    parser.add_argument("--acceptance", type=float, default=0.88, help="of each drafted token")
    parser.add_argument("--mtp", action="store_true", help="an MTP head in the file instead of a draft model")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    arguments = parser.parse_args()
    for path in ensure(
        arguments.out, arguments.shape, arguments.type, arguments.acceptance, mtp=arguments.mtp
    ):
        print(path)


if __name__ == "__main__":
    main()

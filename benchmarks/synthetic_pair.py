"""A pair of random models of any shape whose acceptance is dialled: real costs without real weights.

    python -m benchmarks.synthetic_pair --out /tmp/pair --pair 290m --acceptance 0.8

Residual branches are scaled to almost nothing, so the last hidden state is the token's own embedding, and
the head maps each embedding to one fixed successor. The draft has another successor for a share of the
tokens: greedily it is right about ``acceptance`` of them, wherever it stands. Every product of the real
shape is still computed. ``save_pair`` writes two checkpoint folders that any engine loads and serves;
``build`` makes one model in memory, on any device, for shapes too large for a disk.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.synthetic_tokenizer import MIN_VOCAB_SIZE, save_tokenizer

RESIDUAL_SCALE = 1e-3
CONTEXT = 2048
STRETCH = 20


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int


@dataclass(frozen=True)
class PairShape:
    target: Shape
    draft: Shape
    vocab_size: int


# Named by their parameters. 8b and 1b have the widths and depths of Llama 3.1 8B and Llama 3.2 1B.
SHAPES = {
    "290m": Shape(hidden=1024, layers=24, heads=16, kv_heads=8, mlp=2688),
    "5.6m": Shape(hidden=256, layers=2, heads=4, kv_heads=4, mlp=688),
    "30m": Shape(hidden=512, layers=8, heads=8, kv_heads=8, mlp=1376),
    "0.6m": Shape(hidden=128, layers=2, heads=4, kv_heads=4, mlp=344),
    "8b": Shape(hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336),
    "1b": Shape(hidden=2048, layers=16, heads=32, kv_heads=8, mlp=8192),
    "tiny-target": Shape(hidden=64, layers=4, heads=4, kv_heads=2, mlp=128),
    "tiny-draft": Shape(hidden=32, layers=1, heads=2, kv_heads=2, mlp=64),
}
PAIRS = {
    "290m": PairShape(SHAPES["290m"], SHAPES["5.6m"], vocab_size=8192),
    "30m": PairShape(SHAPES["30m"], SHAPES["0.6m"], vocab_size=4096),
    "8b": PairShape(SHAPES["8b"], SHAPES["1b"], vocab_size=128256),
    "tiny": PairShape(SHAPES["tiny-target"], SHAPES["tiny-draft"], vocab_size=512),
}


def cycle(vocab_size: int, seed: int) -> torch.Tensor:
    """All tokens in random order: what the target says, over and over, [vocab]."""
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))


def successors(order: torch.Tensor) -> torch.Tensor:
    """Returns the next token of each on the cycle ``order``, [vocab]."""
    following = torch.empty_like(order)
    following[order] = order.roll(-1)
    return following


def mistaken(order: torch.Tensor, acceptance: float, seed: int) -> torch.Tensor:
    """The successors with others for a share ``1 - acceptance`` of the tokens.

    They are at random places of every ``STRETCH`` tokens of the cycle, as many in each: a text of a hundred
    tokens already has the acceptance that was asked for, wherever it begins.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    following = successors(order)
    result = following.clone()
    for start in range(0, len(order), STRETCH):
        stretch = order[start : start + STRETCH]
        until_here, with_it = (round((1 - acceptance) * end) for end in (start, start + len(stretch)))
        wrong = stretch[torch.randperm(len(stretch), generator=generator)[: with_it - until_here]]
        result[wrong] = (following[wrong] + 1) % len(order)
    return result


def config_of(shape: Shape, vocab_size: int) -> LlamaConfig:
    """Untied, without special tokens."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


@torch.no_grad()
def build(
    shape: Shape,
    following: torch.Tensor,
    seed: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
) -> LlamaForCausalLM:
    """A model that greedily says ``following[token]`` after each token; weights are drawn on ``device``."""
    vocab_size = len(following)
    config = config_of(shape, vocab_size)
    torch.manual_seed(seed)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation=attention)
        embeddings = torch.randn(vocab_size, shape.hidden)
    model.model.embed_tokens.weight.copy_(embeddings)
    model.lm_head.weight[following.to(device)] = (embeddings / shape.hidden**0.5).to(dtype)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(RESIDUAL_SCALE)
        layer.mlp.down_proj.weight.mul_(RESIDUAL_SCALE)
    return model.eval().requires_grad_(False)


def build_pair(
    pair: PairShape,
    acceptance: float,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Target and draft in memory; the same seed, device and dtype give the same weights again."""
    order = cycle(pair.vocab_size, seed)
    following, guesses = successors(order), mistaken(order, acceptance, seed)
    target = build(pair.target, following, seed, device, dtype, attention)
    return target, build(pair.draft, guesses, seed + 1, device, dtype, attention)


def save_pair(folder: Path, acceptance: float, pair: PairShape, seed: int = 0) -> tuple[str, str]:
    """Write ``folder/target`` and ``folder/draft`` in float32, with a tokenizer; returns both paths."""
    for name, model in zip(("target", "draft"), build_pair(pair, acceptance, seed), strict=True):
        model.save_pretrained(folder / name)
        save_tokenizer(folder / name, pair.vocab_size)
    return str(folder / "target"), str(folder / "draft")


def prompts(vocab_size: int, number: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random token ids: every prompt ends somewhere else on the cycle."""
    generator = torch.Generator().manual_seed(seed)
    # Ids below are the tokenizer's bytes; the others are words.
    first = MIN_VOCAB_SIZE if vocab_size > MIN_VOCAB_SIZE else 0
    rows: list[list[int]] = torch.randint(first, vocab_size, (number, length), generator=generator).tolist()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pair", choices=PAIRS, default="290m", help="shape of both models (default 290m)")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--vocab-size", type=int, help="default: the pair's")
    parser.add_argument("--seed", type=int, default=0)
    for role in ("target", "draft"):
        for name in Shape.__dataclass_fields__:
            option = f"--{role}-{name.replace('_', '-')}"
            parser.add_argument(option, type=int, help="default: the pair's")
    args = vars(parser.parse_args())
    pair = PAIRS[args["pair"]]

    def shape(role: str) -> Shape:
        given = {name: args[f"{role}_{name}"] for name in Shape.__dataclass_fields__}
        base: Shape = getattr(pair, role)
        return replace(base, **{name: value for name, value in given.items() if value is not None})

    pair = PairShape(shape("target"), shape("draft"), args["vocab_size"] or pair.vocab_size)
    target, draft = save_pair(args["out"], args["acceptance"], pair, args["seed"])
    print(f"{target}\n{draft}")


if __name__ == "__main__":
    main()

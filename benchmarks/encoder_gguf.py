"""Writes encoders of transformers into GGUF files, as llama.cpp's converter does; tests use it, too."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType

# What the file has for each part of a layer, by transformers' names without the layer's.
PARTS = {
    "bert": {
        "attention.self.query": "attn_q",
        "attention.self.key": "attn_k",
        "attention.self.value": "attn_v",
        "attention.output.dense": "attn_output",
        "attention.output.LayerNorm": "attn_output_norm",
        "intermediate.dense": "ffn_up",
        "output.dense": "ffn_down",
        "output.LayerNorm": "layer_output_norm",
    },
    "nomic-bert": {
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "attn_output_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_mlp_layernorm": "layer_output_norm",
    },
}
OTHERS = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
HEADS = {
    "bert.pooler.dense": "cls",
    "classifier": "cls.output",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
NAMED = {"bos": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]", "padding": "[PAD]", "mask": "[MASK]"}


def save_encoder(
    path: Path,
    module: Any,
    architecture: str,
    kind: str = "F32",
    tokens: list[str] | None = None,
    **more: Any,
) -> None:
    """Writes transformers' ``module``, a base model or a classifier, whose matrices are then those that the
    file has in ``kind``. ``tokens`` are as in transformers' vocabulary. ``more``: metadata by their keys,
    without the architecture."""
    config = module.config
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    offset = _offset(module)
    writer.add_context_length(config.max_position_embeddings - offset)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    if architecture == "nomic-bert":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    metadata = {"attention.causal": False, "pooling_type": 1} | more
    for key, value in metadata.items():
        if value is None:
            continue
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        (writer.add_array if isinstance(value, list) else add[type(value)])(f"{architecture}.{key}", value)
    if tokens is not None:
        _add_tokens(writer, tokens, config.type_vocab_size)
    joined: dict[str, list[torch.Tensor]] = {}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            base, _, suffix = name.rpartition(".")
            theirs = _name(base, architecture)
            if theirs is None:
                continue
            values = parameter.numpy()
            is_small = parameter.dim() == 1 or theirs in ("position_embd", "token_types")
            own = GGMLQuantizationType["F32" if is_small else kind]
            data = gguf.quantize(np.ascontiguousarray(values), own)
            parameter.copy_(torch.from_numpy(gguf.dequantize(data, own)).view(parameter.shape))
            if theirs == "position_embd":
                data = np.ascontiguousarray(parameter.numpy()[offset:])
            if base.endswith(("q_proj", "k_proj", "v_proj")):
                joined.setdefault(f"{theirs}.{suffix}", []).append(torch.from_numpy(data))
                continue
            writer.add_tensor(f"{theirs}.{suffix}", data, raw_dtype=own)
        for name, parts in joined.items():
            writer.add_tensor(name, torch.cat(parts).numpy(), raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _offset(module: Any) -> int:
    """Returns how many positions RoBERTa has before the first token's, which files leave out."""
    return int(module.config.pad_token_id) + 1 if "roberta" in module.config.model_type else 0


def _name(base: str, architecture: str) -> str | None:
    if base in HEADS:
        return HEADS[base]
    base = base.removeprefix("bert.").removeprefix("roberta.").removeprefix("model.")
    if base.startswith("pooler."):
        return None
    if base in OTHERS:
        return OTHERS[base]
    number, _, part = base.removeprefix("encoder.layer.").removeprefix("layers.").partition(".")
    if part.removeprefix("self_attn.") in ("q_proj", "k_proj", "v_proj"):
        return f"blk.{number}.attn_qkv"
    return f"blk.{number}.{PARTS[architecture][part]}"


def _add_tokens(writer: GGUFWriter, tokens: list[str], num_types: int) -> None:
    """Adds a vocabulary: what begins a word has a mark, what goes on has none."""
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_type_count(num_types)
    spelt = [
        token if token in SPECIAL else token[2:] if token.startswith("##") else f"\u2581{token}"
        for token in tokens
    ]
    writer.add_token_list(spelt)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens])
    for name, token in NAMED.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", tokens.index(token))

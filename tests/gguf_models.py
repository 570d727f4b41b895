"""GGUF files for tests, written by the package gguf from transformers' modules or with random blocks."""

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import AutoModelForCausalLM

from tests import gguf_latent
from tests.gguf_blocks import HALVES, random_blocks
from truedraft.engine.formats.gguf_file import read_gguf
from truedraft.engine.gguf.places import num_bytes

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "glm": "chatglm",
    "hunyuan_v1_dense": "hunyuan-dense",
    "olmo3": "olmo2",
    "granitemoeshared": "granitemoe",
    **dict.fromkeys(gguf_latent.MODEL_TYPES, "deepseek2"),
}
# Files of these say whether there is a window.
WITH_WINDOWS = ("mistral", "mixtral", "phi3", "gemma2", "gemma3_text", "gpt_oss", "olmo3", "exaone4")
# What the package quantises itself.
WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32")


def save_gguf(path: Path, config: Any, kind: str = "Q8_0", *, seed: int = 3, **more: Any) -> Any:
    """Returns transformers' module with the dequantised weights. ``kind``: of all matrices; embeddings are
    Q8_0. Types that the package cannot write get random blocks. ``more``: metadata, by their keys;
    ``value_kind`` and ``embedding_kind`` are other types of those matrices; ``rope_freqs`` a tensor;
    ``further`` are tensors of one more layer, which predicts further tokens; ``is_split``: those of latent
    attention are as newer files have them."""
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    value_kind, rope_freqs = more.pop("value_kind", kind), more.pop("rope_freqs", None)
    embedding_kind = more.pop("embedding_kind", "Q8_0")
    writer = GGUFWriter(path, architecture)
    further, is_split = more.pop("further", {}), more.pop("is_split", True)
    writer.add_block_count(config.num_hidden_layers + bool(further))
    for name, tensor in further.items():
        writer.add_tensor(f"blk.{config.num_hidden_layers}.{name}", tensor)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if architecture == "deepseek2":
        gguf_latent.add_metadata(writer, config, is_split)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    head_size = getattr(module.model.layers[0].self_attn, "head_dim", None)
    if architecture != "deepseek2":
        writer.add_key_length(head_size)
    if architecture in ("phi3", "glm4moe", "glm4", "chatglm"):
        writer.add_rope_dimension_count(int(head_size * rope["partial_rotary_factor"]))
    if architecture in ("granite", "granitemoe"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "phi3":
        for length in ("long", "short"):
            if f"{length}_factor" in rope:
                factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
                writer.add_tensor(f"rope_factors_{length}.weight", factors)
        if "long_factor" in rope:
            original = rope["original_max_position_embeddings"]
            stretch = math.log(config.max_position_embeddings / original) / math.log(original)
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + stretch))
    if config.model_type in WITH_WINDOWS:
        writer.add_sliding_window(config.sliding_window or 0)
    _add_experts(writer, config)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    for key, value in more.items():
        add_key(writer, key, value)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    (number,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(module.named_parameters()):
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)  # ones and zeros would hide a mistake
            base, suffix = name.rsplit(".", 1)
            if base.endswith(".experts"):
                _write_experts(writer, name, parameter, config, kind, seed=index)
                continue
            theirs = f"{names.get_name(base.replace('moe.router', 'moe.gate'))}.{suffix}"
            if suffix == "sinks":
                theirs = f"blk.{base.split('.')[2]}.attn_sinks.weight"
            own = embedding_kind if "embed" in name else value_kind if ".v_proj" in name else kind
            values = parameter.numpy()
            if ".shared_mlp.input_linear." in name:
                _write_shared(writer, f"blk.{base.split('.')[2]}", parameter, own, seed=index)
                continue
            if name.endswith("kv_b_proj.weight") and is_split:
                for theirs, array, view in gguf_latent.split(name, parameter, config):
                    data, dense = _quantised(array, kind, seed=index)
                    view.copy_(torch.from_numpy(dense).view(view.shape))
                    writer.add_tensor(theirs, data, raw_dtype=GGMLQuantizationType[kind])
                continue
            if ".mlp.gate." in name or ".router." in name or "shared_expert_gate" in name:
                writer.add_tensor(theirs, values[0] if len(values) == 1 else values)
                continue
            if parameter.dim() == 1:
                stored = values + 1 if architecture.startswith("gemma") else values
                writer.add_tensor(theirs, _permuted(stored, name, config, architecture))
                continue
            data, dense = _quantised(values, own, seed=index)
            parameter.copy_(torch.from_numpy(dense))
            data = _permuted(data, name, config, architecture)
            writer.add_tensor(theirs, data, raw_dtype=GGMLQuantizationType[own])
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_()
                writer.add_tensor(f"blk.{name.split('.')[2]}.exp_probs_b.bias", buffer.numpy())
    finish(writer)
    return module


def finish(writer: GGUFWriter) -> None:
    """Writes what has been added, and closes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def join(source: Path, path: Path) -> None:
    """Copies a file, with queries, keys and values of each layer joined, and gates with what they gate."""
    file = read_gguf(str(source))
    writer = GGUFWriter(path, file.architecture)
    for key, value in file.metadata.items():
        if not key.startswith(("general.", "GGUF.")):
            add_key(writer, key, value)
    groups: dict[str, list[str]] = {}
    for name in file.tensors:
        whole = re.sub(r"\.attn_[qkv]\.", ".attn_qkv.", name)
        groups.setdefault(re.sub(r"\.ffn_(gate|up)_exps\.", ".ffn_gate_up_exps.", whole), []).append(name)
    order = ("attn_q", "attn_k", "attn_v", "ffn_gate_exps", "ffn_up_exps")
    for whole, names in groups.items():
        names.sort(key=lambda name: order.index(name.split(".")[2]) if len(names) > 1 else 0)
        places = [file.tensors[name] for name in names]
        parts = [
            np.frombuffer(place.data, np.uint8, num_bytes(place), place.offset).reshape(*place.shape[:-1], -1)
            if len(place.shape) > 1
            else np.frombuffer(place.data, "<f4", place.shape[0], place.offset)
            for place in places
        ]
        (kind,) = {GGMLQuantizationType(place.type) for place in places}
        data = np.concatenate(parts, axis=1 if whole.endswith("_exps.weight") else 0)
        writer.add_tensor(whole, data, raw_dtype=None if data.ndim == 1 else kind)
    finish(writer)


def _add_experts(writer: GGUFWriter, config: Any) -> None:
    number = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not number:
        return
    writer.add_expert_count(number)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type in ("qwen2_moe", "qwen3_moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if config.model_type == "glm4_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _write_shared(writer: GGUFWriter, layer: str, parameter: torch.Tensor, kind: str, seed: int) -> None:
    """Splits Granite's gates of the experts that all tokens take from what they gate."""
    for part, rows in zip(("gate", "up"), parameter.chunk(2), strict=True):
        data, dense = _quantised(rows.numpy(), kind, seed)
        rows.copy_(torch.from_numpy(dense))
        writer.add_tensor(f"{layer}.ffn_{part}_shexp.weight", data, raw_dtype=GGMLQuantizationType[kind])


def _write_experts(
    writer: GGUFWriter, name: str, parameter: torch.Tensor, config: Any, kind: str, seed: int
) -> None:
    """Splits transformers' parameter of all experts into gates and what they gate."""
    is_gpt_oss, is_bias = config.model_type == "gpt_oss", name.endswith("_bias")
    if is_bias:
        parameter.add_(torch.randn_like(parameter) * 0.3)
    rows = parameter.transpose(1, 2) if is_gpt_oss and not is_bias else parameter
    parts = {"down": rows}
    if "gate_up" in name:
        half = rows.shape[1] // 2
        is_paired = (rows[:, ::2], rows[:, 1::2]), (rows[:, :half], rows[:, half:])
        parts = dict(zip(("gate", "up"), is_paired[0 if is_gpt_oss else 1], strict=True))
    for part, values in parts.items():
        theirs = f"blk.{name.split('.')[2]}.ffn_{part}_exps.{'bias' if is_bias else 'weight'}"
        array = np.ascontiguousarray(values.numpy())
        if is_bias:
            writer.add_tensor(theirs, array)
            continue
        data, dense = _quantised(array, kind, seed)
        values.copy_(torch.from_numpy(dense.reshape(array.shape)))
        writer.add_tensor(theirs, data, raw_dtype=GGMLQuantizationType[kind])


def _quantised(values: Any, kind: str, seed: int) -> tuple[Any, Any]:
    """The blocks, and what they stand for."""
    number = GGMLQuantizationType[kind]
    if kind in WRITTEN:
        data = gguf.quantize(np.ascontiguousarray(values), number)
    else:
        assert kind in HALVES
        rows, columns = math.prod(values.shape[:-1]), values.shape[-1]
        data = random_blocks(kind, rows, columns, seed=seed).data.reshape(*values.shape[:-1], -1)
    return data, gguf.dequantize(data, number)


def _permuted(rows: Any, name: str, config: Any, architecture: str) -> Any:
    """Orders queries and keys as llama.cpp's converter does: halves become pairs."""
    is_paired = architecture in ("llama", "granite", "granitemoe", "smollm3")
    if not is_paired or not (".q_proj." in name or ".k_proj." in name):
        return rows
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    return np.ascontiguousarray(
        rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    )


def add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        add[type(value)](key, value)

"""Layers with a running state in GGUF files: which keys tell of them, and how their tensors are stored.

llama.cpp multiplies by what a file has: decay rates where transformers has the logarithms of their negatives,
and weights of convolutions without a dimension of one. Value heads of Gated DeltaNet may lie tiled
(``head_order``).
"""

import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.formats.gguf_file import GgufError, GgufFile
from truedraft.engine.models.gguf_experts import LAYER
from truedraft.engine.models.gguf_keys import GgufKeys

# Files of these architectures have value heads in the other order, or halves of heads as pairs of neighbours.
TILED, PAIRED = ("qwen35", "qwen35moe"), ("granitehybrid", "llama")
# Keys of these architectures with a number for each layer are zero for layers that have no such part.
WITH_ZEROS = ("granitehybrid", "lfm2")
PER_LAYER = ("attention.head_count_kv", "feed_forward_length")
# What a file calls transformers' parameters of a layer, where the package's table has other names or none.
OTHERS: dict[str, tuple[str, ...]] = {
    f"{module}.{name}": (theirs,)
    for module in ("linear_attn", "mamba")
    for name, theirs in {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}.items()
}
OTHERS |= {
    "shared_mlp.input_linear.weight": ("ffn_gate.weight", "ffn_up.weight"),
    "shared_mlp.output_linear.weight": ("ffn_down.weight",),
}
LINEAR, FULL = "linear_attention", "full_attention"
FULL_ATTENTION_INTERVAL = 4


def tensors_of(name: str) -> tuple[str, ...] | None:
    """Returns what a file calls transformers' ``name``, in parts that lie one after the other; None if the
    package's table says it."""
    found = LAYER.fullmatch(name)
    theirs = OTHERS.get(found[2]) if found else None
    return None if found is None or theirs is None else tuple(f"blk.{found[1]}.{each}" for each in theirs)


def stored_shape(name: str, shape: Sequence[int], config: Any) -> tuple[int, ...]:
    """Returns the shape in a file of each part of transformers' ``name``, which is of the shape ``shape``."""
    if len(shape) == 3 and name.endswith(("conv.weight", "conv1d.weight")):
        return shape[0], shape[2]
    if name.endswith((".mamba.A_log", ".mamba.D")):
        return shape[0], 1
    if name.endswith(".mamba.norm.weight"):
        return config.mamba_n_groups, shape[0] // config.mamba_n_groups
    parts = tensors_of(name) or ("",)
    return shape[0] // len(parts), *shape[1:]


def from_file(name: str, tensor: torch.Tensor, path: str) -> torch.Tensor:
    """Returns transformers' ``name`` of what the file has for it."""
    if name.endswith(("conv.weight", "conv1d.weight")):
        return tensor[:, None]
    if name.endswith(".A_log"):
        if not (tensor < 0).all():
            raise ModelLoadError(f"{path} is damaged: {name} has decay rates that are not below zero")
        return (-tensor.double()).log().float().flatten()
    return tensor.flatten() if name.endswith((".mamba.D", ".mamba.norm.weight")) else tensor


def from_file_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of what ``from_file`` makes."""
    if name.endswith(("conv.weight", "conv1d.weight")):
        return shape[0], 1, *shape[1:]
    return (prod(shape),) if name.endswith((".A_log", ".mamba.D", ".mamba.norm.weight")) else shape


def predicts_further(name: str, config: Any) -> bool:
    """Tells whether a file's tensor is of a layer that predicts further tokens, which is not used."""
    found = re.match(r"blk\.(\d+)\.", name)
    first = config.num_hidden_layers
    return found is not None and first <= int(found[1]) < first + getattr(config, "num_further_layers", 0)


def hybrid_settings(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of transformers' config; ``found`` are those that all architectures have."""
    return SETTINGS[file.architecture](file, keys, dict(found))


def _lfm2(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    return found | {
        "norm_eps": found.pop("rms_norm_eps"),
        "layer_types": _layer_types(keys, found, "conv"),
        "conv_L_cache": keys.needed("shortconv.l_cache", int),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


def _qwen35(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    # Layers that predict further tokens come last.
    further = keys.says("nextn_predict_layers", 0)
    layers = found["num_hidden_layers"] - further
    if not 0 <= further <= layers:
        raise GgufError(f"{file.path} is damaged: {further} layers predict further tokens")
    head_size = keys.needed("ssm.state_size", int)
    heads, key_heads = keys.needed("ssm.time_step_rank", int), keys.needed("ssm.group_count", int)
    if heads * head_size != keys.needed("ssm.inner_size", int) or heads % key_heads:
        raise GgufError(
            f"{file.path} is damaged: {heads} value heads of {head_size} numbers cannot share {key_heads} "
            "key heads and make up its ssm.inner_size"
        )
    found["rope_parameters"] |= _partly_rotated(keys, found["head_dim"])
    return found | {
        "num_hidden_layers": layers,
        "num_further_layers": further,
        "layer_types": _qwen35_layers(keys, layers, further),
        "linear_conv_kernel_dim": keys.needed("ssm.conv_kernel", int),
        "linear_key_head_dim": head_size,
        "linear_value_head_dim": head_size,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
    }


def _qwen35_layers(keys: GgufKeys, layers: int, further: int) -> list[str]:
    recurrent = keys.listed("attention.recurrent_layers")
    interval = keys.number("full_attention_interval", int, FULL_ATTENTION_INTERVAL)
    if recurrent is None:
        recurrent = [(layer + 1) % interval != 0 for layer in range(layers)] + [False] * further
    if len(recurrent) != layers + further or any(recurrent[layers:]):
        raise GgufError(f"{keys.path} has {keys.prefix}attention.recurrent_layers of other layers")
    return [LINEAR if each else FULL for each in recurrent[:layers]]


def _partly_rotated(keys: GgufKeys, head_size: int) -> dict[str, Any]:
    """Returns how much of a head is rotated. Positions of a text are the same in all dimensions of an image,
    so that it does not matter which turns which pair; but one that none of them turns is not rotated."""
    size = keys.number("rope.dimension_count", int, head_size)
    if size > head_size or size % 2 or int(head_size * (size / head_size)) != size:
        raise GgufError(
            f"{keys.path} rotates {size} numbers of a head of {head_size}, which is not supported"
        )
    sections = keys.listed("rope.dimension_sections")
    if sections is None or len(sections) < 3:
        raise GgufError(f"{keys.path} does not say its model's {keys.prefix}rope.dimension_sections")
    if any(pair >= 3 * sections[pair % 3] for pair in range(size // 2)):
        raise GgufError(
            f"{keys.path} has {keys.prefix}rope.dimension_sections {sections}, which leave out some of "
            f"{size // 2} pairs of numbers: that is not served"
        )
    return {"partial_rotary_factor": size / head_size, "mrope_section": sections[:3]}


def _granite(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    inner, heads = keys.needed("ssm.inner_size", int), keys.needed("ssm.time_step_rank", int)
    hidden, layer_types = found["hidden_size"], _layer_types(keys, found, LINEAR)
    if inner % hidden or inner % heads:
        raise GgufError(
            f"{file.path} has granitehybrid.ssm.inner_size {inner}, which is no multiple of its "
            f"embedding_length {hidden} and its {heads} heads"
        )
    keys.expect("expert_shared_feed_forward_length", 0, found["intermediate_size"])
    rotates = keys.says("rope.scaling.finetuned", True)
    scale = keys.says("attention.scale") or found["head_dim"] ** -0.5
    return found | {
        "layer_types": layer_types,
        "num_local_experts": 0,
        "shared_intermediate_size": found["intermediate_size"],
        "position_embedding_type": "rope" if rotates else None,
        "attention_multiplier": scale,
        "embedding_multiplier": keys.says("embedding_scale") or 1.0,
        "residual_multiplier": keys.says("residual_scale") or 1.0,
        "logits_scaling": keys.says("logit_scale") or 1.0,
        "attention_bias": _has(file, "attn_q.bias"),
        **_mamba(file, keys),
        "mamba_expand": inner // hidden,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
    }


def _mamba(file: GgufFile, keys: GgufKeys) -> dict[str, Any]:
    return {
        "mamba_n_groups": keys.needed("ssm.group_count", int),
        "mamba_d_state": keys.needed("ssm.state_size", int),
        "mamba_d_conv": keys.needed("ssm.conv_kernel", int),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
    }


def _layer_types(keys: GgufKeys, found: dict[str, Any], other: str) -> list[str]:
    """Returns which layers are of attention: those with heads of keys."""
    counts, layers = keys.listed("attention.head_count_kv"), found["num_hidden_layers"]
    if counts is None or len(counts) != layers:
        raise GgufError(
            f"{keys.path} does not say of each of its {layers} layers whether it has attention "
            f"({keys.prefix}attention.head_count_kv)"
        )
    return [FULL if count else other for count in counts]


def _has(file: GgufFile, name: str) -> bool:
    return any(tensor.endswith(f".{name}") for tensor in file.tensors)


SETTINGS: dict[str, Callable[[GgufFile, GgufKeys, dict[str, Any]], dict[str, Any]]] = {
    "granitehybrid": _granite,
    "lfm2": _lfm2,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
}

"""Reads layers with a running state in GGUF files: their keys, and how their tensors are stored.

llama.cpp multiplies by the stored numbers as they are: decay rates where transformers has the logarithms of
their negatives, and weights of convolutions without a dimension of one. Value heads of Gated DeltaNet may lie
tiled (``head_order``).
"""

import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.formats.gguf_file import GgufError, GgufFile
from truedraft.engine.gguf.experts import LAYER
from truedraft.engine.gguf.keys import GgufKeys
from truedraft.engine.gguf.settings import (
    attends_with_biases,
    granite_multipliers,
    rotated_part,
    without_further_layers,
)

# Files of these architectures have tiled value heads, or rotate pairs of neighbours.
TILED = ("qwen35", "qwen35moe")
PAIRED = ("granite", "granitehybrid", "granitemoe", "llama", "smollm3")
QUERIES_OR_KEYS = re.compile(r"\.[qk]_proj(\.|$)")
# These keys have a value for each layer, which is zero for layers without such a part.
PER_LAYER = ("attention.head_count_kv", "feed_forward_length")
WITH_ZEROS = {
    **dict.fromkeys(("granitehybrid", "lfm2", "lfm2moe"), PER_LAYER[:1]),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), PER_LAYER),
}
GROUPED_NORMS = (".mamba.norm.weight", ".mixer.norm.weight")
# transformers joins the outputs of this module head by head.
BY_KEY_HEAD = "linear_attn.in_proj_qkvz.weight"
# Files have these names for transformers' parameters of a layer, where the package's table has other names or
# none.
OTHERS: dict[str, tuple[str, ...]] = {
    f"{module}.{name}": (theirs,)
    for module in ("linear_attn", "mamba", "mixer")
    for name, theirs in {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}.items()
}
OTHERS |= {
    "shared_mlp.input_linear.weight": ("ffn_gate.weight", "ffn_up.weight"),
    "shared_mlp.output_linear.weight": ("ffn_down.weight",),
    # llama.cpp has this name without an ending.
    "pre_ff_layernorm.weight": ("ffn_norm",),
    BY_KEY_HEAD: ("attn_qkv.weight", "attn_gate.weight"),
}
LINEAR, FULL = "linear_attention", "full_attention"
FULL_ATTENTION_INTERVAL = 4


def tensors_of(name: str, config: Any) -> tuple[str, ...] | None:
    """Returns a file's names for transformers' ``name``, as parts that lie one after the other; None if the
    package's table has it."""
    found = LAYER.fullmatch(name)
    theirs = OTHERS.get(found[2]) if found else None
    if found is None or theirs is None:
        return None
    if found[2].startswith("shared_mlp.") and config.num_local_experts:
        theirs = tuple(each.replace(".weight", "_shexp.weight") for each in theirs)
    return tuple(f"blk.{found[1]}.{each}" for each in theirs)


def stored_shapes(name: str, shape: Sequence[int], config: Any) -> list[tuple[int, ...]]:
    """Returns the shapes that the parts of transformers' ``name`` have in a file; ``shape`` is the
    parameter's."""
    if len(shape) == 3 and name.endswith(("conv.weight", "conv1d.weight")):
        return [(shape[0], shape[2])]
    if name.endswith((".mamba.A_log", ".mixer.A_log", ".mamba.D", ".mixer.D")):
        return [(shape[0], 1)]
    if name.endswith(GROUPED_NORMS):
        groups = config.n_groups if ".mixer." in name else config.mamba_n_groups
        return [(groups, shape[0] // groups)]
    if name.endswith(BY_KEY_HEAD):
        gates = config.linear_num_value_heads * config.linear_value_head_dim
        return [(shape[0] - gates, shape[1]), (gates, shape[1])]
    parts = tensors_of(name, config) or ("",)
    return [(shape[0] // len(parts), *shape[1:])] * len(parts)


def is_paired(architecture: str, name: str) -> bool:
    """Tells whether llama.cpp has reordered the rows of transformers' ``name``: in the files of some
    architectures it rotates pairs of neighbours where transformers rotates halves."""
    return architecture in PAIRED and QUERIES_OR_KEYS.search(name) is not None


def rows_of_halves(name: str, rows: int, config: Any) -> npt.NDArray[np.int64]:
    """Returns the places in a file of the rows of queries or keys, which ``is_paired``."""
    is_query = ".q_proj" in name
    heads = config.num_attention_heads if is_query else config.num_key_value_heads
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def rows_by_key_head(name: str, config: Any) -> npt.NDArray[np.int64] | None:
    """Returns the places in a file of the rows of transformers' ``name``; None if they are in order."""
    if not name.endswith(BY_KEY_HEAD):
        return None
    heads, keys = config.linear_num_key_heads, config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    parts = np.split(np.arange(2 * keys + 2 * values), [keys, 2 * keys, 2 * keys + values])
    return np.concatenate([part.reshape(heads, -1) for part in parts], axis=1).ravel()


def from_file(name: str, tensor: torch.Tensor, path: str) -> torch.Tensor:
    """Makes transformers' ``name`` of the file's tensor for it."""
    if name.endswith(("conv.weight", "conv1d.weight")):
        return tensor[:, None]
    if name.endswith(".A_log"):
        if not (tensor < 0).all():
            raise ModelLoadError(f"{path} is damaged: {name} has decay rates that are not below zero")
        return (-tensor.double()).log().float().flatten()
    return tensor.flatten() if name.endswith((".mamba.D", ".mixer.D", *GROUPED_NORMS)) else tensor


def from_file_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the tensor that ``from_file`` makes."""
    if name.endswith(("conv.weight", "conv1d.weight")):
        return shape[0], 1, *shape[1:]
    return (prod(shape),) if name.endswith((".A_log", ".mamba.D", ".mamba.norm.weight")) else shape


def predicts_further(name: str, config: Any) -> bool:
    """Tells whether a file's tensor belongs to a layer that predicts further tokens, which is not used."""
    found = re.match(r"blk\.(\d+)\.", name)
    first = config.num_hidden_layers
    return found is not None and first <= int(found[1]) < first + getattr(config, "num_further_layers", 0)


def hybrid_settings(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    """Returns settings of transformers' config; ``found`` has those that all architectures share."""
    return SETTINGS[file.architecture](file, keys, dict(found))


def _lfm2(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    return _lfm2_moe(file, keys, found) | {"block_auto_adjust_ff_dim": False}


def _lfm2_moe(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    return found | {
        "norm_eps": found.pop("rms_norm_eps"),
        "layer_types": _layer_types(keys, found, "conv"),
        "conv_L_cache": keys.needed("shortconv.l_cache", int),
        "conv_bias": False,
    }


def _qwen35(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    found |= without_further_layers(keys, found)
    layers, further = found["num_hidden_layers"], found["num_further_layers"]
    head_size = keys.needed("ssm.state_size", int)
    heads, key_heads = keys.needed("ssm.time_step_rank", int), keys.needed("ssm.group_count", int)
    if heads * head_size != keys.needed("ssm.inner_size", int) or heads % key_heads:
        raise GgufError(
            f"{file.path} is damaged: {heads} value heads of {head_size} numbers cannot share {key_heads} "
            "key heads and make up its ssm.inner_size"
        )
    found["rope_parameters"] |= _partly_rotated(keys, file.architecture, found["head_dim"])
    return found | {
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


def _partly_rotated(keys: GgufKeys, architecture: str, head_size: int) -> dict[str, Any]:
    """Returns how much of a head is rotated. A text's positions are the same in all dimensions of an image,
    so the dimension that rotates a pair does not matter; a pair that none of them rotates stays as it is."""
    part = rotated_part(keys, head_size)
    size = round(head_size * part["partial_rotary_factor"])
    if architecture == "qwen3next":
        return part
    sections = keys.listed("rope.dimension_sections")
    if sections is None or len(sections) < 3:
        raise GgufError(f"{keys.path} does not say its model's {keys.prefix}rope.dimension_sections")
    if any(pair >= 3 * sections[pair % 3] for pair in range(size // 2)):
        raise GgufError(
            f"{keys.path} has {keys.prefix}rope.dimension_sections {sections}, which leave out some of "
            f"{size // 2} pairs of numbers: that is not served"
        )
    return part | {"mrope_section": sections[:3]}


def _granite(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    inner, heads = _inner_size(keys)
    hidden, layer_types = found["hidden_size"], _layer_types(keys, found, LINEAR)
    if inner % hidden:
        raise GgufError(
            f"{file.path} has granitehybrid.ssm.inner_size {inner}, which is no multiple of its "
            f"embedding_length {hidden}"
        )
    if not keys.says("expert_count", 0):
        keys.expect("expert_shared_feed_forward_length", 0, found["intermediate_size"])
    rotates = keys.says("rope.scaling.finetuned", True)
    return found | {
        "layer_types": layer_types,
        "num_local_experts": 0,
        "shared_intermediate_size": found["intermediate_size"],
        "position_embedding_type": "rope" if rotates else None,
        **granite_multipliers(keys, found["head_dim"]),
        "attention_bias": attends_with_biases(file),
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


def _falcon(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    """Leaves all multipliers at one: files have weights that are multiplied already."""
    inner, heads = _inner_size(keys)
    return found | {
        **_mamba(file, keys),
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_rms_norm": _has(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mlp_bias": _has(file, "ffn_up.bias"),
    }


def _inner_size(keys: GgufKeys) -> tuple[int, int]:
    """Returns the number of a recurrence's channels, and of its heads."""
    inner, heads = keys.needed("ssm.inner_size", int), keys.needed("ssm.time_step_rank", int)
    if inner % heads:
        raise GgufError(f"{keys.path} is damaged: {heads} heads cannot make up {keys.prefix}ssm.inner_size")
    return inner, heads


def _nemotron(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    inner, heads = _inner_size(keys)
    numbers = without_further_layers(keys, found)
    epsilon = keys.needed("attention.layer_norm_epsilon", float)
    mixers, mlps = (_per_layer(keys, found, key) for key in PER_LAYER)
    mlp = "moe" if file.architecture == "nemotron_h_moe" else "mlp"
    kinds = [mlp if size else FULL if count else LINEAR for count, size in zip(mixers, mlps, strict=True)]
    found.pop("rope_parameters")  # Nothing is rotated, whatever share of a head the file names.
    keys.says("rope.dimension_count")
    return found | {
        **numbers,
        "layers_block_type": kinds[: numbers["num_hidden_layers"]],
        "layer_norm_epsilon": found.pop("rms_norm_eps", epsilon),
        "n_groups": keys.needed("ssm.group_count", int),
        "ssm_state_size": keys.needed("ssm.state_size", int),
        "conv_kernel": keys.needed("ssm.conv_kernel", int),
        "use_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mlp_bias": _has(file, "ffn_up.bias"),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
    }


def _per_layer(keys: GgufKeys, found: dict[str, Any], key: str) -> list[int]:
    """Returns a value for each layer."""
    numbers, layers = keys.listed(key), found["num_hidden_layers"]
    if numbers is None or len(numbers) != layers:
        raise GgufError(f"{keys.path} does not say {keys.prefix}{key} of each of its {layers} layers")
    return numbers


def _layer_types(keys: GgufKeys, found: dict[str, Any], other: str) -> list[str]:
    """Returns which layers attend: those with key heads."""
    return [FULL if count else other for count in _per_layer(keys, found, "attention.head_count_kv")]


def _has(file: GgufFile, name: str) -> bool:
    return any(tensor.endswith(f".{name}") for tensor in file.tensors)


SETTINGS: dict[str, Callable[[GgufFile, GgufKeys, dict[str, Any]], dict[str, Any]]] = {
    "falcon-h1": _falcon,
    "granitehybrid": _granite,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "qwen3next": _qwen35,
}

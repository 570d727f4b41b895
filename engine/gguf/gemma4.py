"""Reads Gemma 4 in GGUF files: heads of two sizes, and tensors that are no parameters.

llama.cpp rotates whole heads, and divides the frequencies of pairs that must stay by 1e30. Layers that read
other layers' keys and values read there those of the last two layers that store any, the first of which has a
window; transformers takes the last one of the same type.
"""

from typing import Any

from truedraft.engine.formats.gguf_file import GgufError, GgufFile
from truedraft.engine.gguf.keys import GgufKeys
from truedraft.engine.gguf.settings import ROTARY_FACTORS, rotary_factors

# These keys have a value for each layer, or one for all.
BY_LAYER = ("attention.head_count_kv", "feed_forward_length")
SLIDING, FULL = "sliding_attention", "full_attention"
# Keys of sizes end so for layers with a window.
ENDS = {FULL: "", SLIDING: "_swa"}
UNTURNED = 1e30


def gemma4_settings(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    """Returns settings of transformers' config; raises ``GgufError`` for settings that are not served."""
    sizes = {kind: _head_size(keys, end) for kind, end in ENDS.items()}
    types = _layer_types(keys, found["num_hidden_layers"])
    shared = _count(keys, "attention.shared_kv_layers")
    storing, inputs = len(types) - shared, _count(keys, "embedding_length_per_layer_input", None)
    if shared and not (types[: max(storing, 0)][-2:] == [SLIDING, FULL] and inputs):
        raise GgufError(
            f"{file.path} has {shared} layers that read others' keys and values, which are served only after "
            "a layer with a window and one without, and with numbers of tokens for each layer"
        )
    inner, is_wide = _inner_size(keys, len(types), storing)
    heads = _kv_heads(keys, types, found["num_attention_heads"])
    own = {"head_dim": sizes[FULL], "num_key_value_heads": heads[FULL]}
    return {
        "layer_types": types,
        "sliding_window": keys.needed("attention.sliding_window", int),
        "head_dim": sizes[SLIDING],
        "num_key_value_heads": heads[SLIDING],
        "per_layer_config": {layer: dict(own) for layer, kind in enumerate(types) if kind == FULL},
        "rope_parameters": _rotary(file, keys, found["rope_parameters"], sizes[FULL]),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": found["vocab_size"],
        "intermediate_size": inner,
        "use_double_wide_mlp": is_wide,
        # A file has no tensor of values where keys serve as values, too.
        "attention_k_eq_v": f"blk.{types.index(FULL)}.attn_v.weight" not in file.tensors,
        # llama.cpp caps at 30 where a file does not say it, and transformers not at all.
        "final_logit_softcapping": keys.needed("final_logit_softcapping", float),
    }


def other_tensors(config: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of tensors that a file may have in addition to the module's parameters: factors that
    follow from the config, and keys and values of layers that read others'."""
    found: dict[str, tuple[int, ...]] = {ROTARY_FACTORS: (config.per_layer_config[FULL].head_dim // 2,)}
    layers = config.num_hidden_layers
    for layer in range(layers - config.num_kv_shared_layers, layers):
        own = config.per_layer_config[layer]
        rows = own.num_key_value_heads * own.head_dim
        found |= {f"blk.{layer}.attn_{part}.weight": (rows, config.hidden_size) for part in "kv"}
        found[f"blk.{layer}.attn_k_norm.weight"] = (own.head_dim,)
    return found


def _head_size(keys: GgufKeys, end: str) -> int:
    """Returns the size of queries, keys and values, which are rotated as a whole."""
    size: int = keys.needed(f"attention.key_length{end}", int)
    for key in (f"attention.value_length{end}", f"rope.dimension_count{end}"):
        if keys.needed(key, int) != size:
            raise GgufError(f"{keys.path} has {keys.prefix}{key} {keys.says(key)}; only {size} is served")
    return size


def _count(keys: GgufKeys, key: str, default: int | None = 0) -> int:
    """Returns a number that may be zero; without a ``default`` the file must have it."""
    if keys.says(key, default) == 0:
        return 0
    number: int = keys.needed(key, int)
    return number


def _layer_types(keys: GgufKeys, layers: int) -> list[str]:
    slides = keys.listed("attention.sliding_window_pattern") or []
    # transformers takes the window from a last layer that has one.
    if len(slides) != layers or not all(isinstance(each, bool) for each in slides) or slides[-1]:
        raise GgufError(
            f"{keys.path} has {keys.prefix}attention.sliding_window_pattern that does not say of each of its "
            f"{layers} layers whether it has a window, and of the last one that it has none"
        )
    return [SLIDING if each else FULL for each in slides]


def _of_each_layer(keys: GgufKeys, key: str, layers: int) -> list[int]:
    said = keys.listed(key) or [keys.needed(key, int)] * layers
    if len(said) != layers or not all(isinstance(each, int) and each > 0 for each in said):
        raise GgufError(f"{keys.path} has {keys.prefix}{key} that is no number above zero for each layer")
    return said


def _kv_heads(keys: GgufKeys, types: list[str], heads: int) -> dict[str, int]:
    """Returns the number of key heads of the layers of each type."""
    said = _of_each_layer(keys, "attention.head_count_kv", len(types))
    found = {kind: {each for each, own in zip(said, types, strict=True) if own == kind} for kind in types}
    if any(len(numbers) > 1 or heads % max(numbers) for numbers in found.values()):
        raise GgufError(
            f"{keys.path} has {keys.prefix}attention.head_count_kv that {heads} heads of queries cannot "
            "share, or that differ among layers of a type, which is not served"
        )
    (full,) = found[FULL]
    return {FULL: full, SLIDING: max(found.get(SLIDING, {full}))}


def _inner_size(keys: GgufKeys, layers: int, storing: int) -> tuple[int, bool]:
    """Returns the size of MLPs, and whether it is doubled in layers that read others' keys and values."""
    sizes = _of_each_layer(keys, "feed_forward_length", layers)
    for factor in (1, 2):
        if sizes == [sizes[0]] * storing + [factor * sizes[0]] * (layers - storing):
            return sizes[0], factor == 2
    raise GgufError(
        f"{keys.path} has {keys.prefix}feed_forward_length that differ from layer to layer otherwise than by "
        "twice as much in layers that read others' keys and values, which is not served"
    )


def _rotary(file: GgufFile, keys: GgufKeys, rope: dict[str, Any], size: int) -> dict[str, Any]:
    """Returns how layers of each type rotate; those without a window rotate the first pairs of a head."""
    if rope["rope_type"] != "default":
        raise GgufError(f"{file.path} scales its positions by {rope['rope_type']}, which gemma4 does not use")
    if ROTARY_FACTORS not in file.tensors:
        raise GgufError(f"{file.path} lacks weights of the model: {ROTARY_FACTORS}")
    factors = rotary_factors(file, ROTARY_FACTORS, size // 2)
    turned = sum(factor == 1 for factor in factors)
    part = 2 * turned / size
    if not turned or min(factors[turned:], default=UNTURNED) < UNTURNED * 0.999:
        raise GgufError(f"{file.path} has {ROTARY_FACTORS} that are not ones and then {UNTURNED:g}")
    if int(part * size // 2) != turned:
        raise GgufError(f"{file.path} turns {turned} of {size // 2} pairs of a head, which is not supported")
    return {
        SLIDING: {"rope_type": "default", "rope_theta": keys.needed("rope.freq_base_swa", float)},
        FULL: rope | {"rope_type": "proportional", "partial_rotary_factor": part},
    }

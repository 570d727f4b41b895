"""Reads settings that several architectures of GGUF files keep under the same keys."""

import math
from typing import Any

import numpy as np

from truedraft.engine.formats.gguf_file import GgufError, GgufFile
from truedraft.engine.gguf.keys import GgufKeys

# This tensor is no parameter: it holds divisors of the rotary frequencies.
ROTARY_FACTORS = "rope_freqs.weight"


def without_further_layers(keys: GgufKeys, found: dict[str, Any]) -> dict[str, int]:
    """Returns the numbers of the model's own layers: those that predict further tokens come last in a
    file."""
    further = keys.says("nextn_predict_layers", 0)
    layers = found["num_hidden_layers"] - further
    if not 0 <= further <= layers:
        raise GgufError(f"{keys.path} is damaged: {further} layers predict further tokens")
    return {"num_hidden_layers": layers, "num_further_layers": further}


def rotated_part(keys: GgufKeys, head_size: int) -> dict[str, float]:
    """Returns how much of a head is rotated."""
    size = keys.number("rope.dimension_count", int, head_size)
    if size > head_size or size % 2 or int(head_size * (size / head_size)) != size:
        raise GgufError(
            f"{keys.path} rotates {size} numbers of a head of {head_size}, which is not supported"
        )
    return {"partial_rotary_factor": size / head_size}


def attends_with_biases(file: GgufFile) -> bool:
    """Tells whether queries have biases, in a tensor of their own or joined with those of keys and values."""
    return any(name.endswith((".attn_q.bias", ".attn_qkv.bias")) for name in file.tensors)


def granite_multipliers(keys: GgufKeys, head_size: int) -> dict[str, float]:
    """Returns Granite's multipliers; a missing one, or zero, means that it does not multiply."""
    return {
        "attention_multiplier": keys.says("attention.scale") or head_size**-0.5,
        "embedding_multiplier": keys.says("embedding_scale") or 1.0,
        "residual_multiplier": keys.says("residual_scale") or 1.0,
        "logits_scaling": keys.says("logit_scale") or 1.0,
    }


def rotary_factors(file: GgufFile, name: str, count: int) -> list[float]:
    """Returns the divisors of the rotary frequencies."""
    place = file.tensors[name]
    if place.type != 0 or place.shape != (count,):
        raise GgufError(
            f"{file.path} has {name} of type {place.type} and shape {place.shape}, not F32 and {(count,)}"
        )
    numbers: list[float] = np.frombuffer(place.data, "<f4", count, place.offset).tolist()
    if not all(0 < number < math.inf for number in numbers):
        raise GgufError(f"{file.path} is damaged: {name} has numbers that nothing can be divided by")
    return numbers

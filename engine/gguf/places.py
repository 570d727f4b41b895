"""Checks the sizes of tensors in GGUF files, and takes joined tensors apart."""

import math
from collections.abc import Mapping
from dataclasses import replace

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from truedraft.engine.checkpoints.account import Shape, check_shape
from truedraft.engine.formats.gguf_file import GgufError, GgufFile, TensorPlace
from truedraft.engine.layers.quantised_blocks import TYPES

PLAIN_TYPES = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 30: np.dtype("<u2")}
# Queries, keys and values may be joined in one tensor.
JOINED, PARTS = ".attn_qkv.", (".attn_q.", ".attn_k.", ".attn_v.")


def num_bytes(place: TensorPlace) -> int:
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType(place.type)]
    return math.prod(place.shape) // int(block) * int(size)


def check_place(name: str, place: TensorPlace) -> None:
    """Raises ``GgufError`` for a tensor whose type is not served, or that lies past the end of its file."""
    try:
        kind = GGMLQuantizationType(place.type)
    except ValueError as error:
        raise GgufError(f"{place.path} has weights of the unknown type {place.type} ({name})") from error
    if kind.name not in TYPES and place.type not in PLAIN_TYPES:
        supported = ", ".join([*TYPES, "F32", "F16", "BF16"])
        raise GgufError(f"{place.path} has weights of type {kind.name} ({name}); supported are {supported}")
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if place.shape[-1] % block:
        raise GgufError(f"{place.path} is damaged: rows of {name} are no whole blocks")
    if place.offset + num_bytes(place) > len(place.data):
        raise GgufError(f"{place.path} is cut off: {name} lies past its end")


def taken_apart(file: GgufFile, needed: Mapping[str, Shape]) -> GgufFile:
    """Returns the file with separate queries, keys and values in place of joined ones: rows are whole blocks,
    so that some of them are a tensor like any other. ``needed`` has the shapes of the model's tensors by
    their names in files; some models need the joined one."""
    tensors: dict[str, TensorPlace] = {}
    for name, place in file.tensors.items():
        parts = [name.replace(JOINED, part) for part in PARTS]
        if name in needed or not needed.keys() >= set(parts) or file.tensors.keys() & set(parts):
            tensors[name] = place
            continue
        rows = [needed[part][0] for part in parts]
        whole = sum(rows), *needed[parts[0]][1:]
        check_shape(place.path, name, place.shape, whole, "its metadata")
        offset, row_size = place.offset, num_bytes(place) // whole[0]
        for part, count in zip(parts, rows, strict=True):
            tensors[part] = place._replace(shape=(count, *whole[1:]), offset=offset)
            offset += count * row_size
    return replace(file, tensors=tensors)

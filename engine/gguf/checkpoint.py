"""Gives the tensors of GGUF files transformers' names, and fills in defaults."""

import ctypes
import math
import mmap
from collections.abc import Iterable
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, GenerationConfig

from truedraft.engine.checkpoints.account import Account
from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.checkpoints.stacks import stored_tensors
from truedraft.engine.families.table import FAMILIES
from truedraft.engine.formats.gguf_file import GgufError, GgufFile, TensorPlace, read_gguf
from truedraft.engine.formats.gguf_tokenizer import Vocabulary, read_vocabulary
from truedraft.engine.gguf.config import LONG_FACTORS, MODEL_TYPES, SHORT_FACTORS, gguf_config
from truedraft.engine.gguf.experts import LAYER, stack_of, tensor_of
from truedraft.engine.gguf.gemma4 import other_tensors
from truedraft.engine.gguf.hybrids import (
    TILED,
    from_file,
    from_file_shape,
    is_paired,
    predicts_further,
    rows_by_key_head,
    rows_of_halves,
    stored_shapes,
    tensors_of,
)
from truedraft.engine.gguf.latent import split_heads
from truedraft.engine.gguf.places import PLAIN_TYPES, check_place, num_bytes, taken_apart
from truedraft.engine.gguf.settings import ROTARY_FACTORS, rotary_factors
from truedraft.engine.layers.quantised_blocks import TYPES, QuantisedBlocks
from truedraft.engine.native.library import load_library
from truedraft.engine.native.quantised import dequantise
from truedraft.engine.parameters import RECOMMENDED

# Files of these architectures may have divisors of the rotary frequencies.
DIVIDED = ("llama", "exaone4")
# The gate of Qwen's shared expert is a vector in GGUF files.
ONE_ROW = ".shared_expert_gate.weight"
FURTHER_LAYERS = "nextn_predict_layers"
# A layer that predicts further tokens has these tensors in addition to a usual layer's, by transformers'
# names.
OF_HEADS = {
    "eh_proj": "eh_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "shared_head.norm": "shared_head_norm",
    "shared_head.head": "shared_head_head",
    "embed_tokens": "embed_tokens",
}


class GgufCheckpoint(Checkpoint):
    """Reads a GGUF file by the names of transformers' module; ``files`` has these names."""

    def __init__(
        self, file: GgufFile, config: Any, names: dict[str, str], vocabulary: Vocabulary | None
    ) -> None:
        super().__init__({name: file.tensors[theirs].path for name, theirs in names.items()})
        self.file = file
        self.config = config
        self.names = names
        self.stacks = {name: stack for name in names if (stack := stack_of(name, file))}
        self.heads = {name: heads for name in names if (heads := split_heads(name, file.tensors))}
        self.is_tiled = file.architecture in TILED
        self.vocabulary = vocabulary
        self.factors: list[float] | None = None
        if file.architecture in DIVIDED and ROTARY_FACTORS in file.tensors:
            self.factors = rotary_factors(file, ROTARY_FACTORS, config.head_dim // 2)
        self._library: ctypes.CDLL | None = load_library()

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: self._read(name) for name in names}

    def shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        return {name: self._shape(name) for name in names}

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in self.stacks:
            stack = self.stacks[name]
            return stack.whole([self.file.tensors[part].shape for part in stack.parts])
        if (heads := self.heads.get(name)) is not None:
            return heads.whole(self.file.tensors[heads.keys].shape, self.file.tensors[heads.values].shape)
        first, *others = [self.file.tensors[part].shape for part in self._parts(name)]
        found = sum(shape[0] for shape in (first, *others)), *first[1:]
        return (1, *found) if name.endswith(ONE_ROW) and len(found) == 1 else from_file_shape(name, found)

    def blocks(self, name: str) -> QuantisedBlocks | None:
        if name in self.stacks or name in self.heads:
            return None
        parts = self._parts(name)
        found = [blocks for part in parts if (blocks := self._blocks(part)) is not None]
        if len(found) < len(parts) or len({blocks.type for blocks in found}) > 1:
            return None  # Joined tensors must have one type.
        data = found[0].data if len(found) == 1 else np.concatenate([blocks.data for blocks in found])
        return QuantisedBlocks(found[0].type, data, found[0].in_features, self._order(name))

    def expert_blocks(self, name: str, number: int) -> list[QuantisedBlocks]:
        found = [self._matrix(part, number) for part in self.stacks[name].parts]
        return [blocks for blocks in found if blocks is not None] if None not in found else []

    def head_blocks(self, name: str, number: int, is_turned: bool) -> QuantisedBlocks | None:
        if (heads := self.heads.get(name)) is None:
            return None
        part = heads.keys if is_turned else heads.values
        return self._matrix(part, number)

    def release(self) -> None:
        """Gives back pages that were read; embeddings are read again as they are looked up."""
        for part in self.file.parts:
            part.madvise(mmap.MADV_DONTNEED)

    def rotary_factors(self) -> torch.Tensor | None:
        return None if self.factors is None else torch.tensor(self.factors)

    def _parts(self, name: str) -> tuple[str, ...]:
        """Returns the file's tensors whose rows lie one after the other in transformers' ``name``."""
        return tensors_of(name, self.config) or (self.names[name],)

    def _blocks(self, theirs: str) -> QuantisedBlocks | None:
        place = self.file.tensors[theirs]
        if place.type not in TYPES.values():
            return None
        return QuantisedBlocks(place.type, self._data(place), place.shape[-1])

    def _matrix(self, theirs: str, number: int) -> QuantisedBlocks | None:
        """Returns one matrix of a stack."""
        if (blocks := self._blocks(theirs)) is None:
            return None
        rows = self.file.tensors[theirs].shape[1]
        data = blocks.data[number * rows : (number + 1) * rows]
        return QuantisedBlocks(blocks.type, data, blocks.in_features)

    def stored(self, theirs: str) -> torch.Tensor:
        """Returns a tensor as it lies in the file."""
        blocks, place = self._blocks(theirs), self.file.tensors[theirs]
        if blocks is not None and self._library is not None:
            return dequantise(self._library, blocks).view(place.shape)
        return self._plain(place)

    def _read(self, name: str) -> torch.Tensor:
        if name in self.stacks:
            stack = self.stacks[name]
            return stack.join([self.stored(part) for part in stack.parts])
        if (heads := self.heads.get(name)) is not None:
            return heads.join(self.stored(heads.keys), self.stored(heads.values))
        tensor = torch.cat([self.stored(part) for part in self._parts(name)])
        if name.endswith(ONE_ROW):
            return tensor.view(1, -1)
        tensor = from_file(name, tensor, self.file.path)
        order = self._order(name)
        adds_one = FAMILIES[self.config.model_type].norms == "plus one" and name.endswith("norm.weight")
        if adds_one and ".linear_attn." not in name:
            tensor = tensor - 1  # llama.cpp multiplies by the stored weight, transformers by one more.
        return tensor if order is None else tensor[torch.from_numpy(order)]

    def _plain(self, place: TensorPlace) -> torch.Tensor:
        data = self._data(place)
        if place.type == GGMLQuantizationType.BF16:
            # torch cannot take this type from numpy.
            return torch.from_numpy(data.copy()).view(torch.bfloat16).view(place.shape)
        if place.type in PLAIN_TYPES:
            return torch.from_numpy(data.copy().view(PLAIN_TYPES[place.type])).view(place.shape)
        return torch.from_numpy(gguf.dequantize(data, GGMLQuantizationType(place.type))).view(place.shape)

    def _data(self, place: TensorPlace) -> npt.NDArray[np.uint8]:
        """Returns the tensor's bytes [rows, bytes of a row] in the mapped file."""
        size = num_bytes(place)
        data = np.frombuffer(place.data, np.uint8, size, place.offset)
        return data.reshape(-1, size // math.prod(place.shape[:-1]))

    def _order(self, name: str) -> npt.NDArray[np.int64] | None:
        """Returns the order of rows that undoes llama.cpp's; None if it is the same."""
        if is_paired(self.file.architecture, name):
            return rows_of_halves(name, self.file.tensors[self.names[name]].shape[0], self.config)
        return rows_by_key_head(name, self.config)


def open_gguf(path: str) -> GgufCheckpoint:
    """Opens a file as a checkpoint; raises ``GgufError`` for files that cannot be served."""
    file = read_gguf(path)
    if file.architecture not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise GgufError(
            f"{path} has the architecture {file.architecture}; of GGUF files {known} are supported, of other "
            "models their safetensors checkpoints may be"
        )
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise GgufError(f"{path} is of the type {kind}, not a whole model")
    for name, place in file.tensors.items():
        check_place(name, place)
    vocabulary = read_vocabulary(file)
    config = gguf_config(file, vocabulary)
    file, names = named(file, config)
    return GgufCheckpoint(file, config, names, vocabulary)


def holds_head_alone(path: str) -> bool:
    """Tells whether a file has layers that predict further tokens, but no model before them."""
    names = _tensor_names(path)
    return any(".nextn." in name for name in names) and not any(name.startswith("blk.0.") for name in names)


def holds_further_layers(path: str) -> bool:
    """Tells whether a file has layers that predict further tokens."""
    return any(".nextn." in name for name in _tensor_names(path))


def _tensor_names(path: str) -> list[str]:
    try:
        return list(read_gguf(path).tensors)
    except (GgufError, OSError):  # Loading reports what is wrong.
        return []


def open_gguf_head(path: str, config: Any) -> tuple[GgufCheckpoint, int]:
    """Opens the layer of a file that predicts further tokens, after those of the model, if the file has one.
    ``config`` is of a model of such a layer alone. Also returns the layer's number, which its tensors have in
    transformers' names. Raises ``GgufError`` for files that cannot be served."""
    file = read_gguf(path)
    if MODEL_TYPES.get(file.architecture) != config.model_type:
        raise GgufError(
            f"{path} has the architecture {file.architecture}, which is not the target's {config.model_type}"
        )
    for name, place in file.tensors.items():
        check_place(name, place)
    further = file.metadata.get(f"{file.architecture}.{FURTHER_LAYERS}", 0)
    if further != 1:
        raise GgufError(
            f"{path} has {further} layers that predict further tokens "
            f"({file.architecture}.{FURTHER_LAYERS}); 1 is served"
        )
    number = file.metadata.get(f"{file.architecture}.block_count", 0) - further
    block = f"model.layers.{number}."
    file, found = named(file, config, number)
    names = {name: stored for name, stored in found.items() if name.startswith(block)}
    for ours, theirs in OF_HEADS.items():
        if (stored := f"blk.{number}.nextn.{theirs}.weight") in file.tensors:
            names[f"{block}{ours}.weight"] = stored
    return GgufCheckpoint(file, config, names, None), number


def generation_config(checkpoint: GgufCheckpoint) -> Any:
    vocabulary = checkpoint.vocabulary
    ids = sorted(vocabulary.end_ids) if vocabulary is not None else []
    metadata = checkpoint.file.metadata
    sampling = {name: metadata.get(f"general.sampling.{row.gguf_key}") for name, row in RECOMMENDED.items()}
    given = {name: value for name, value in sampling.items() if value is not None}
    return GenerationConfig(eos_token_id=ids or None, **given)


def check_complete(module: Any, checkpoint: GgufCheckpoint) -> None:
    """Checks that every parameter is there with the right shape, and that every tensor is one of them."""
    file, config = checkpoint.file, checkpoint.config
    account = Account(file.path, {name: place.shape for name, place in file.tensors.items()})
    for name, parameter in stored_tensors(module).items():
        if (heads := checkpoint.heads.get(name)) is not None:
            for half, size in heads.shapes(config).items():
                account.expect_shape(name, size, "its metadata", half)
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        shape, theirs = tuple(parameter.shape), checkpoint.names.get(name)
        stack = checkpoint.stacks.get(name)
        if name.endswith(ONE_ROW) and theirs is not None and len(file.tensors[theirs].shape) == 1:
            shape = shape[1:]
        parts = (tensors_of(name, config) or (theirs,)) if stack is None else stack.parts
        shapes = stored_shapes(name, shape, config) if stack is None else [stack.shape(shape)] * len(parts)
        for part, needed in zip(parts, shapes, strict=True):
            account.expect_shape(name, needed, "its metadata", part)
    if checkpoint.factors is not None:
        account.take(ROTARY_FACTORS)
    others = other_tensors(config) if file.architecture == "gemma4" else {}
    for name in sorted(account.left.keys() & others.keys()):
        account.expect_shape(name, others[name], "its metadata")
    for name in [name for name in account.left if predicts_further(name, config)]:
        account.take(name)
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        account.take(LONG_FACTORS)
        account.take(SHORT_FACTORS)
    account.close(
        f"has the tensor {{name}} of the shape {{value}}, which {file.architecture} models do not use"
    )


def named(file: GgufFile, config: Any, first: int = 0) -> tuple[GgufFile, dict[str, str]]:
    """Returns the file with its joined tensors taken apart, and its name for each of transformers' tensors,
    whose layers are numbered from ``first`` on."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    (architecture,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
    table = gguf.get_tensor_name_map(architecture, first + config.num_hidden_layers)
    candidates: dict[str, tuple[str, ...]] = {}
    needed = {}
    for unnumbered, parameter in stored_tensors(module).items():
        name = LAYER.sub(lambda match: f"model.layers.{first + int(match[1])}.{match[2]}", unnumbered)
        base, _, suffix = name.rpartition(".")
        if stack := stack_of(name, file):
            candidates[name] = stack.parts
        elif (heads := split_heads(name, file.tensors)) is not None:
            candidates[name] = heads.keys, heads.values
        elif (special := tensor_of(name)) is not None:
            candidates[name] = (special,)
        elif (others := tensors_of(name, config)) is not None:
            candidates[name] = others
        elif theirs := table.get_name(base) or table.get_name(base.replace("model.", "backbone.", 1)):
            candidates[name] = (f"{theirs}.{suffix}",)
            needed[f"{theirs}.{suffix}"] = tuple(parameter.shape)
    file = taken_apart(file, needed)
    return file, {name: own[0] for name, own in candidates.items() if file.tensors.keys() >= set(own)}

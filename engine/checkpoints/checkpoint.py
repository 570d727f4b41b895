"""A checkpoint's tensors by name, mapped into memory: safetensors or torch's files, whole or in shards."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.utils import cached_file

from truedraft.engine.layers.quantised_blocks import QuantisedBlocks
from truedraft.engine.layers.weight import ScaledBytes, ScaledRows

# Most families in transformers call them so.
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Names of whole checkpoints and of the index of one in shards, as transformers prefers them.
LAYOUTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


class Checkpoint:
    """``files``: where each tensor is. ``parts``: those of them that another tensor is put together from."""

    parts: frozenset[str] = frozenset()
    # Value heads are in another order than in transformers' modules (``head_order``).
    is_tiled = False

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def blocks(self, name: str) -> QuantisedBlocks | None:
        """The tensor as it is quantised; None if it is not."""
        return None

    def expert_blocks(self, name: str, number: int) -> list[QuantisedBlocks]:
        """Returns the matrix ``number`` of a stack as it is quantised, in parts that lie one after the other;
        an empty list if it is not."""
        return []

    def head_blocks(self, name: str, number: int, is_turned: bool) -> QuantisedBlocks | None:
        """Returns what makes values of latent vectors for one head as it is quantised, or ``is_turned``: what
        is made of keys' rows, turned; None if it is not."""
        return None

    def scaled_rows(self, name: str) -> ScaledRows | None:
        """Returns the tensor in 8-bit floating point; None if it is not stored so."""
        return None

    def scaled_bytes(self, name: str) -> ScaledBytes | None:
        """Returns the tensor in bytes with scales; None if it is not stored so."""
        return None

    def expert_bytes(self, name: str, number: int) -> list[ScaledBytes]:
        """Returns the matrix ``number`` of a stack as ``expert_blocks`` does, in bytes with scales."""
        return []

    def rotary_factors(self) -> torch.Tensor | None:
        """What the rotary frequencies of the config are divided by, if the checkpoint has that."""
        return None

    @classmethod
    def find(cls, path: str, allow_pickle: bool) -> "Checkpoint | None":
        """Opens that of a folder or a hub id; None if it has other files, or not all of them."""
        for whole, index in LAYOUTS if allow_pickle else LAYOUTS[:1]:
            if (file := locate(path, whole)) is not None:
                return cls(dict.fromkeys(_names(file), file))
            if (file := locate(path, index)) is not None:
                shards: dict[str, str] = json.loads(Path(file).read_text())["weight_map"]
                located = {shard: locate(path, shard) for shard in set(shards.values())}
                found = {name: place for name, shard in shards.items() if (place := located[shard])}
                return cls(found) if len(found) == len(shards) else None
        return None

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Views of the files, which are mapped for as long as one of the tensors is kept: no pages stay that
        were read once."""
        tensors = {}
        for file, members in self._by_file(names).items():
            if file.endswith(".bin"):
                stored = _unpickled(file)
                tensors.update({name: stored[name] for name in members})
            else:
                with safe_open(file, "pt") as opened:
                    tensors.update({name: opened.get_tensor(name) for name in members})
        return tensors

    def shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Returns those of what ``read`` gives; no weights are read."""
        shapes = {}
        for file, members in self._by_file(names).items():
            if file.endswith(".bin"):
                stored = _unpickled(file)
                shapes.update({name: tuple(stored[name].shape) for name in members})
            else:
                with safe_open(file, "pt") as opened:
                    shapes.update({name: tuple(opened.get_slice(name).get_shape()) for name in members})
        return shapes

    def _by_file(self, names: Iterable[str]) -> dict[str, list[str]]:
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        return by_file


class DerivedCheckpoint(Checkpoint):
    """Has the tensors of ``source``, laid out as there; subclasses change some. ``files``: more or others."""

    def __init__(self, source: Checkpoint, files: dict[str, str] | None = None) -> None:
        super().__init__(source.files if files is None else files)
        self.source = source
        self.parts = source.parts
        self.is_tiled = source.is_tiled

    def blocks(self, name: str) -> QuantisedBlocks | None:
        return self.source.blocks(name)

    def expert_blocks(self, name: str, number: int) -> list[QuantisedBlocks]:
        return self.source.expert_blocks(name, number)

    def head_blocks(self, name: str, number: int, is_turned: bool) -> QuantisedBlocks | None:
        return self.source.head_blocks(name, number, is_turned)

    def rotary_factors(self) -> torch.Tensor | None:
        return self.source.rotary_factors()

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return self.source.read(names)

    def shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        return self.source.shapes(names)


class RenamedCheckpoint(DerivedCheckpoint):
    """``source`` with other names: ``names`` are those that it has for ours."""

    def __init__(self, source: Checkpoint, names: dict[str, str]) -> None:
        super().__init__(source, {name: source.files[stored] for name, stored in names.items()})
        self.names = names
        self.parts = frozenset(name for name, stored in names.items() if stored in source.parts)

    def blocks(self, name: str) -> QuantisedBlocks | None:
        return self.source.blocks(self.names[name])

    def expert_blocks(self, name: str, number: int) -> list[QuantisedBlocks]:
        return self.source.expert_blocks(self.names[name], number)

    def head_blocks(self, name: str, number: int, is_turned: bool) -> QuantisedBlocks | None:
        return self.source.head_blocks(self.names[name], number, is_turned)

    def scaled_rows(self, name: str) -> ScaledRows | None:
        return self.source.scaled_rows(self.names[name])

    def scaled_bytes(self, name: str) -> ScaledBytes | None:
        return self.source.scaled_bytes(self.names[name])

    def expert_bytes(self, name: str, number: int) -> list[ScaledBytes]:
        return self.source.expert_bytes(self.names[name], number)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        wanted = {self.names[name]: name for name in names}
        return {wanted[stored]: tensor for stored, tensor in self.source.read(wanted).items()}

    def shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        wanted = {self.names[name]: name for name in names}
        return {wanted[stored]: shape for stored, shape in self.source.shapes(wanted).items()}


def locate(path: str, name: str) -> str | None:
    found: str | None = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return found


def _names(file: str) -> list[str]:
    if file.endswith(".bin"):
        return list(_unpickled(file))
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _unpickled(file: str) -> dict[str, torch.Tensor]:
    stored: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return stored

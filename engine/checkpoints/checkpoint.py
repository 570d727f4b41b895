"""Maps a checkpoint's tensors into memory by name: safetensors or torch's files, whole or in shards."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open

from truedraft.engine.layers.quantised_blocks import QuantisedBlocks
from truedraft.engine.layers.weight import ScaledBytes, ScaledRows

# Most families in transformers give their modules these names.
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# These are names of whole checkpoints and of the index of one in shards, in transformers' order of
# preference.
LAYOUTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


class Checkpoint:
    """Opens tensors by name. ``files`` says which file has each tensor; ``parts`` names the tensors of which
    another one is put together."""

    parts: frozenset[str] = frozenset()
    # This is set where value heads are in another order than in transformers' modules (``head_order``).
    is_tiled = False

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def blocks(self, name: str) -> QuantisedBlocks | None:
        """Returns the tensor in its quantised blocks; None if it is not quantised."""
        return None

    def expert_blocks(self, name: str, number: int) -> list[QuantisedBlocks]:
        """Returns the matrix ``number`` of a stack in quantised blocks, as parts that lie one after the
        other; an empty list if it is not quantised."""
        return []

    def head_blocks(self, name: str, number: int, is_turned: bool) -> QuantisedBlocks | None:
        """Returns one head's matrix in quantised blocks: the one that makes values of latent vectors or, if
        ``is_turned``, the transposed one that makes keys; None if it is not quantised."""
        return None

    def scaled_rows(self, name: str) -> ScaledRows | None:
        """Returns the tensor in 8-bit floating point with a scale for each row; None if it is not stored
        so."""
        return None

    def scaled_bytes(self, name: str) -> ScaledBytes | None:
        """Returns the tensor in bytes with scales; None if it is not stored so."""
        return None

    def expert_bytes(self, name: str, number: int) -> list[ScaledBytes]:
        """Returns the matrix ``number`` of a stack as ``expert_blocks`` does, but in bytes with scales."""
        return []

    def rotary_factors(self) -> torch.Tensor | None:
        """Returns the divisors of the config's rotary frequencies, if the checkpoint has some."""
        return None

    @classmethod
    def find(cls, path: str, allow_pickle: bool) -> "Checkpoint | None":
        """Opens the checkpoint of a folder or a hub id; None if it has other files, or not all of them."""
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
        """Returns views of the files, which stay mapped for as long as one of the tensors is kept; pages that
        were read once can be dropped."""
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
        """Returns the shapes of what ``read`` gives, without reading weights."""
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
    """Has the tensors of ``source``; subclasses change some of them. ``files`` replaces the list of files."""

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
    """Gives the tensors of ``source`` other names: ``names`` maps our names to the source's."""

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
    """Returns the path of the file ``name`` in a checkpoint's folder or repository, or None if it has
    none."""
    file = Path(path).expanduser() / name
    return str(file) if file.is_file() else None


def _names(file: str) -> list[str]:
    if file.endswith(".bin"):
        return list(_unpickled(file))
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _unpickled(file: str) -> dict[str, torch.Tensor]:
    stored: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return stored

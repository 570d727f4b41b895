"""Finds matrices that transformers keeps elsewhere than in linear layers: routers', and stacks of experts'.

transformers has a parameter for all experts of a layer, [experts, out features, in features], where most
checkpoints have a tensor for each expert, and GGUF files have one stack of gates and one of the matrices that
they gate.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from truedraft.engine.checkpoints.checkpoint import Checkpoint, DerivedCheckpoint
from truedraft.engine.layers.quantised_blocks import QuantisedBlocks
from truedraft.engine.layers.weight import ScaledBytes, Weight

# A matrix has this type in a checkpoint.
Quantised: TypeAlias = QuantisedBlocks | ScaledBytes
# transformers has these names for the parameters of experts.
GATE_UP, DOWN = ("experts.gate_up_proj", "experts.up_proj"), ("experts.down_proj",)
# transformers has these names for a bias that is added to scores where experts are chosen.
CHOICE_BIASES = ("e_score_correction_bias", "expert_bias")


@dataclass(frozen=True)
class Matrix:
    """Describes a matrix [out features, in features] in a module's parameter: all of it or, if that is a
    stack, the one with this ``number``. ``is_turned`` says that the parameter has in features first.
    ``is_paired`` says that gates and the outputs that they gate alternate in the parameter; in ours they lie
    one after the other."""

    module: nn.Module
    name: str = "weight"
    bias_name: str = "bias"
    number: int | None = None
    is_turned: bool = False
    is_paired: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Takes the matrix out of the parameter."""
        found = tensor if self.number is None else tensor[self.number]
        return self._ordered(found.T if self.is_turned else found)

    @property
    def bias(self) -> torch.Tensor | None:
        bias = getattr(self.module, self.bias_name, None)
        if not isinstance(bias, torch.Tensor):
            return None
        bias = bias.detach()
        return self._ordered(bias if self.number is None else bias[self.number])

    @property
    def parameter(self) -> torch.Tensor:
        parameter: torch.Tensor = getattr(self.module, self.name)
        return parameter.detach()

    def weights(
        self, whole: Callable[[], torch.Tensor] | None = None, parts: Iterable[Quantised] = ()
    ) -> list[Weight]:
        """Returns the weights to be joined; ``whole`` reads the parameter, and ``parts`` are the quantised
        parts of the matrix, one after the other."""
        read, name = whole or (lambda: self.parameter), f"{type(self.module).__name__}.{self.name}"
        found: list[Weight] = []
        begin = 0
        for part in parts:
            if isinstance(part, ScaledBytes):
                rows, columns = part.values.shape
                stored = _slice(read, self, begin, begin + rows)
                found.append(Weight(name, (rows, columns), stored, scaled_bytes=part))
            else:
                rows = len(part.rows)
                stored = _slice(read, self, begin, begin + rows)
                found.append(Weight(name, (rows, part.in_features), stored, part))
            begin += rows
        if found:
            return found
        rows, columns = self.of(self.parameter).shape
        return [Weight(name, (rows, columns), lambda: self.of(read()))]

    def _ordered(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((rows[::2], rows[1::2])) if self.is_paired else rows


def _slice(
    read: Callable[[], torch.Tensor], matrix: Matrix, begin: int, end: int
) -> Callable[[], torch.Tensor]:
    return lambda: matrix.of(read())[begin:end]


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """Describes how a checkpoint names its experts' tensors. ``renamed`` maps parts of transformers' names;
    ``gate_up`` and ``down`` are names of each expert's tensors, empty where the checkpoint has stacks."""

    renamed: tuple[tuple[str, str], ...] = ()
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: tuple[str, ...] = ("down_proj",)

    def parts(self, name: str, num_experts: int) -> list[list[str]]:
        """Returns the tensors of which transformers' ``name`` is made: lists of tensors that are stacked,
        which are joined then."""
        for theirs, stored in self.renamed:
            name = name.replace(theirs, stored)
        for end, each in ((GATE_UP, self.gate_up), (DOWN, self.down)):
            if name.endswith(end) and each:
                prefix = name.rpartition(".")[0] + "."
                numbers = range(num_experts)
                return [[f"{prefix}{number}.{part}.weight" for number in numbers] for part in each]
        return [[name]]


def stored_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters of a module, and those of its buffers that checkpoints have."""
    buffers = {name: buffer for name, buffer in module.named_buffers() if _is_stored(module, name)}
    return dict(module.named_parameters()) | buffers


def stored_in(name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the type of a tensor in a model that is computed in ``dtype``: biases that choose experts stay
    in float32, as in transformers. They may be ten times as large as the scores to which they are added."""
    return torch.float32 if name.endswith(CHOICE_BIASES) else dtype


def _is_stored(module: nn.Module, name: str) -> bool:
    path, _, own = name.rpartition(".")
    return own not in module.get_submodule(path)._non_persistent_buffers_set


class StackedCheckpoint(DerivedCheckpoint):
    """Gives the tensors of ``source`` the names of transformers' ``module``, a model with experts."""

    def __init__(self, source: Checkpoint, module: Any, stored: StoredExperts) -> None:
        made: dict[str, list[list[str]]] = {}
        numbers = {name: len(tensor) for name, tensor in stored_tensors(module).items()}
        for name, number in numbers.items():
            parts = stored.parts(name, number)
            if name not in source.files and all(part in source.files for each in parts for part in each):
                made[name] = parts
        self.made = made
        taken = {part for parts in made.values() for each in parts for part in each}
        left = {name: file for name, file in source.files.items() if name not in taken}
        super().__init__(source, left | {name: source.files[parts[0][0]] for name, parts in made.items()})

    def blocks(self, name: str) -> QuantisedBlocks | None:
        parts = self.made.get(name, [[name]])
        return self.source.blocks(parts[0][0]) if len(parts) == len(parts[0]) == 1 else None

    def expert_blocks(self, name: str, number: int) -> list[QuantisedBlocks]:
        if name not in self.made:
            return self.source.expert_blocks(name, number)
        found = [self.source.blocks(each[number]) for each in self.made[name] if len(each) > 1]
        return [blocks for blocks in found if blocks is not None] if None not in found else []

    def scaled_bytes(self, name: str) -> ScaledBytes | None:
        parts = self.made.get(name, [[name]])
        return self.source.scaled_bytes(parts[0][0]) if len(parts) == len(parts[0]) == 1 else None

    def expert_bytes(self, name: str, number: int) -> list[ScaledBytes]:
        if name not in self.made:
            return self.source.expert_bytes(name, number)
        found = [self.source.scaled_bytes(each[number]) for each in self.made[name] if len(each) > 1]
        return [part for part in found if part is not None] if None not in found else []

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: self._read(name) for name in names}

    def _read(self, name: str) -> torch.Tensor:
        parts = self.made.get(name, [[name]])
        stored = self.source.read(part for each in parts for part in each)
        stacks = [[stored[part] for part in each] for each in parts]
        if len(stacks) == len(stacks[0]) == 1:
            return stacks[0][0]
        return torch.stack([torch.cat(of_one) for of_one in zip(*stacks, strict=True)])

    def divided(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns ``tensor`` divided as the source has it: into the tensors that ``read`` puts together."""
        parts = self.made.get(name, [[name]])
        if len(parts) == len(parts[0]) == 1:
            return {parts[0][0]: tensor}
        return {
            part: matrix
            for of_part, each in zip(tensor.chunk(len(parts), 1), parts, strict=True)
            for matrix, part in zip(of_part, each, strict=True)
        }

    def shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        return {name: self._shape(name) for name in names}

    def _shape(self, name: str) -> tuple[int, ...]:
        parts = self.made.get(name, [[name]])
        shapes = self.source.shapes(part for each in parts for part in each)
        if len(parts) == len(parts[0]) == 1:
            return shapes[parts[0][0]]
        first, columns = shapes[parts[0][0]], {shapes[each][1:] for of_part in parts for each in of_part}
        for each in parts:
            for part in each:
                if shapes[part] != shapes[each[0]] or len(columns) > 1:
                    return shapes[part]  # This shape fits nowhere.
        return len(parts[0]), sum(shapes[each[0]][0] for each in parts), *first[1:]

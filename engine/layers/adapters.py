"""Adapters add a low-rank product to the outputs of linear layers, for those rows of a pass that ask for it.

A layer of ours may have several of transformers' modules, one after the other or in another order: ``Place``
says where each is. Rows of one adapter are computed together, and those of others are left as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from truedraft.engine.layers.linear import Linear
from truedraft.engine.layers.rotary import Rotary
from truedraft.engine.layers.torch_run import TorchRun
from truedraft.engine.memory.batch import ForwardBatch
from truedraft.engine.memory.kv_cache import KVCache

# A row without an adapter has this in the place of its number.
NO_ADAPTER = -1


@dataclass(frozen=True, slots=True)
class Place:
    """Says where the outputs of a module of transformers' are in a layer of ours: from ``first`` on, and only
    those of ``rows``, in their order, unless that is None. The layer multiplies them by ``multiplier``."""

    linear: Linear
    first: int
    in_features: int
    out_features: int
    rows: npt.NDArray[np.int64] | None
    multiplier: float


class LowRank(NamedTuple):
    """Holds two matrices: ``down`` [rank, in features] and ``up`` [out features, rank]."""

    down: torch.Tensor
    up: torch.Tensor


class Part(NamedTuple):
    """Holds what an adapter of one module adds to a layer's outputs from ``first`` on: ``down`` [rank, in
    features] and ``up`` [outputs, rank]."""

    down: torch.Tensor
    up: torch.Tensor
    first: int


LayersOfAnAdapter: TypeAlias = Mapping[Linear, Sequence[Part]]


def part_of(low: LowRank, places: Sequence[Place]) -> Part:
    """Returns what the adapter of a module adds to a layer that has the module's outputs in these places: up
    to the last of them, and nothing to the outputs between them."""
    first = min(place.first for place in places)
    ups = []
    for place in places:
        rows = low.up if place.rows is None else low.up[torch.from_numpy(place.rows)]
        ups.append((place.first - first, rows * place.multiplier))
    up = torch.zeros(max(begin + len(rows) for begin, rows in ups), low.up.shape[1])
    for begin, rows in ups:
        up[begin : begin + len(rows)] = rows
    return Part(low.down, up, first)


class AdaptedLayers(Protocol):
    """Keeps what adapters add, by their numbers, and applies it in passes."""

    def put(self, number: int, layers: LayersOfAnAdapter) -> None: ...

    def drop(self, number: int) -> None: ...

    def begin(self, numbers: list[int]) -> None:
        """Says which adapter each row of the pass has that begins, or ``NO_ADAPTER``."""
        ...

    def end(self) -> None:
        """Says that no row has an adapter until the next pass: a draft head may share layers."""
        ...


class TorchAdapters:
    """Is ``AdaptedLayers`` by torch's operations."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._layers: dict[int, dict[Linear, list[Part]]] = {}
        self._rows: dict[int, torch.Tensor] = {}

    def put(self, number: int, layers: LayersOfAnAdapter) -> None:
        self._layers[number] = {linear: [*map(self._kept, parts)] for linear, parts in layers.items()}

    def drop(self, number: int) -> None:
        del self._layers[number]

    def begin(self, numbers: list[int]) -> None:
        found = torch.tensor(numbers, dtype=torch.int64)
        self._rows = {
            number: (found == number).nonzero()[:, 0].to(self.device)
            for number in sorted(set(numbers) - {NO_ADAPTER})
        }

    def end(self) -> None:
        self._rows = {}

    def add(self, linear: Linear, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Adds to the layer's ``output``, which is overwritten, what the rows' adapters make of ``x``."""
        for number, rows in self._rows.items():
            for down, up, first in self._layers[number].get(linear, ()):
                added = F.linear(F.linear(x[rows].to(self.dtype), down), up).to(output.dtype)
                output[:, first : first + len(up)].index_add_(0, rows, added)
        return output

    def _kept(self, part: Part) -> Part:
        down, up = (each.to(self.device, self.dtype) for each in part[:2])
        return Part(down, up, part.first)


class AdaptedTorchRun(TorchRun):
    """Is a ``LayerRun`` with torch's operations, whose linear layers know adapters."""

    def __init__(self, adapters: TorchAdapters, batch: ForwardBatch, cache: KVCache, rotary: Rotary) -> None:
        super().__init__(batch, cache, rotary)
        self.adapters = adapters

    def linear(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self.adapters.add(linear, x, super().linear(linear, x, residual))


@contextmanager
def rows_of(adapters: AdaptedLayers | None, numbers: list[int]) -> Iterator[None]:
    """Lets linear layers add what the adapters of these rows say, as long as it is entered."""
    if adapters is None:
        yield
        return
    adapters.begin(numbers)
    try:
        yield
    finally:
        adapters.end()

"""Adapters of linear layers in C (``multiply`` in ``linear.c``): layers point to what each adapter adds."""

import ctypes
from array import array
from ctypes import addressof

import torch

from truedraft.engine.layers.adapters import LayersOfAnAdapter
from truedraft.engine.memory.pointers import address
from truedraft.engine.native.library import AdaptedRows, Adapter, LowRank
from truedraft.engine.native.linear import NativeLinear, half_scale

FIRST_CAPACITY = 8


class NativeAdapters:
    """Is ``AdaptedLayers``. Layers that no adapter changes do not know of them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.rows = AdaptedRows()
        self._numbers = array("q")
        self._capacity = FIRST_CAPACITY
        # C has the addresses of these for as long as a layer points to them.
        self._tables: dict[NativeLinear, ctypes.Array[Adapter]] = {}
        self._kept: dict[int, dict[NativeLinear, tuple[list[NativeLinear], ctypes.Array[LowRank]]]] = {}

    def put(self, number: int, layers: LayersOfAnAdapter) -> None:
        while number >= self._capacity:
            self._grow()
        # A layer that cannot be made must leave nothing behind.
        made = {
            linear: [(self._layer(part.down), self._layer(part.up)) for part in parts]
            for linear, parts in layers.items()
        }
        self._kept[number] = {}
        for linear, pairs in made.items():
            assert isinstance(linear, NativeLinear)
            parts = (LowRank * len(pairs))()
            for place, ((down, up), part) in enumerate(zip(pairs, layers[linear], strict=True)):
                parts[place] = LowRank(addressof(down.struct), addressof(up.struct), part.first)
            self._kept[number][linear] = [each for pair in pairs for each in pair], parts
            if linear not in self._tables:
                self._point(linear, (Adapter * self._capacity)())
            self._tables[linear][number] = Adapter(addressof(parts), len(parts))

    def drop(self, number: int) -> None:
        for linear in self._kept[number]:
            self._tables[linear][number] = Adapter()
        del self._kept[number]

    def begin(self, numbers: list[int]) -> None:
        self._numbers = array("q", numbers)
        self.rows.num_rows = len(numbers)
        self.rows.numbers = address(self._numbers, torch.int64, (len(numbers),)) if numbers else None

    def end(self) -> None:
        self.rows.numbers = None

    def _layer(self, weight: torch.Tensor) -> NativeLinear:
        """Keeps a matrix in 16 bits where that loses nothing."""
        return NativeLinear(self.library, [weight], None, half_scale([weight]))

    def _grow(self) -> None:
        """Makes room for as many adapters again; no pass goes on meanwhile."""
        before, self._capacity = self._capacity, 2 * self._capacity
        for linear, table in [*self._tables.items()]:
            larger = (Adapter * self._capacity)()
            larger[:before] = table[:]
            self._point(linear, larger)

    def _point(self, linear: NativeLinear, table: "ctypes.Array[Adapter]") -> None:
        self._tables[linear] = table
        linear.struct.adapters, linear.struct.adapted = addressof(table), addressof(self.rows)

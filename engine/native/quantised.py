"""Has linear layers and embeddings with quantised weights (``quantised.c``, ``quantised_blocks.c``)."""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from truedraft.engine.layers.quantised_blocks import BLOCK_INPUTS, QuantisedBlocks
from truedraft.engine.memory.huge_pages import HugePages
from truedraft.engine.memory.pointers import PointerError, address
from truedraft.engine.native.library import Linear, QuantisedPanel
from truedraft.engine.native.linear import NativeLinear
from truedraft.engine.native.shared import COLUMNS, WeightType

_pages = HugePages()


def dequantise(
    library: ctypes.CDLL, blocks: QuantisedBlocks, rows: npt.NDArray[np.int64] | None = None
) -> torch.Tensor:
    """Returns float32 [rows, in features] of all rows, or of those with the numbers ``rows``, in any
    order."""
    wanted = np.ascontiguousarray(blocks.rows if rows is None else blocks.rows[rows])
    shape = len(wanted), blocks.in_features
    out = torch.empty(shape, dtype=torch.float32)
    library.dequantise_rows(
        *(blocks.type, address(out, torch.float32, shape), _address(library, blocks)),
        *(_address_of_rows(blocks, wanted), *shape),
    )
    return out


def _address(library: ctypes.CDLL, blocks: QuantisedBlocks) -> int:
    """Returns the address of the blocks."""
    if blocks.in_features % BLOCK_INPUTS.get(blocks.type, blocks.in_features + 1):
        raise PointerError(f"C has no blocks of the type {blocks.type} for {blocks.in_features} inputs")
    size = library.row_bytes(blocks.type, blocks.in_features)
    return address(blocks.data, torch.uint8, (len(blocks.data), size))


def _address_of_rows(blocks: QuantisedBlocks, numbers: npt.NDArray[np.int64]) -> int:
    """Returns the address of the ``numbers`` of rows, and checks that there are such rows."""
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(blocks.data):
        raise PointerError(f"there are {len(blocks.data)} rows, not {numbers.max() + 1}")
    return address(numbers, torch.int64, (len(numbers),))


class QuantisedLinear(NativeLinear):
    """Multiplies by quantised blocks. ``parts`` of the same number of inputs are stacked, whatever their
    types. All but the last have a multiple of 32 outputs."""

    def __init__(
        self,
        library: ctypes.CDLL,
        parts: Sequence[QuantisedBlocks],
        bias: torch.Tensor | None,
        multiplier: float = 1.0,
    ) -> None:
        self.multiply = library.multiply
        self.out_features = sum(len(part.rows) for part in parts)
        self.in_features = in_features = parts[0].in_features
        if any(part.in_features != in_features for part in parts) or not can_stack(parts):
            raise PointerError(f"C cannot stack {[(part.type, part.data.shape) for part in parts]}")
        # These are kept for as long as the structures point to them.
        self.packed = []
        panels: list[QuantisedPanel] = []
        for part in parts:
            size = library.packed_bytes(part.type, in_features)
            rows = np.ascontiguousarray(part.rows)
            shape = -(-len(rows) // COLUMNS), size
            packed = _pages.zeros(*shape, dtype=torch.uint8)
            start = address(packed, torch.uint8, shape)
            library.pack_panels(
                *(part.type, start, _address(library, part)),
                *(_address_of_rows(part, rows), len(rows), in_features),
            )
            self.packed.append(packed)
            panels += [QuantisedPanel(start + number * size, part.type) for number in range(len(packed))]
        self.panels = (QuantisedPanel * len(panels))(*panels)
        self.struct = Linear(
            in_features=in_features,
            out_features=self.out_features,
            type=WeightType.QUANTISED,
            weights=ctypes.addressof(self.panels),
            scale=multiplier,
            bias=self._keep_bias(bias, multiplier),
        )


def can_stack(parts: Sequence[QuantisedBlocks]) -> bool:
    """Tells whether ``QuantisedLinear`` can stack these parts."""
    return all(len(part.rows) % COLUMNS == 0 for part in parts[:-1])


class QuantisedEmbeddings:
    """Dequantises rows as they are looked up; the others stay in the file."""

    def __init__(self, library: ctypes.CDLL, blocks: QuantisedBlocks) -> None:
        assert blocks.order is None
        self.library = library
        self.blocks = blocks

    @property
    def embedding_type(self) -> int:
        """Returns the type as ``Decoder`` in C numbers it."""
        return WeightType.QUANTISED + self.blocks.type

    def address(self) -> int:
        return _address(self.library, self.blocks)

    def look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the tokens' embeddings in float32 [tokens, hidden size]."""
        return dequantise(self.library, self.blocks, token_ids.numpy())

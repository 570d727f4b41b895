"""Linear layers and embeddings with quantised weights (``quantised.c``, ``blocks.c``)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from truedraft.engine.memory.huge_pages import HugePages
from truedraft.engine.memory.pointers import PointerError, address
from truedraft.engine.native.library import Linear, QuantisedPanel
from truedraft.engine.native.linear import NativeLinear

# As in blocks.h: ggml's numbers of what the kernels multiply, and the columns of a panel.
TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
COLUMNS = 32
# A block has 256 inputs in the types that have super-blocks, else 32.
BLOCK_INPUTS = {number: 256 if name.endswith("_K") else 32 for name, number in TYPES.items()}
# As in kernels.h.
QUANTISED = 16

Bytes = npt.NDArray[np.uint8]

_pages = HugePages()


@dataclass(frozen=True)
class Blocks:
    """A matrix as GGUF files have it. ``data`` [rows, bytes of a row], contiguous; ``order``: which rows are
    wanted, by their numbers; None for all as they lie."""

    type: int
    data: Bytes
    in_features: int
    order: npt.NDArray[np.int64] | None = None

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        return np.arange(len(self.data), dtype=np.int64) if self.order is None else self.order

    def dequantise(self, library: ctypes.CDLL, rows: npt.NDArray[np.int64] | None = None) -> torch.Tensor:
        """float32 [rows, in features]; ``rows``: numbers of some, in any order."""
        wanted = np.ascontiguousarray(self.rows if rows is None else self.rows[rows])
        shape = len(wanted), self.in_features
        out = torch.empty(shape, dtype=torch.float32)
        library.dequantise_rows(
            *(self.type, address(out, torch.float32, shape), self.address(library)),
            *(self.address_of_rows(wanted), *shape),
        )
        return out

    def address(self, library: ctypes.CDLL) -> int:
        """Returns where the blocks begin."""
        if self.in_features % BLOCK_INPUTS.get(self.type, self.in_features + 1):
            raise PointerError(f"C has no blocks of the type {self.type} for {self.in_features} inputs")
        size = library.row_bytes(self.type, self.in_features)
        return address(self.data, torch.uint8, (len(self.data), size))

    def address_of_rows(self, numbers: npt.NDArray[np.int64]) -> int:
        """Returns where the ``numbers`` of rows begin, and checks that there are such rows."""
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self.data):
            raise PointerError(f"there are {len(self.data)} rows, not {numbers.max() + 1}")
        return address(numbers, torch.int64, (len(numbers),))


class QuantisedLinear(NativeLinear):
    """``parts`` of the same number of inputs are stacked, whatever their types. All but the last have a
    multiple of 32 outputs."""

    def __init__(self, library: ctypes.CDLL, parts: Sequence[Blocks], bias: torch.Tensor | None) -> None:
        self.multiply = library.multiply
        self.out_features = sum(len(part.rows) for part in parts)
        self.in_features = in_features = parts[0].in_features
        if any(part.in_features != in_features for part in parts) or not can_stack(parts):
            raise PointerError(f"C cannot stack {[(part.type, part.data.shape) for part in parts]}")
        # Kept for as long as the structures point to them.
        self.packed = []
        panels: list[QuantisedPanel] = []
        for part in parts:
            size = library.packed_bytes(part.type, in_features)
            rows = np.ascontiguousarray(part.rows)
            shape = -(-len(rows) // COLUMNS), size
            packed = _pages.zeros(*shape, dtype=torch.uint8)
            start = address(packed, torch.uint8, shape)
            library.pack_panels(
                *(part.type, start, part.address(library)),
                *(part.address_of_rows(rows), len(rows), in_features),
            )
            self.packed.append(packed)
            panels += [QuantisedPanel(start + number * size, part.type) for number in range(len(packed))]
        self.panels = (QuantisedPanel * len(panels))(*panels)
        self.struct = Linear(
            in_features=in_features,
            out_features=self.out_features,
            type=QUANTISED,
            weights=ctypes.addressof(self.panels),
            scale=1.0,
            bias=self._keep_bias(bias),
        )


def can_stack(parts: Sequence[Blocks]) -> bool:
    """Whether ``QuantisedLinear`` takes them."""
    return all(len(part.rows) % COLUMNS == 0 for part in parts[:-1])


class QuantisedEmbeddings:
    """Rows are dequantised as they are looked up; the others stay in the file."""

    def __init__(self, library: ctypes.CDLL, blocks: Blocks) -> None:
        assert blocks.order is None
        self.library = library
        self.blocks = blocks

    @property
    def embedding_type(self) -> int:
        """As in ``Decoder``."""
        return QUANTISED + self.blocks.type

    def address(self) -> int:
        return self.blocks.address(self.library)

    def look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, hidden size]."""
        return self.blocks.dequantise(self.library, token_ids.numpy())

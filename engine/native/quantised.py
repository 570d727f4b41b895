"""Linear layers and embeddings with quantised weights (``quantised.c``, ``blocks.c``)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from truedraft.engine.huge_pages import HugePages
from truedraft.engine.native.library import Linear, QuantisedPanel
from truedraft.engine.native.linear import NativeLinear

# As in blocks.h: ggml's numbers of what the kernels multiply, and the columns of a panel.
TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
COLUMNS = 32
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
        out = torch.empty(len(wanted), self.in_features)
        library.dequantise_rows(
            self.type,
            out.data_ptr(),
            self.data.ctypes.data,
            wanted.ctypes.data,
            len(wanted),
            self.in_features,
        )
        return out


class QuantisedLinear(NativeLinear):
    """``parts`` of the same number of inputs are stacked, whatever their types. All but the last have a
    multiple of 32 outputs."""

    def __init__(self, library: ctypes.CDLL, parts: Sequence[Blocks], bias: torch.Tensor | None) -> None:
        self.multiply = library.multiply
        self.out_features = sum(len(part.rows) for part in parts)
        in_features = parts[0].in_features
        # Kept for as long as the structures point to them.
        self.packed = []
        panels: list[QuantisedPanel] = []
        for part in parts:
            size = library.packed_bytes(part.type, in_features)
            rows = np.ascontiguousarray(part.rows)
            packed = _pages.zeros(-(-len(rows) // COLUMNS), size, dtype=torch.uint8)
            library.pack_panels(
                *(part.type, packed.data_ptr(), part.data.ctypes.data),
                *(rows.ctypes.data, len(rows), in_features),
            )
            self.packed.append(packed)
            start = packed.data_ptr()
            panels += [QuantisedPanel(start + number * size, part.type) for number in range(len(packed))]
        self.panels = (QuantisedPanel * len(panels))(*panels)
        self.bias = None if bias is None else bias.float().contiguous()
        self.struct = Linear(
            in_features=in_features,
            out_features=self.out_features,
            type=QUANTISED,
            weights=ctypes.addressof(self.panels),
            scale=1.0,
            bias=None if self.bias is None else self.bias.data_ptr(),
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

    def data_ptr(self) -> int:
        return int(self.blocks.data.ctypes.data)

    def look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, hidden size]."""
        return self.blocks.dequantise(self.library, token_ids.numpy())

"""Quantised weights as files have them: rows of blocks, each some weights and their scale."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# ggml's numbers of the types that there are kernels for.
TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "MXFP4": 39,
}
# A block has 256 inputs in the types that have super-blocks, else 32.
BLOCK_INPUTS = {number: 256 if name.endswith(("_K", "_XS")) else 32 for name, number in TYPES.items()}

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class QuantisedBlocks:
    """A matrix as GGUF files have it. ``data`` [rows, bytes of a row], contiguous; ``order``: which rows are
    wanted, by their numbers; None for all as they lie."""

    type: int
    data: Bytes
    in_features: int
    order: npt.NDArray[np.int64] | None = None

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        return np.arange(len(self.data), dtype=np.int64) if self.order is None else self.order


def merged(parts: Sequence[QuantisedBlocks], multiple: int) -> list[QuantisedBlocks]:
    """Joins neighbours of one type where the first has not a ``multiple`` of rows."""
    found: list[QuantisedBlocks] = []
    for part in parts:
        last = found[-1] if found else None
        if last is None or len(last.rows) % multiple == 0 or last.type != part.type:
            found.append(part)
        else:
            data = np.concatenate([last.data[last.rows], part.data[part.rows]])
            found[-1] = QuantisedBlocks(part.type, data, part.in_features)
    return found

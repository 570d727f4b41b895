"""Describes quantised weights as files store them: rows of blocks, each with some weights and their scale."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Kernels exist for these types, which have ggml's numbers.
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
# A block has 256 inputs in types with super-blocks, otherwise 32.
BLOCK_INPUTS = {number: 256 if name.endswith(("_K", "_XS")) else 32 for name, number in TYPES.items()}

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class QuantisedBlocks:
    """Is a matrix as GGUF files store it. ``data`` [rows, bytes of a row] is contiguous; ``order`` has the
    numbers of the wanted rows; None: all rows in their order."""

    type: int
    data: Bytes
    in_features: int
    order: npt.NDArray[np.int64] | None = None

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        return np.arange(len(self.data), dtype=np.int64) if self.order is None else self.order


def merged(parts: Sequence[QuantisedBlocks], multiple: int) -> list[QuantisedBlocks]:
    """Joins neighbours of one type where the first does not have a ``multiple`` of rows."""
    found: list[QuantisedBlocks] = []
    for part in parts:
        last = found[-1] if found else None
        if last is None or len(last.rows) % multiple == 0 or last.type != part.type:
            found.append(part)
        else:
            data = np.concatenate([last.data[last.rows], part.data[part.rows]])
            found[-1] = QuantisedBlocks(part.type, data, part.in_features)
    return found

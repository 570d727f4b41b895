"""Describes a matrix of a checkpoint, before a backend has made a layer of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from truedraft.engine.layers.quantised_blocks import QuantisedBlocks

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
# A row of zeros is divided as if this were its largest number. Triton takes smaller ones for float64.
LEAST_LARGEST = 2.0**-100
# Kernels in C multiply scales by 256.
LARGEST_SCALE = 2.0**100


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Is a matrix in 8-bit floating point: ``values`` [rows, columns] times ``scales``, float32 [rows]."""

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor) -> "ScaledRows":
        """Rounds a float32 ``matrix``: the largest number of each row becomes the largest one of the type."""
        largest = matrix.abs().amax(1).clamp(min=LEAST_LARGEST)
        scales = largest / LARGEST_FP8
        return cls((matrix / scales[:, None]).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8), scales)

    def dense(self) -> torch.Tensor:
        return self.values.float() * self.scales[:, None]

    def take(self, rows: torch.Tensor) -> "ScaledRows":
        return ScaledRows(self.values[rows], self.scales[rows])

    def to(self, device: torch.device) -> "ScaledRows":
        return ScaledRows(self.values.to(device), self.scales.to(device))


@dataclass(frozen=True, slots=True)
class ScaledBytes:
    """Is a matrix in bytes: ``values`` [rows, columns] in e4m3 or int8 times ``scales``, float32 [rows,
    groups], of ``group`` columns each; the last group may have fewer."""

    values: torch.Tensor
    scales: torch.Tensor
    group: int

    def dense(self) -> torch.Tensor:
        scales = self.scales
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self.group, 1)[:, : self.values.shape[1]]
        return self.values.float() * scales

    def take(self, rows: torch.Tensor) -> "ScaledBytes":
        return replace(self, values=self.values[rows], scales=self.scales[rows])

    @property
    def is_finite(self) -> bool:
        """Tells whether all numbers are finite, and scales small enough for kernels."""
        is_small = bool((self.scales.abs() <= LARGEST_SCALE).all())
        if self.values.dtype != FP8:
            return is_small
        return is_small and not bool((self.values.view(torch.uint8) & 0x7F == 0x7F).any())


@dataclass(frozen=True, slots=True)
class Weight:
    """Is a matrix of ``shape`` [out features, in features]. ``stored`` returns the numbers in a floating
    type; ``blocks``, ``scaled_rows`` or ``scaled_bytes`` return them as they are quantised, or None.
    ``head_blocks`` returns those of one head, or of its transposed matrix, or None."""

    name: str
    shape: tuple[int, int]
    stored: Callable[[], torch.Tensor]
    blocks: QuantisedBlocks | None = None
    scaled_rows: ScaledRows | None = None
    scaled_bytes: ScaledBytes | None = None
    head_blocks: Callable[[int, bool], QuantisedBlocks | None] = lambda number, is_turned: None

    def dense(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the numbers in ``dtype``, or as they are stored."""
        stored = self.stored()
        return stored if dtype is None else stored.to(dtype)

    def of_head(self, number: int, rows: npt.NDArray[np.int64], is_turned: bool) -> "Weight":
        """Returns a head's matrix of these ``rows``, transposed if it ``is_turned``."""
        taken = self.take(rows)
        if is_turned:
            taken = Weight(self.name, taken.shape[::-1], lambda: self.stored()[rows].T.contiguous())
        return replace(taken, blocks=self.head_blocks(number, is_turned) or taken.blocks)

    def take(self, rows: npt.NDArray[np.int64]) -> "Weight":
        """Returns a matrix of some of the rows, by their numbers, in any order."""
        wanted = torch.from_numpy(rows)
        blocks = None if self.blocks is None else replace(self.blocks, order=self.blocks.rows[rows])
        scaled_rows = None if self.scaled_rows is None else self.scaled_rows.take(wanted)
        scaled_bytes = None if self.scaled_bytes is None else self.scaled_bytes.take(wanted)
        shape = len(rows), self.shape[1]
        return Weight(self.name, shape, lambda: self.stored()[wanted], blocks, scaled_rows, scaled_bytes)

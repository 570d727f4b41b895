"""Describes a matrix of a checkpoint, before a backend has made a layer of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from truedraft.engine.layers.quantised_blocks import QuantisedBlocks

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Is a matrix in 8-bit floating point: ``values`` [rows, columns] times ``scales``, float32 [rows]."""

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor) -> "ScaledRows":
        """Rounds a float32 ``matrix``: the largest number of each row becomes the largest there is."""
        largest = matrix.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
        scales = largest / LARGEST_FP8
        return cls((matrix / scales[:, None]).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8), scales)

    def dense(self) -> torch.Tensor:
        return self.values.float() * self.scales[:, None]

    def to(self, device: torch.device) -> "ScaledRows":
        return ScaledRows(self.values.to(device), self.scales.to(device))


@dataclass(frozen=True, slots=True)
class Weight:
    """``shape`` is [out features, in features]. ``stored`` gives the numbers in a floating type; ``blocks``
    or ``scaled_rows`` have them as they are quantised, or are None."""

    name: str
    shape: tuple[int, int]
    stored: Callable[[], torch.Tensor]
    blocks: QuantisedBlocks | None = None
    scaled_rows: ScaledRows | None = None

    def dense(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the numbers in ``dtype``, or as they are stored."""
        stored = self.stored()
        return stored if dtype is None else stored.to(dtype)

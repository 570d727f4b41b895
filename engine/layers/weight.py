"""Describes a matrix of a checkpoint, before a backend has made a layer of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from truedraft.engine.layers.quantised_blocks import QuantisedBlocks


@dataclass(frozen=True, slots=True)
class Weight:
    """``shape`` is [out features, in features]. ``stored`` gives the numbers in a floating type; ``blocks``
    has them as they are quantised, or is None."""

    name: str
    shape: tuple[int, int]
    stored: Callable[[], torch.Tensor]
    blocks: QuantisedBlocks | None = None

    def dense(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the numbers in ``dtype``, or as they are stored."""
        stored = self.stored()
        return stored if dtype is None else stored.to(dtype)

    def take(self, rows: npt.NDArray[np.int64]) -> "Weight":
        """Returns a matrix of some of the rows, by their numbers, in any order."""
        wanted = torch.from_numpy(rows)
        blocks = None if self.blocks is None else replace(self.blocks, order=self.blocks.rows[rows])
        return Weight(self.name, (len(rows), self.shape[1]), lambda: self.stored()[wanted], blocks)

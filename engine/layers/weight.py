"""Describes a matrix of a checkpoint, before a backend has made a layer of it."""

from collections.abc import Callable
from dataclasses import dataclass

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

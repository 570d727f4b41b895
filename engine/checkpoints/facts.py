"""Holds what a checkpoint says as a whole, and how it was loaded."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ModelFacts:
    """Holds what the checkpoint says, and how it was loaded: ``bf16_linears`` as in ``LoadOptions``."""

    config: Any
    generation_config: Any
    num_parameters: int
    dtype: torch.dtype
    device: torch.device
    bf16_linears: bool = False

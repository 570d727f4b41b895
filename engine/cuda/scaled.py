"""Multiplies 8-bit floating point in linear layers on a GPU: weights have a scale for each output, and inputs
are rounded with a scale for each row.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from truedraft.engine.cuda.triton_run import serves
from truedraft.engine.layers.weight import FP8, ScaledRows

# Ada has the first matrix units for these numbers. Products by scaled rows give bfloat16 only.
MIN_CAPABILITY = (8, 9)
DTYPE = torch.bfloat16
# The numbers of inputs and outputs must be multiples of this.
MULTIPLE = 16
# A product may deviate from that of the same rounded numbers in float64 by this share of the largest.
TOLERANCE = 2e-2

logger = logging.getLogger(__name__)


class RoundRows(Protocol):
    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``x`` [rows, n] in FP8, and the float32 scale [rows] by which each row was divided: its
        largest number is 448 times the scale."""
        ...


class ScaledLinear:
    """Multiplies FP8 by FP8. ``parts`` have the same number of inputs."""

    def __init__(
        self,
        round_rows: RoundRows,
        parts: Sequence[ScaledRows],
        bias: torch.Tensor | None,
        multiplier: float = 1.0,
    ) -> None:
        self.round_rows = round_rows
        # torch joins bytes, but not numbers of this type.
        self.values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(FP8)
        self.scales = torch.cat([part.scales for part in parts])[None]
        self.bias = bias
        self.multiplier = multiplier
        self.out_features = len(self.values)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._product(x)
        return y if self.multiplier == 1 else y * self.multiplier

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.add(residual, self._product(x), alpha=self.multiplier)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            return x.new_empty(0, self.out_features)
        rounded, scales = self.round_rows(x)
        y: torch.Tensor = torch._scaled_mm(
            rounded, self.values.t(), scale_a=scales[:, None], scale_b=self.scales, out_dtype=DTYPE
        )
        return y if self.bias is None else y + self.bias


def can_scale(shape: tuple[int, int]) -> bool:
    return all(size % MULTIPLE == 0 for size in shape)


def multiplies_fp8(dtype: torch.dtype, device: torch.device) -> bool:
    """Tells whether layers in ``dtype`` may multiply FP8 on ``device``."""
    is_able = dtype == DTYPE and serves([], dtype, device)
    return is_able and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


@torch.inference_mode()
def is_right(round_rows: RoundRows, device: torch.device) -> bool:
    """Tells whether rows are rounded as they should be, and products are those of float64."""
    try:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(33, 272, generator=generator).to(device, DTYPE)
        weights = ScaledRows.of(torch.randn(48, 272, generator=generator).to(device))
        rounded, scales = round_rows(x)
        expected = ScaledRows.of(x.float())
        if not torch.allclose(scales, expected.scales, rtol=1e-5):
            return False
        # Quotients next to the middle of two numbers may be rounded to the other one.
        if (rounded.float() - expected.values.float()).ne(0).float().mean() > 0.01:
            return False
        whole = (rounded.double() * scales[:, None]) @ weights.dense().double().t()
        ours = ScaledLinear(round_rows, [weights], None)(x)
        return bool(((ours - whole).abs().max() <= TOLERANCE * whole.abs().max()).item())
    except Exception as error:  # libraries and drivers fail in many ways
        logger.warning("FP8 cannot be used: %s", error, exc_info=True)
        return False

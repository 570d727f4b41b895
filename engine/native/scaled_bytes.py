"""Has linear layers in C (``linear.c``) whose weights are bytes with scales, as 8-bit checkpoints store them.

Their outputs have the bits of layers with the same weights in float32.
"""

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from truedraft.engine.layers.weight import FP8, ScaledBytes
from truedraft.engine.memory.huge_pages import HugePages
from truedraft.engine.memory.pointers import PointerError, address
from truedraft.engine.native.library import Linear
from truedraft.engine.native.linear import NativeLinear
from truedraft.engine.native.shared import E4M3_DIVISOR, WeightType

BYTE_TYPES = {torch.int8: WeightType.WHOLE8, FP8: WeightType.FLOAT8}
# C divides numbers of the type by this.
DIVISORS = {torch.int8: 1.0, FP8: float(E4M3_DIVISOR)}

_pages = HugePages()


class BytesLinear(NativeLinear):
    """Multiplies by bytes with scales. ``parts`` of the same inputs, type and groups are stacked.
    ``multiplier`` applies to all outputs, including the bias."""

    def __init__(
        self,
        library: ctypes.CDLL,
        parts: Sequence[ScaledBytes],
        bias: torch.Tensor | None,
        multiplier: float = 1.0,
    ) -> None:
        if not are_alike(parts) or not all(part.is_finite for part in parts):
            raise PointerError(f"C cannot stack {[(part.values.shape, part.group) for part in parts]}")
        first, panel = parts[0], library.panel_size()
        self.multiply = library.multiply
        self.dtype = first.values.dtype
        self.out_features = sum(len(part.values) for part in parts)
        self.in_features = first.values.shape[1]
        panels = -(-self.out_features // panel), self.in_features, panel
        # These are kept for as long as the structure points to them.
        self.weights = _pages.zeros(*panels, dtype=torch.uint8)
        column = 0
        for part in parts:
            self._store(column, part.values.view(torch.uint8))
            column += len(part.values)
        scales = torch.cat([part.scales for part in parts]) * DIVISORS[self.dtype]
        scales = F.pad(scales, (0, 0, 0, panels[0] * panel - self.out_features))
        self.scales = scales.view(panels[0], panel, -1).transpose(1, 2).contiguous()
        self.struct = Linear(
            in_features=self.in_features,
            out_features=self.out_features,
            type=BYTE_TYPES[self.dtype],
            weights=address(self.weights, torch.uint8, panels),
            scale=multiplier,
            bias=self._keep_bias(bias, multiplier),
            group=first.group,
            scales=address(self.scales, torch.float32, (panels[0], first.scales.shape[1], panel)),
        )


def are_alike(parts: Sequence[ScaledBytes]) -> bool:
    """Tells whether ``BytesLinear`` can stack the parts: they must have the same inputs, type and groups, and
    the number of scales that follows."""
    kinds = {(part.values.dtype, part.values.shape[1], part.group) for part in parts}
    if len(kinds) != 1 or parts[0].values.dtype not in BYTE_TYPES or parts[0].group < 1:
        return False
    groups = -(-parts[0].values.shape[1] // parts[0].group)
    return all(part.scales.shape == (len(part.values), groups) for part in parts)

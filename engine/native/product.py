"""Linear layers in C (``product.c``): weights in float32 or float16, float32 rows and sums.

The libraries' calls take ten microseconds before they multiply anything, which is most of what a small
product of few rows takes; this one starts in three. Of large weights it keeps the memory busier than oneDNN
does. Weights are laid out once, in panels of a few columns that are read from end to end.
"""

import ctypes
from ctypes import byref

import torch

from engine.huge_pages import HugePages
from engine.native.library import Product

# All weights are in the same few: most of a small model's are smaller than a page.
_pages = HugePages()


class NativeProduct:
    """``scale``: float16 holds all weights without loss times this power of two; None: keep float32."""

    def __init__(
        self, library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None, scale: float | None
    ) -> None:
        self.out_features, in_features = weight.shape
        self.multiply = library.multiply
        panel = library.panel_size()
        dtype = torch.float32 if scale is None else torch.float16
        # Kept for as long as the structure points to them.
        num_panels = -(-self.out_features // panel)
        self.weights = _pages.zeros(num_panels, in_features, panel, dtype=dtype)
        for i, part in enumerate(torch.split(weight, panel)):
            self.weights[i, :, : len(part)] = (part if scale is None else part * scale).T
        self.bias = None if bias is None else bias.contiguous()
        self.product = Product(
            in_features=in_features,
            out_features=self.out_features,
            is_half=scale is not None,
            weights=self.weights.data_ptr(),
            scale=1 / (scale or 1.0),
            bias=None if self.bias is None else self.bias.data_ptr(),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = x.new_empty(x.shape[0], self.out_features)
        self.multiply(byref(self.product), out.data_ptr(), x.data_ptr(), None, x.shape[0])
        return out

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x, residual = x.contiguous(), residual.contiguous()
        out = torch.empty_like(residual)
        self.multiply(
            byref(self.product), out.data_ptr(), x.data_ptr(), residual.data_ptr(), residual.shape[0]
        )
        return out

"""Linear layers of few weights in C (``kernels.c``): float16 weights, float32 rows and sums.

FBGEMM's call takes ten microseconds before it multiplies anything, which is most of what a small product of
few rows takes. This one starts in three.
"""

import ctypes
from ctypes import byref

import torch

from engine.native.library import Product


class NativeProduct:
    """Weights times ``scale`` as float16, in the kernels' layout; see ``packed_linear.HalfProduct``."""

    def __init__(
        self, library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None, scale: float
    ) -> None:
        self.out_features, in_features = weight.shape
        self.multiply = library.multiply
        panel = library.panel_size()
        padded = torch.zeros(-(-self.out_features // panel), panel, in_features, dtype=torch.float16)
        padded.view(-1, in_features)[: self.out_features] = (weight * scale).half()
        # Kept for as long as the structure points to them.
        self.weights = padded.transpose(1, 2).contiguous()
        self.bias = None if bias is None else bias.contiguous()
        self.product = Product(
            in_features=in_features,
            out_features=self.out_features,
            scale=1 / scale,
            weights=self.weights.data_ptr(),
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

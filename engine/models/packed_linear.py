"""Linear layers for few rows in float32 on a CPU: weights packed once, in 16 bits where that loses nothing.

A plain product of a few rows re-packs the whole weight at every call, which costs two to three times the
one-row product and would eat what speculation gains. Packed, nine rows cost less than twice one row. And
few rows cost what it takes to read the weights: a checkpoint in bfloat16 or float16 has no more than 16 bits
of each, so they are kept and read as such, and multiplied and summed in float32 all the same.
"""

import ctypes
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from engine.native.product import NativeProduct

# Below this many weights a library's fixed cost (some 10 microseconds) outweighs what packing saves.
MIN_PACKED_WEIGHTS = 1 << 15
# oneDNN streams large weights a fifth faster for five rows than for one, so fewer rows are padded.
MIN_PADDED_WEIGHTS = 1 << 20
FASTEST_ROWS = 5
# Weights this much smaller than the largest may lose bits: a float32 sum loses more.
NEGLIGIBLE = 2.0**-30

# The operator itself: the wrapper that torch.ops hands out looks at every argument in Python at every call.
_half_product = torch.ops.quantized.linear_dynamic_fp16.default._op


class Product(Protocol):
    """A linear layer: float [rows, in features] to [rows, out features]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual`` [rows, out features] plus the product of ``x``."""
        ...


class PlainProduct:
    """As torch does it: for other devices and types, and for small weights without kernels of our own."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual + F.linear(x, self.weight, self.bias)


class PackedProduct:
    """float32 weights in oneDNN's layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features = weight.shape[0]
        self.min_rows = FASTEST_ROWS if weight.numel() >= MIN_PADDED_WEIGHTS else 0
        self.packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows == 0:  # a prompt chunk that needs no logits
            return x.new_empty(0, self.out_features)
        if rows < self.min_rows:
            x = F.pad(x, (0, 0, 0, self.min_rows - rows))
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed_weight, self.bias, "none", [], "")
        return y[:rows]

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < self.min_rows:
            return self(x).add_(residual)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self.packed_weight, self.bias, "add"
        )
        return y


class HalfProduct:
    """Weights as float16 in FBGEMM's layout, times a power of two that brings the largest near 2^15, so that
    bfloat16's smaller precision and wider range fit; computed in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, scale: float) -> None:
        self.out_features = weight.shape[0]
        self.down = 1 / scale
        scaled_bias = None if bias is None else bias * scale
        self.packed_weight = torch.ops.quantized.linear_prepack_fp16(weight * scale, scaled_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 0:  # a prompt chunk that needs no logits
            return x.new_empty(0, self.out_features)
        y: torch.Tensor = _half_product(x, self.packed_weight)
        return y if self.down == 1 else y.mul_(self.down)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _half_product(x, self.packed_weight)
        return torch.add(residual, y, alpha=self.down)


def half_scale(weight: torch.Tensor) -> float | None:
    """The power of two times which float16 holds ``weight`` without loss; None if there is none."""
    magnitude = weight.abs()
    largest = magnitude.max()
    if not largest.isfinite():
        return None
    if bool((weight.half().float() == weight).all()):
        return 1.0
    _, exponent = torch.frexp(largest)
    scale = 2.0 ** (15 - int(exponent))
    scaled = weight * scale
    kept = (scaled.half().float() == scaled) | (magnitude < largest * NEGLIGIBLE)
    return scale if bool(kept.all()) else None


def make_product(
    linears: list[nn.Linear], kernels: ctypes.CDLL | None = None, narrow: bool = True
) -> Product:
    """One product in place of several of the same input; their outputs lie one after the other.

    ``narrow``: keep the weights in 16 bits where that loses nothing. ``kernels`` are given for float32
    on a CPU only; they are the fastest from 64 x 64 weights on.
    """
    weights = [linear.weight.detach() for linear in linears]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears))
    bias = torch.cat(biases) if biases else None
    if kernels is not None:
        return NativeProduct(kernels, weight, bias, half_scale(weight) if narrow else None)
    if not can_pack(weight.dtype, weight.device) or weight.numel() < MIN_PACKED_WEIGHTS:
        return PlainProduct(weight, bias)
    scale = half_scale(weight) if narrow and _can_half() else None
    return PackedProduct(weight, bias) if scale is None else HalfProduct(weight, bias, scale)


class PackedLinear(nn.Module):
    """Stands in for ``nn.Linear`` without keeping the original weight."""

    weight: None = None  # T5 asks for its type

    def __init__(self, linear: nn.Linear, narrow: bool) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.product = make_product([linear], narrow=narrow)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.product(x.reshape(-1, self.in_features))
        return rows.view(*x.shape[:-1], self.out_features)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    mkldnn_available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return device.type == "cpu" and dtype == torch.float32 and mkldnn_available


def _can_half() -> bool:
    return torch.backends.quantized.engine in ("x86", "fbgemm")


def pack_linears(model: nn.Module, narrow: bool) -> None:
    """Replace every large ``nn.Linear`` below ``model``, one at a time, so that memory never doubles."""
    for name, child in list(model.named_children()):
        if type(child) is nn.Linear and child.weight.numel() >= MIN_PACKED_WEIGHTS:
            setattr(model, name, PackedLinear(child, narrow))
        else:
            pack_linears(child, narrow)

"""Linear layers, each as the device and its weights like it best, and every family's.

A plain product of a few float32 rows on a CPU re-packs the whole weight at every call, which costs two to
three times the one-row product and would eat what speculation gains. So weights are packed once: for the
kernels in C (``engine.native.linear``), in 16 bits where that loses nothing, or for oneDNN where there is no
compiler. Layers that transformers' quantisers have made stay as they are.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.backends import mkldnn
from transformers.pytorch_utils import Conv1D

from truedraft.engine.native.linear import NativeLinear, half_scale
from truedraft.engine.native.quantised import QuantisedLinear, can_stack

# Below this many weights a module's own overhead outweighs what packing saves; oneDNN's fixed cost is some
# 10 microseconds.
MIN_NATIVE_WEIGHTS, MIN_ONE_DNN_WEIGHTS = 1 << 12, 1 << 15
# oneDNN streams large weights a fifth faster for five rows than for one, so fewer rows are padded.
MIN_PADDED_WEIGHTS = 1 << 20
FASTEST_ROWS = 5


class Linear(Protocol):
    """A linear layer: float [rows, in features] to [rows, out features]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual`` [rows, out features], which may be overwritten, plus the layer's output for ``x``."""
        ...


class TorchLinear:
    """As torch does it: for other devices and types, and for small weights without kernels of our own."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None and residual.is_cuda:
            return residual.addmm_(x, self.weight.t())  # one kernel, and rounded once
        return residual + F.linear(x, self.weight, self.bias)


class OneDnnLinear:
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


class ModuleLinear:
    """Modules of transformers that know best how to use their weights: quantised ones. Their outputs lie one
    after the other."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [module(x) for module in self.modules]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual + self(x)


def make_linear(
    modules: Sequence[nn.Module],
    library: ctypes.CDLL | None = None,
    compact_weights: bool = True,
    bf16_linears: bool = False,
) -> Linear:
    """One layer in place of several of the same input; their outputs lie one after the other.

    ``library``: the compiled kernels, given for float32 on a CPU only. Modules that have ``blocks`` (their
    quantised weights) stay quantised there. ``compact_weights``: keep their weights in 16
    bits where that loses nothing. ``bf16_linears``: as in ``NativeLinear``.
    """
    if not all(type(module) in (nn.Linear, Conv1D) for module in modules):
        return ModuleLinear(modules)
    weights = [_weight(module) for module in modules]
    biases = [module.bias.detach() for module in modules if isinstance(module.bias, torch.Tensor)]
    assert len(biases) in (0, len(modules))
    bias = torch.cat(biases) if biases else None
    blocks: list[Any] = [module.blocks for module in modules if hasattr(module, "blocks")]
    if library is not None and len(blocks) == len(modules) and can_stack(blocks):
        return QuantisedLinear(library, blocks, bias)
    if library is not None:
        scale = half_scale(weights) if compact_weights and not bf16_linears else None
        return NativeLinear(library, weights, bias, scale, bf16_linears)
    weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
    if _is_packed(weight) and weight.numel() >= MIN_ONE_DNN_WEIGHTS and mkldnn.is_available():  # type: ignore[no-untyped-call]
        return OneDnnLinear(weight, bias)
    return TorchLinear(weight, bias)


class LinearModule(nn.Module):
    """Stands in for a module of transformers' without keeping the original weight."""

    weight: None = None  # T5 asks for its type

    def __init__(self, module: nn.Module, library: ctypes.CDLL | None, compact_weights: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = _weight(module).shape
        self.linear = make_linear([module], library, compact_weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.linear(x.reshape(-1, self.in_features))
        return rows.view(*x.shape[:-1], self.out_features)


def replace_linears(model: nn.Module, library: ctypes.CDLL | None, compact_weights: bool) -> None:
    """Pack every large linear layer below ``model``, one at a time, so that memory never doubles."""
    for name, child in list(model.named_children()):
        if type(child) in (nn.Linear, Conv1D):
            weight = _weight(child)
            smallest = MIN_ONE_DNN_WEIGHTS if library is None else MIN_NATIVE_WEIGHTS
            if _is_packed(weight) and weight.numel() >= smallest:
                setattr(model, name, LinearModule(child, library, compact_weights))
        else:
            replace_linears(child, library, compact_weights)


def _is_packed(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _weight(module: nn.Module) -> torch.Tensor:
    """[out features, in features]."""
    assert isinstance(module.weight, torch.Tensor)
    weight = module.weight.detach()
    return weight.T if type(module) is Conv1D else weight

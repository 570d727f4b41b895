"""Defines linear layers and embeddings as a decoder sees them, and torch's own.

A plain product of a few float32 rows on a CPU re-packs the whole weight at every call, which costs two to
three times the one-row product and would eat what speculation gains. So weights are packed once: for the
kernels in C (``engine.native.linear``), or for oneDNN where there is no compiler.
"""

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.backends import mkldnn

from truedraft.engine.layers.weight import Weight

# Below this many weights oneDNN's fixed cost of some 10 microseconds outweighs what packing saves.
MIN_ONE_DNN_WEIGHTS = 1 << 15
# oneDNN streams large weights a fifth faster for five rows than for one, so fewer rows are padded.
MIN_PADDED_WEIGHTS = 1 << 20
FASTEST_ROWS = 5


class Linear(Protocol):
    """Is a linear layer: float [rows, in features] to [rows, out features]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns ``residual`` [rows, out features], which may be overwritten, plus the output for ``x``."""
        ...


class Embeddings(Protocol):
    """Is the table of the tokens' vectors."""

    def look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the vectors [tokens, hidden size] in any floating type."""
        ...


class Linears(Protocol):
    """Makes the layers of one backend, which says what it takes: weights in 16 bits, quantised blocks,
    8-bit floating point with a scale for each row, bytes with scales. Others come in the type of the hidden
    states."""

    takes_halves: bool
    takes_blocks: bool
    takes_scaled_rows: bool
    takes_scaled_bytes: bool

    def make(self, weights: Sequence[Weight], bias: torch.Tensor | None, multiplier: float = 1.0) -> Linear:
        """Makes one layer of weights with the same inputs; their outputs lie one after the other.
        ``multiplier`` is of all of them, with the bias."""
        ...

    def embeddings(self, weight: Weight) -> Embeddings: ...


class DenseEmbeddings:
    """Keeps all vectors in ``weight`` [vocab, hidden size] of any floating type."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


class TorchLinear:
    """Multiplies as torch does it: on other devices, in other types, and small weights without kernels."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, multiplier: float = 1.0) -> None:
        self.weight = weight
        self.bias = bias
        self.multiplier = multiplier

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if self.multiplier == 1 else y * self.multiplier

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None and residual.is_cuda:
            # One kernel, and rounded once.
            return residual.addmm_(x, self.weight.t(), alpha=self.multiplier)
        return residual + self(x)


class WideLinear(TorchLinear):
    """Multiplies in float32 whatever its inputs and the model's weights are in."""

    def __init__(self, linear: TorchLinear) -> None:
        bias = None if linear.bias is None else linear.bias.float()
        super().__init__(linear.weight.float(), bias, linear.multiplier)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x.float())


class OneDnnLinear:
    """Keeps float32 weights in oneDNN's layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, multiplier: float = 1.0) -> None:
        if multiplier != 1:
            weight, bias = weight * multiplier, None if bias is None else bias * multiplier
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


class TorchLinears:
    """Makes layers of weights that are in the type of the hidden states, on their device."""

    takes_halves = takes_blocks = takes_scaled_rows = takes_scaled_bytes = False

    def make(self, weights: Sequence[Weight], bias: torch.Tensor | None, multiplier: float = 1.0) -> Linear:
        dense = [weight.dense() for weight in weights]
        weight = dense[0].contiguous() if len(dense) == 1 else torch.cat(dense)
        is_large = weight.numel() >= MIN_ONE_DNN_WEIGHTS
        if is_large and is_packed(weight) and _has_one_dnn():
            return OneDnnLinear(weight, bias, multiplier)
        return TorchLinear(weight, bias, multiplier)

    def embeddings(self, weight: Weight) -> DenseEmbeddings:
        return DenseEmbeddings(weight.dense())


@cache
def _has_one_dnn() -> bool:
    """Tells whether torch has oneDNN's layers, whose names it does not promise to keep."""
    names = "_reorder_linear_weight", "_linear_pointwise"
    is_there: bool = mkldnn.is_available()  # type: ignore[no-untyped-call]
    return is_there and all(hasattr(torch.ops.mkldnn, name) for name in names)


def is_packed(weight: torch.Tensor) -> bool:
    """Tells whether layers in another layout than torch's can hold the weight."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32

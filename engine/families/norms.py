"""Makes norms of transformers' modules."""

from typing import Any, Literal

import torch

from truedraft.engine.layers.norm import Norm

# Norms multiply by their weight in the model's type or in float32; or in float32 by one more than it; or they
# take the mean off first, in float32, too.
NormKind = Literal["plain", "float32", "plus one", "centred"]


def norm_of(kind: NormKind, weight: torch.Tensor, eps: float) -> Norm:
    """Makes one of a weight as the family's checkpoints have it."""
    if kind == "plain":
        return Norm(weight, eps)
    weight = weight.float()
    return Norm(1 + weight if kind == "plus one" else weight, eps, centres=kind == "centred")


def make_norm(kind: NormKind, module: Any) -> Norm:
    """Makes ours of a norm of transformers'."""
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return norm_of(kind, module.weight.detach(), eps)

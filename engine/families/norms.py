"""Makes norms of the modules of transformers."""

from typing import Any, Literal

import torch

from truedraft.engine.layers.norm import Norm

# Norms multiply by their weight in the model's type or in float32; or in float32 by one more than the weight;
# or they subtract the mean first, in float32, too.
NormKind = Literal["plain", "float32", "plus one", "centred"]


def norm_of(kind: NormKind, weight: torch.Tensor, eps: float) -> Norm:
    """Makes a norm of a weight as the family's checkpoints store it."""
    if kind == "plain":
        return Norm(weight, eps)
    weight = weight.float()
    return Norm(1 + weight if kind == "plus one" else weight, eps, centres=kind == "centred")


def make_norm(kind: NormKind, module: Any) -> Norm:
    """Makes our norm of transformers' module."""
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return norm_of(kind, module.weight.detach(), eps)

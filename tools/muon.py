"""Muon with AdamW for the rest, in plain PyTorch.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) replaces the update of a weight
matrix by its nearest semi-orthogonal matrix, found with five Newton-Schulz steps. It knows nothing about
the model: ``split_parameters`` decides by shape and name who is a matrix. Used by ``train_demo_pair.py``.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn

# Quintic iteration coefficients of the Muon post: steep at zero, so that few steps suffice.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (hidden weight matrices for Muon, embeddings and norms for AdamW)."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        hidden_matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if hidden_matrix else others).append(parameter)
    return matrices, others


def orthogonalize(updates: torch.Tensor, dtype: torch.dtype, steps: int = 5) -> torch.Tensor:
    """Nearest semi-orthogonal matrices of ``updates`` [batch, rows, columns], approximately."""
    a, b, c = NEWTON_SCHULZ
    x = updates.to(dtype)
    transposed = x.shape[1] > x.shape[2]
    if transposed:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if transposed else x).to(updates.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, Nesterov, orthogonalised; matrices of one shape are handled as one batch.

    ``dtype`` is the precision of the Newton-Schulz products: bfloat16 suffices where it is fast.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                updates = torch.stack([self._momentum(p, group["momentum"]) for p in parameters])
                # Scale so that the update's entries have the size AdamW's would have for tall matrices.
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, orthogonalize(updates, self.dtype), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> torch.Tensor:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "buffer" not in state:
            state["buffer"] = torch.zeros_like(gradient)
        state["buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state["buffer"], momentum)

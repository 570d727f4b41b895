"""RMSNorm with torch's operations."""

import torch
import torch.nn.functional as F


class Norm:
    """Normalises the last dimension (arXiv 1910.07467), in float32 as transformers computes it."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.size = weight.shape[-1]
        self.weight = weight
        self.eps = eps
        # On a CPU torch's rms_norm is six operations. sum(x^2) + n * eps is a hypotenuse: four, two of them
        # on one number a row.
        self.short = weight.device.type == "cpu" and weight.dtype == torch.float32
        self.scaled_weight = weight * self.size**0.5
        self.leg = torch.tensor((self.size * eps) ** 0.5, dtype=torch.float32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._normed(x.to(self.weight.dtype)).to(x.dtype)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        if self.short:
            length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.leg)
            return (x / length).mul_(self.scaled_weight)
        if self.weight.dim() == 1:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        return F.rms_norm(x, (self.size,), None, self.eps) * self.weight

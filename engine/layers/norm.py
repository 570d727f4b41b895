"""Has RMSNorm and LayerNorm with torch's operations."""

import torch
import torch.nn.functional as F


class Norm:
    """Normalises the last dimension (arXiv 1910.07467), in float32 as transformers computes it.

    ``centres`` subtracts the mean first, which makes it LayerNorm (arXiv 1607.06450); ``weight`` is then in
    float32. ``bias`` is added last; only layers that centre have one.
    """

    def __init__(
        self, weight: torch.Tensor, eps: float, *, centres: bool = False, bias: torch.Tensor | None = None
    ) -> None:
        assert centres or bias is None
        self.centres = centres
        self.bias = bias
        self.size = weight.shape[-1]
        self.weight = weight
        self.eps = eps
        # On a CPU torch's rms_norm is six operations. sum(x^2) + n * eps is a hypotenuse: four, two of them
        # on one number a row.
        self.short = weight.device.type == "cpu" and weight.dtype == torch.float32
        self.scaled_weight = weight * self.size**0.5
        self.leg = torch.tensor((self.size * eps) ** 0.5, dtype=torch.float32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(self.weight.dtype)
        normed = self._normed(wide - wide.mean(-1, keepdim=True) if self.centres else wide)
        return (normed if self.bias is None else normed + self.bias).to(x.dtype)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        if self.short:
            length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.leg)
            return (x / length).mul_(self.scaled_weight)
        if self.weight.dim() == 1:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        return F.rms_norm(x, (self.size,), None, self.eps) * self.weight

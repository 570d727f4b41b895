"""One exact draw from a distribution, given its random numbers. Pure functions of tensors."""

import torch

# Of more scores than these numpy finds the highest faster than torch, several times if they are many.
MANY = 1 << 9


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids [...] drawn in proportion to ``weights`` [..., vocab], which need not sum to one.

    ``uniforms`` [...]: float64 in (0, 1). The sum runs in float64, so that rare tokens of a large
    vocabulary keep their share. A token of weight zero is never drawn.
    """
    cumulative = weights.double().cumsum(-1)
    total = cumulative[..., -1:]
    # Rounding must not lift the goal to the total, beyond which there is no id.
    goal = torch.minimum(uniforms[..., None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, goal, right=True).squeeze(-1)


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """Index of the highest of ``scores`` [..., vocab], the first among equals: [...]."""
    if scores.device.type == "cpu" and scores.numel() > MANY:
        highest = scores.numpy().argmax(-1)
        return torch.from_numpy(highest) if scores.dim() > 1 else torch.tensor(highest)
    return scores.argmax(-1)


def gumbel_argmax(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Token ids [...] with the lowest ``noise / probs``, ``noise`` being exponential.

    Same law as argmax(log probs + Gumbel noise). ``probs`` and ``noise``: [..., vocab], noise float64.
    """
    return argmax(probs / noise)

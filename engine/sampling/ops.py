"""Draws exactly from a distribution, given its random numbers, by pure functions of tensors."""

import torch
import torch.nn.functional as F

# Size of the parts of a vocabulary that ``inverse_cdf`` sums first.
CHUNK = 256
# Beyond this many scores numpy finds the highest faster than torch, several times if they are many.
MANY = 1 << 9


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids [...] drawn in proportion to ``weights`` [..., vocab], which need not sum to one.

    ``uniforms`` [...]: float64 in (0, 1). The sums run in float64, so that rare tokens of a large
    vocabulary keep their share. A token of weight zero is never drawn. A chunk is drawn first, then a token
    in it: a running sum over a whole vocabulary takes a GPU several times as long.
    """
    if rest := -weights.shape[-1] % CHUNK:
        weights = F.pad(weights, (0, rest))
    chunks = weights.reshape(*weights.shape[:-1], weights.shape[-1] // CHUNK, CHUNK)
    ends = chunks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = ends[..., -1:]
    goal = _below(uniforms[..., None] * total, total)
    # ``clamp`` keeps ``gather`` within bounds for rows of NaN, whose ids are discarded.
    chunk = torch.searchsorted(ends, goal, right=True).clamp(max=chunks.shape[-2] - 1)
    begin = F.pad(ends, (1, 0)).gather(-1, chunk)
    members = chunks.gather(-2, chunk[..., None].expand(*chunk.shape, CHUNK)).squeeze(-2)
    running = members.double().cumsum(-1)
    place = torch.searchsorted(running, _below(goal - begin, running[..., -1:]), right=True)
    return (chunk * CHUNK + place).squeeze(-1)


def _below(goal: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """``goal``, but less than ``total``, to which rounding may have lifted it and where no id ends."""
    return torch.minimum(goal, total.nextafter(torch.zeros_like(total)))


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

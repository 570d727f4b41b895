"""Computes exponentials, masses and draws with the same bits on every processor, by pure functions of
tensors.

Exponentials are made of single roundings, which IEEE 754 defines, and masses are sums of integers, which are
the same in any order: a kernel that adds in another one (``engine.cuda.sampling_kernels``) cuts the same
tokens and draws the same one.
"""

import torch
import torch.nn.functional as F

# Sums count in these units: weights, of which the highest is 1, in vocabularies below 2**19 tokens; and
# probabilities, which add up to about 1.
WEIGHT_UNIT, PROB_UNIT = 2.0**-44, 2.0**-56
# An exponential below this counts as 0: no draw could find it, as random numbers have 52 bits.
LOWEST_EXPONENT = -60.0
# Exponentials are made of these: exp(x) = 2**n * exp(x - n * log(2)), and six terms of a series for the rest.
LOG2_E, LOG_2_HIGH, LOG_2_LOW = 1.44269504, 0.693145752, 1.42860677e-6
TERMS = 1.38888889e-3, 8.33333333e-3, 4.16666667e-2, 1.66666667e-1, 0.5, 1.0, 1.0
# A number of 24 bits plus this has no digits after the point.
ROUNDER = 12582912.0
# ``inverse_cdf`` first sums parts of the vocabulary, which have this size.
CHUNK = 256
# Beyond this many scores numpy finds the highest faster than torch, several times if they are many.
MANY = 1 << 9


def exp_below(x: torch.Tensor) -> torch.Tensor:
    """Returns exp of ``x`` float32, which is nowhere above 0, within a relative error of 2e-7; every
    operation rounds by itself."""
    bounded = x.clamp(min=LOWEST_EXPONENT)
    n = (bounded * LOG2_E).add_(ROUNDER).sub_(ROUNDER)
    rest = (bounded - n * LOG_2_HIGH).sub_(n * LOG_2_LOW)
    series = torch.full_like(rest, TERMS[0])
    for term in TERMS[1:]:
        series.mul_(rest).add_(term)
    power = (n.int() + 127 << 23).view(torch.float32)
    return torch.where(x < LOWEST_EXPONENT, 0.0, series.mul_(power))


def units(x: torch.Tensor, unit: float) -> torch.Tensor:
    """Returns how many whole units of size ``unit`` each of ``x`` has, int64."""
    return (x * (1 / unit)).long()


def in_width(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns a draft's ``logits`` [rows, its vocabulary] in the target's width: ids that only one of both
    knows have probability zero."""
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return F.pad(logits, (0, missing), value=-torch.inf)
    return logits if missing == 0 else logits[:, :vocab_size]


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Returns token ids [...] drawn in proportion to ``weights`` [..., vocab], which add up to 64 at most.

    ``uniforms`` [...] are float64 in (0, 1). The sums count units of 2**-56, finer than those numbers, so
    that rare tokens of a large vocabulary keep their share. A token of weight zero is never drawn. A chunk is
    drawn first, then a token in it: a running sum over a whole vocabulary takes a GPU several times as long.
    """
    if rest := -weights.shape[-1] % CHUNK:
        weights = F.pad(weights, (0, rest))
    masses = units(weights.double(), PROB_UNIT)
    chunks = masses.view(*weights.shape[:-1], weights.shape[-1] // CHUNK, CHUNK)
    ends = chunks.sum(-1).cumsum(-1)
    goal = goal_of(uniforms[..., None], ends[..., -1:])
    # ``clamp`` keeps ``gather`` within bounds for rows of NaN, whose ids are discarded.
    chunk = torch.searchsorted(ends, goal, right=True).clamp(max=chunks.shape[-2] - 1)
    begin = F.pad(ends, (1, 0)).gather(-1, chunk)
    members = chunks.gather(-2, chunk[..., None].expand(*chunk.shape, CHUNK)).squeeze(-2)
    place = torch.searchsorted(members.cumsum(-1), goal - begin, right=True).clamp(max=CHUNK - 1)
    return (chunk * CHUNK + place).squeeze(-1)


def goal_of(shares: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """Returns the ``shares`` float64 of ``totals`` int64 in whole units, but less than the total, to which
    rounding may lift them."""
    return torch.minimum((shares * totals.double()).long(), totals - 1)


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """Returns the index of the highest of ``scores`` [..., vocab], the first among equals: [...]."""
    if scores.device.type == "cpu" and scores.numel() > MANY:
        highest = scores.numpy().argmax(-1)
        return torch.from_numpy(highest) if scores.dim() > 1 else torch.tensor(highest)
    return scores.argmax(-1)


def gumbel_argmax(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Returns the token ids [...] with the lowest ``noise / probs``, ``noise`` being exponential.

    This has the same law as argmax(log probs + Gumbel noise). ``probs`` and ``noise`` are [..., vocab], noise
    float64.
    """
    return argmax(probs / noise)

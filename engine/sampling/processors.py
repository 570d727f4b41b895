"""Turns logits into the distribution that is sampled: temperature, top-k, top-p, min-p, in this order.

The same function makes the target's and the draft's distributions, for every drafted position at once. Cuts
are thresholds on a token's weight, where the most likely token weighs 1: tokens that tie with the last one
kept are kept as well, so that the result does not depend on how a sort breaks ties. Nor does it depend on the
order of additions, as sums are of integers (``ops``).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.messages import SamplingParams
from truedraft.engine.rows.columns import DEVICE_WIDTH, Field
from truedraft.engine.rows.table import Row
from truedraft.engine.sampling.ops import WEIGHT_UNIT, exp_below, goal_of, units

# Top-p examines this many of the most likely tokens first; only if they do not hold the mass, all of them.
TOP_P_CANDIDATES = 1024
# Vocabularies up to this size are sorted whole by numpy on a CPU: torch's topk takes longer.
MAX_SORTED = 8192
SMALLEST = torch.finfo(torch.float32).tiny


class SamplingTensors(NamedTuple):
    """Holds one row per sequence, [batch, 1], and what the host knows of all rows (no device reads later)."""

    temperature: torch.Tensor  # float32, > 0
    top_k: torch.Tensor  # int64, 0 is off
    top_p: torch.Tensor  # float32
    min_p: torch.Tensor  # float32
    largest_top_k: int  # 0 if no row uses min-p
    any_top_p: bool
    any_min_p: bool
    any_uncut: bool  # true if no row has top-k or top-p
    # The host may wait for the device: to see whether top-p's candidates hold the mass, or for numpy.
    may_wait: bool = True

    @classmethod
    def build(cls, params: list[SamplingParams], device: torch.device) -> "SamplingTensors":
        """Makes the tensors of the rows' parameters; greedy rows get temperature 1, as they never look at
        it."""
        return _sampling_tensors(tuple((p.temperature, p.top_k, p.top_p, p.min_p) for p in params), device)

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device) -> "SamplingTensors":
        """Makes the tensors of the columns of rows."""
        table, lines = rows[0].table, [row.number for row in rows]
        temperature, top_p, min_p = (
            table.floats[lines, field].tolist() for field in (Field.TEMPERATURE, Field.TOP_P, Field.MIN_P)
        )
        top_k = table.numbers[lines, Field.TOP_K].tolist()
        return _sampling_tensors(tuple(zip(temperature, top_k, top_p, min_p, strict=True)), device)

    @classmethod
    def on_device(cls, numbers: torch.Tensor) -> "SamplingTensors":
        """Makes the tensors of a device's copy of the columns, without reading it: each row may be cut in
        every way."""
        floats = numbers.view(torch.float64)[:, Field.TEMPERATURE : DEVICE_WIDTH].float()
        temperature, top_p, min_p = floats.unbind(1)
        return cls(
            temperature[:, None],
            numbers[:, Field.TOP_K, None],
            top_p[:, None],
            min_p[:, None],
            largest_top_k=1,  # Some rows may use it; as they may use top-p, too, everything is sorted.
            any_top_p=True,
            any_min_p=True,
            any_uncut=True,
            may_wait=False,
        )


@lru_cache(maxsize=64)
def _sampling_tensors(
    rows: tuple[tuple[float, int, float, float], ...], device: torch.device
) -> SamplingTensors:
    """Makes the tensors, and keeps them, as the same rows come again in most steps."""
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)

    def column(values: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
        return on_device(values, device, dtype)[:, None]

    return SamplingTensors(
        temperature=column(tuple(t or 1.0 for t in temperature), torch.float32).clamp(min=SMALLEST),
        top_k=column(top_k, torch.int64),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        largest_top_k=max(top_k),
        any_top_p=min(top_p) < 1,
        any_min_p=max(min_p) > 0,
        any_uncut=any(k == 0 and p >= 1 for k, p in zip(top_k, top_p, strict=True)),
    )


def to_probs(logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Returns distributions [batch, positions, vocab], float32, made of logits of that shape."""
    logits = logits.float()
    # The maximum is subtracted first: a temperature next to zero would make infinities of the logits.
    logits = logits - logits.amax(-1, keepdim=True)
    weights = exp_below(logits / sampling.temperature[..., None])
    if sampling.largest_top_k or sampling.any_top_p or sampling.any_min_p:
        weights = torch.where(weights >= _threshold(weights, sampling), weights, 0.0)
    total = units(weights, WEIGHT_UNIT).sum(-1, keepdim=True)
    return weights / (total.double() * WEIGHT_UNIT).float()


def _threshold(weights: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Returns the smallest weight that is kept: [batch, positions, 1]. The most likely token weighs 1."""
    if not (sampling.largest_top_k or sampling.any_top_p):
        return sampling.min_p[..., None]
    top_k, top_p = sampling.top_k[..., None], sampling.top_p[..., None].double()
    goal = torch.zeros_like(top_k)
    if sampling.any_top_p:
        goal = goal_of(top_p, units(weights, WEIGHT_UNIT).sum(-1, keepdim=True))
    top = _top_candidates(weights, sampling, goal)
    masses = units(top, WEIGHT_UNIT)
    if not sampling.largest_top_k:
        kept = masses.cumsum(-1) - masses < goal.clamp(min=1)
    else:
        kept = (top_k == 0) | (torch.arange(top.shape[-1], device=top.device) < top_k)
        if sampling.any_top_p:
            kept_masses = torch.where(kept, masses, 0)
            goal = torch.where(top_k == 0, goal, goal_of(top_p, kept_masses.sum(-1, keepdim=True)))
            before = kept_masses.cumsum(-1) - kept_masses
            kept = kept & ((before < goal.clamp(min=1)) | (top_p >= 1))
    smallest = torch.where(kept, top, torch.inf).amin(-1, keepdim=True)
    if sampling.any_uncut:
        smallest = torch.where((top_k == 0) & (top_p >= 1), 0.0, smallest)
    if sampling.any_min_p:
        smallest = torch.maximum(smallest, sampling.min_p[..., None])
    return smallest


def _top_candidates(weights: torch.Tensor, sampling: SamplingTensors, goal: torch.Tensor) -> torch.Tensor:
    """Returns the highest weights in falling order, as many as the cuts may examine; top-p keeps ``goal``
    units."""
    vocab_size = weights.shape[-1]
    num_candidates = max(1, sampling.largest_top_k)
    if sampling.any_top_p:
        num_candidates = max(num_candidates, TOP_P_CANDIDATES if sampling.may_wait else vocab_size)
    num_candidates = min(num_candidates, vocab_size)
    if num_candidates > 1 and vocab_size <= MAX_SORTED and weights.device.type == "cpu" and sampling.may_wait:
        top = torch.from_numpy(np.sort(weights.numpy(), -1)[..., ::-1][..., :num_candidates].copy())
    elif num_candidates == vocab_size:
        top = weights.sort(-1, descending=True).values
    else:
        top = weights.topk(num_candidates).values
    if sampling.any_top_p and num_candidates < vocab_size and sampling.may_wait:
        uncovered = units(top, WEIGHT_UNIT).sum(-1) < goal.squeeze(-1)
        if sampling.largest_top_k or sampling.any_uncut:
            uncovered = uncovered & (sampling.top_k == 0) & (sampling.top_p < 1)
        if uncovered.any():
            return weights.sort(-1, descending=True).values
    return top

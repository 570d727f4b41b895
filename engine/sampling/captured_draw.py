"""One draw of each row as a graph can hold it: rows are numbers on the device, no decision depends on them.

Serves rows whose token is a function of logits, seed and position alone: exact match and coupled rows without
penalties, bias or rules. Draws the ids that ``Sampler.draw_drafts`` draws. Knows nothing of models.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from engine.host_to_device import send
from engine.sampling.processors import SMALLEST, SamplingTensors, to_probs
from engine.sampling.random import captured_noise, counters
from engine.sampling.sampler import Row, Rule, Sampler

# int64 numbers that tell all of a row.
NUMBERS_PER_ROW = 6


class DrawKind(IntEnum):
    """What a batch's rows ask for. Each kind is captured apart, as a captured draw does all of its work."""

    GREEDY = 0
    SAMPLED = 1  # with temperature alone
    CUT = 2  # by top-k, top-p or min-p


class DrawRow(NamedTuple):
    """One row's numbers on the host."""

    is_greedy: bool
    seed: int
    top_k: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def kind(self) -> DrawKind:
        if self.is_greedy:
            return DrawKind.GREEDY
        is_cut = self.top_k or self.top_p < 1 or self.min_p
        return DrawKind.CUT if is_cut else DrawKind.SAMPLED


PADDING = DrawRow(is_greedy=True, seed=0)


class DrawTensors(NamedTuple):
    """The same of all rows on the device, [rows] each."""

    is_greedy: torch.Tensor  # bool
    seeds: torch.Tensor  # int64
    top_k: torch.Tensor  # int64
    temperature: torch.Tensor  # float32
    top_p: torch.Tensor  # float32
    min_p: torch.Tensor  # float32

    @classmethod
    def unpack(cls, numbers: torch.Tensor) -> "DrawTensors":
        """What ``pack`` has filled in, on the device: int64 [rows * NUMBERS_PER_ROW]. May be captured."""
        columns = numbers.view(NUMBERS_PER_ROW, -1)
        seeds, top_k, is_greedy = columns[:3].unbind(0)
        temperature, top_p, min_p = columns[3:].view(torch.float64).float().unbind(0)
        return cls(is_greedy != 0, seeds, top_k, temperature, top_p, min_p)

    def repeated(self, times: int) -> "DrawTensors":
        """Each row so many times, one after the other."""
        return DrawTensors(*(column[:, None].expand(-1, times).reshape(-1) for column in self))


def pack(rows: Sequence[DrawRow], numbers: np.ndarray) -> None:
    """Fill int64 ``numbers`` [n * NUMBERS_PER_ROW], n >= the number of ``rows``; behind them is padding.

    Temperatures and shares go as the bits of float64.
    """
    columns = numbers.reshape(NUMBERS_PER_ROW, -1)
    padded = [*rows, *[PADDING] * (columns.shape[1] - len(rows))]
    columns[0] = [row.seed for row in padded]
    columns[1] = [row.top_k for row in padded]
    columns[2] = [row.is_greedy for row in padded]
    shares = columns[3:].view(np.float64)
    shares[0] = [row.temperature for row in padded]
    shares[1] = [row.top_p for row in padded]
    shares[2] = [row.min_p for row in padded]


def draw_rows(sampler: Sampler) -> list[DrawRow] | None:
    """The sampler's rows; None if one of them asks for more than this file does."""
    if sampler.uses_draft_probs or sampler.needs_adjustment:
        return None
    return [_draw_row(row) for row in sampler.rows]


def _draw_row(row: Row) -> DrawRow:
    params = row.params
    return DrawRow(
        is_greedy=row.rule is Rule.EXACT_MATCH,
        seed=row.seed,
        top_k=params.top_k,
        temperature=max(params.temperature or 1.0, SMALLEST),
        top_p=params.top_p,
        min_p=params.min_p,
    )


def captured_draw(
    kind: DrawKind,
    logits: torch.Tensor,
    rows: DrawTensors,
    positions: torch.Tensor,
    counters: torch.Tensor,
) -> torch.Tensor:
    """Token ids [rows] that stand at ``positions`` [rows], from ``logits`` [rows, vocab] of a draft.

    ``kind`` is the highest of the rows' kinds, ``counters`` those of ``random.counters``. NaN gives any id.
    """
    likeliest = logits.argmax(-1)
    if kind is DrawKind.GREEDY:
        return likeliest
    sampling = SamplingTensors(
        temperature=rows.temperature[:, None],
        top_k=rows.top_k[:, None],
        top_p=rows.top_p[:, None],
        min_p=rows.min_p[:, None],
        largest_top_k=logits.shape[-1] if kind is DrawKind.CUT else 0,
        any_top_p=kind is DrawKind.CUT,
        any_min_p=kind is DrawKind.CUT,
        any_uncut=True,
        is_captured=True,
    )
    probs = to_probs(logits[:, None], sampling)[:, 0]
    winners = (probs / captured_noise(rows.seeds, positions, counters)).argmax(-1)
    return torch.where(rows.is_greedy, likeliest, winners)


def draw_now(logits: torch.Tensor, rows: Sequence[DrawRow], sampler: Sampler) -> torch.Tensor:
    """The first drafts [rows] of ``sampler``'s ``rows``, from a draft's ``logits`` [rows, vocab]. Nothing is
    captured, but the host does not wait either, as it does where a sampler looks for top-p's mass."""
    kind = max(row.kind for row in rows)
    if kind is DrawKind.GREEDY:
        return logits.argmax(-1)
    numbers = np.empty(len(rows) * NUMBERS_PER_ROW, dtype=np.int64)
    pack(rows, numbers)
    tensors = DrawTensors.unpack(send(torch.from_numpy(numbers), sampler.device))
    ids = counters(logits.shape[-1], sampler.device)
    return captured_draw(kind, logits, tensors, sampler.positions, ids)

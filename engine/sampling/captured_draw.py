"""One draw of each row as a graph can hold it: rows are numbers on the device, no decision depends on them.

Serves rows whose token is a function of logits, seed and position alone: exact match and coupled rows without
penalties, bias or rules. Draws the ids that ``Sampler.draw_drafts`` draws. Knows nothing of models.
"""

from enum import IntEnum
from typing import NamedTuple

import torch

from engine.sampling.processors import SMALLEST, SamplingTensors, to_probs
from engine.sampling.random import captured_noise
from engine.sampling.sampler import Row, Rule, Sampler


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


class DrawTensors(NamedTuple):
    """The same of all rows on the device, [rows] each."""

    is_greedy: torch.Tensor  # bool
    seeds: torch.Tensor  # int64
    top_k: torch.Tensor  # int64
    temperature: torch.Tensor  # float32
    top_p: torch.Tensor  # float32
    min_p: torch.Tensor  # float32


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

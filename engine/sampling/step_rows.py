"""Holds the rows of one step, as the operations of a round see them."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.table import Row, RowTable
from truedraft.engine.sampling.processors import SamplingTensors
from truedraft.engine.sampling.random import KeptNoise

# This index selects all of a tensor's rows.
ALL = slice(None)
# This is the table of no rows.
NO_TABLE = RowTable()


class StepRows:
    """Holds ``rows`` in the step's order. ``vocab_size`` is the target's; every distribution has that
    width."""

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        self.rows = rows
        self.table = rows[0].table if rows else NO_TABLE
        self.vocab_size = vocab_size
        self.device = device
        self.groups: dict[Rule, list[int]] = {}
        self.drafting: dict[tuple[Rule, bool], list[int]] = {}  # rows that draw their drafts in the same way
        for i, row in enumerate(rows):
            self.groups.setdefault(row.rule, []).append(i)
            self.drafting.setdefault((row.rule, row.drafts_greedily), []).append(i)
        self.all_greedy = self.groups.keys() == {Rule.EXACT_MATCH}
        special = [i for i, row in enumerate(rows) if not row.is_plain]
        self.traced = any(rows[i].params.trace for i in special)
        self.uses_draft_probs = self.traced or any(rule.uses_draft_probs for rule in self.groups)
        self.adjusted = [i for i in special if rows[i].needs_adjustment]
        self.noise: dict[tuple[int, ...], KeptNoise] = {}  # keys are rows
        self.columns: torch.Tensor | None = None  # the rows' numbers on a device that needs them
        # What the host knows of the drafts, where it need not wait for what the device does now.
        self.read_drafts: Callable[[], list[list[int]]] | None = None
        self._cuts: dict[tuple[int, ...], SamplingTensors] = {}  # keys are rows

    @cached_property
    def lines(self) -> "np.ndarray[Any, Any]":
        """Returns the numbers of the rows' lines in their table: int64 [B]."""
        return self.table.lines_of(self.rows)

    @cached_property
    def seeds(self) -> torch.Tensor:
        return on_device([row.seed for row in self.rows], self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        return on_device([row.position for row in self.rows], self.device)

    def index(self, indices: list[int]) -> slice | torch.Tensor:
        """Returns an index that selects these rows from a tensor of all."""
        return ALL if len(indices) == len(self.rows) else on_device(indices, self.device)

    def cuts(self, indices: list[int]) -> SamplingTensors:
        """Returns the parameters that turn the rows' logits into distributions."""
        key = tuple(indices)
        cuts = self._cuts.get(key)
        if cuts is None:
            cuts = self._cuts[key] = SamplingTensors.of([self.rows[i] for i in indices], self.device)
        return cuts


def take(tensor: torch.Tensor, members: slice | torch.Tensor) -> torch.Tensor:
    """Returns ``tensor[members]``, at no cost where that is all of it."""
    return tensor if members is ALL else tensor[members]

"""Adjusts the logits of rows that ask for it, between a captured pass and its verdicts, on the device.

Drafts of such rows are drawn without adjustments, which is exact: the verdict knows the distributions that
they were drawn from. Only masks and rules need the drafted ids on the host, which reads them once for all
rows.
"""

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.rounds.capture.graphs import RoundGraphs
from truedraft.engine.rounds.capture.shapes import Shape
from truedraft.engine.rows.table import Row
from truedraft.engine.sampling.adjust import adjust_logits


class KeptLogits(NamedTuple):
    """Holds a row's raw logits [drafts + 1, V], and says which log-probabilities of each are asked for."""

    logits: torch.Tensor
    num_top: int
    given_ids: list[int]


class Adjuster:
    """Knows how often each token stands in the texts of penalised rows."""

    def __init__(self, graphs: RoundGraphs) -> None:
        self.graphs = graphs
        self._counts: WeakKeyDictionary[Row, _Counts] = WeakKeyDictionary()

    def adjust(
        self, shape: Shape, rows: Sequence[Row], places: list[int], lengths: list[int]
    ) -> list[KeptLogits | None]:
        """Adjusts the logits that the pass of this shape has left for ``rows`` in these places. Returns the
        raw logits of rows that ask for log-probabilities."""
        logits = self.graphs.logits_of(shape)
        kept: list[KeptLogits | None] = [None] * len(rows)
        for i, (row, place, length) in enumerate(zip(rows, places, lengths, strict=True)):
            if (num_top := row.params.logprobs) is not None:
                kept[i] = KeptLogits(
                    logits[place, : length + 1].clone(), num_top, row.params.logprob_token_ids
                )
        adjusted = [(row, place) for row, place in zip(rows, places, strict=True) if row.needs_adjustment]
        if adjusted:
            self.graphs.capture.launch(lambda: self._adjust(logits, *zip(*adjusted, strict=True)))
        return kept

    def _adjust(self, logits: torch.Tensor, rows: Sequence[Row], places: Sequence[int]) -> None:
        num_positions = logits.shape[1]
        index = on_device(list(places), logits.device)
        drafted = self.graphs.rows.ids(logits.shape[0])[index, 2 : 1 + num_positions]
        counts = [self._count(row) for row in rows if row.is_penalised]
        base = torch.stack(counts, dim=1) if counts else None
        rules = self.graphs.target.model.rules
        logits[index] = adjust_logits(logits[index], rows, drafted, 0, rules, base)

    def _count(self, row: Row) -> torch.Tensor:
        counts = self._counts.get(row)
        if counts is None:
            logits = self.graphs.logits
            counts = self._counts[row] = _Counts(logits.shape[-1], logits.device)
        return counts.of(row)


class _Counts:
    """Counts a row's tokens on the device; only those that are new are sent."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._counts = torch.zeros(2, vocab_size, device=device)
        self._num_counted = 0

    def of(self, row: Row) -> torch.Tensor:
        """Returns how often each token stands in the prompt and in the output, which has only grown since the
        last call: [2, V]."""
        text, end, vocab_size = row.token_ids, row.num_prompt_tokens, self._counts.shape[1]
        first = max(self._num_counted, row.first_token)
        places = [vocab_size * (place >= end) + text[place] for place in range(first, len(text))]
        new = on_device(places, self._counts.device)
        self._counts.view(-1).scatter_add_(0, new, torch.ones_like(new, dtype=self._counts.dtype))
        self._num_counted = len(text)
        return self._counts

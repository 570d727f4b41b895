"""Adjusts the logits of rows that ask for more, between a captured pass and its verdicts, on the device.

Drafts of such rows are drawn without adjustments, which is exact: the verdict knows what they were drawn
from. Only masks and rules need the drafted ids on the host, which reads them once for all rows.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import ScheduledSequence
from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.runtime.cuda.graphs import RoundGraphs
from truedraft.engine.runtime.cuda.shapes import Shape
from truedraft.engine.runtime.history import history_of
from truedraft.engine.sampling.adjust import History, adjust_logits


class KeptLogits(NamedTuple):
    """Holds a row's raw logits [drafts + 1, V], and how many log-probabilities of each are asked for."""

    logits: torch.Tensor
    num_top: int


class Adjuster:
    """Knows the histories of sequences that decode, and how often each token stands in penalised texts."""

    def __init__(self, graphs: RoundGraphs) -> None:
        self.graphs = graphs
        self._histories: WeakKeyDictionary[Sequence, History] = WeakKeyDictionary()
        self._counts: WeakKeyDictionary[Sequence, _Counts] = WeakKeyDictionary()

    def adjust(
        self, shape: Shape, parts: list[ScheduledSequence], rows: list[int], lengths: list[int]
    ) -> list[KeptLogits | None]:
        """Adjusts what the pass of this shape has left; ``rows`` are the places of ``parts``. Returns the raw
        logits of rows that ask for log-probabilities."""
        logits = self.graphs.logits_of(shape)
        kept: list[KeptLogits | None] = [None] * len(parts)
        for i, (part, row, length) in enumerate(zip(parts, rows, lengths, strict=True)):
            num_top = part.sequence.params.logprobs
            if num_top is not None:
                kept[i] = KeptLogits(logits[row, : length + 1].clone(), num_top)
        histories = [self._history(part.sequence) for part in parts]
        adjusted = [i for i, history in enumerate(histories) if history.needs_adjustment]
        if adjusted:
            self.graphs.capture.launch(lambda: self._adjust(logits, parts, rows, histories, adjusted))
        return kept

    def _adjust(
        self,
        logits: torch.Tensor,
        parts: list[ScheduledSequence],
        rows: list[int],
        histories: list[History],
        adjusted: list[int],
    ) -> None:
        num_positions = logits.shape[1]
        places = on_device([rows[i] for i in adjusted], logits.device)
        drafted = self.graphs.rows.ids(logits.shape[0])[places, 2 : 1 + num_positions]
        counts = [self._count(parts[i].sequence, histories[i]) for i in adjusted if histories[i].penalized]
        base = torch.stack(counts, dim=1) if counts else None
        members = [histories[i] for i in adjusted]
        logits[places] = adjust_logits(logits[places], members, drafted, 0, base)

    def _history(self, sequence: Sequence) -> History:
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = history_of(sequence, self.graphs.target.model.rules)
        return history

    def _count(self, sequence: Sequence, history: History) -> torch.Tensor:
        counts = self._counts.get(sequence)
        if counts is None:
            logits = self.graphs.logits
            counts = self._counts[sequence] = _Counts(logits.shape[-1], logits.device)
        return counts.of(history)


class _Counts:
    """Counts a sequence's tokens on the device; only those that are new are sent."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._counts = torch.zeros(2, vocab_size, device=device)
        self._num_counted = 0

    def of(self, history: History) -> torch.Tensor:
        """Returns how often each token stands in the prompt and in the output, which goes on where it ended
        before: [2, V]."""
        text, end, vocab_size = history.token_ids, history.num_prompt_tokens, self._counts.shape[1]
        first = max(self._num_counted, history.num_encoder_tokens)
        places = [vocab_size * (place >= end) + text[place] for place in range(first, len(text))]
        new = on_device(places, self._counts.device)
        self._counts.view(-1).scatter_add_(0, new, torch.ones_like(new, dtype=self._counts.dtype))
        self._num_counted = len(text)
        return self._counts

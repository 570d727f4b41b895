"""Drafts from a smaller model with its own cache, drawn with each request's own parameters.

Its cache follows the target's: prompt chunks are computed in the same step, unless no draft is expected soon,
and what it missed (the last drafted token after a full acceptance, or more after a pause) is caught up
in the first pass of a round.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from truedraft.engine.core.step import Kind, ScheduledSequence
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.messages import Source
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.sampling.sampler import Drafts, Sampler


class DraftModelProposer:
    """``max_len`` is the longest sequence the draft model can hold, ``vocab_size`` the target's."""

    name: Source = "draft_model"
    trace_source = "draft_model"

    def __init__(self, model: ModelRunner, max_len: int, vocab_size: int) -> None:
        self.model = model
        self.max_len = max_len
        self.vocab_size = vocab_size

    def propose(self, scheduled: list[ScheduledSequence], sampler: Sampler) -> Drafts:
        completing = [part for part in scheduled if part.completes]
        lengths = [part.num_drawn_by(self.name) for part in completing]
        logits = self._first_pass(scheduled)
        num_positions = max(lengths, default=0)
        if num_positions == 0:
            return Drafts.empty(len(lengths), sampler.device)

        token_ids = torch.zeros(len(lengths), num_positions, dtype=torch.int64, device=sampler.device)
        probs = None
        if sampler.uses_draft_probs:
            probs = torch.zeros(len(lengths), num_positions, sampler.vocab_size, device=sampler.device)
        active = [row for row, length in enumerate(lengths) if length > 0]
        members: slice | torch.Tensor
        drawing, members = sampler, slice(None)  # the rows that draft, and where they are among all
        for position in range(num_positions):
            if len(active) < len(drawing.rows):
                drawing, members = sampler.select(active), on_device(active, sampler.device)
            if position > 0:
                tables = [completing[row].sequence.draft_blocks for row in active]
                # The host launches the next pass without reading what was drawn: on a GPU it would wait.
                last = token_ids[members, position - 1]
                logits = self._forward([Span(table, [0], 1) for table in tables], last)
            draw = drawing.draw_drafts(logits, token_ids[members, :position])
            token_ids[members, position] = draw.ids
            if probs is not None and draw.probs is not None:
                probs[members, position] = draw.probs
            active = [row for row in active if lengths[row] > position + 1]
        return Drafts(token_ids, probs, lengths)

    def prefill(self, prompts: list[ScheduledSequence]) -> None:
        self._first_pass(prompts)

    def _first_pass(self, scheduled: list[ScheduledSequence]) -> torch.Tensor:
        spans = [span for part in scheduled if (span := self._catch_up(part)) is not None]
        return self._forward(self._known(spans))

    def _catch_up(self, part: ScheduledSequence) -> Span | None:
        """What the draft is to store in its first pass: of a prompt all that the target will have stored
        after this step, of a decoding sequence what it missed while other sources drafted or none did."""
        sequence = part.sequence
        start = sequence.draft_blocks.num_computed_tokens
        end = sequence.target_blocks.num_computed_tokens + part.num_tokens
        num_logits = min(1, part.num_drawn_by(self.name))
        if part.kind is Kind.DECODE:
            end = start + part.num_catch_up_tokens + num_logits
        elif not part.prefill_draft:
            return None
        if not sequence.uses_draft_model or start == end or end > self.max_len:
            return None
        return Span(sequence.draft_blocks, sequence.token_ids[start:end], num_logits)

    def _forward(self, spans: list[Span], ids_on_device: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [spans that want them, the target's vocabulary]."""
        if not spans:
            return torch.empty(0)
        if ids_on_device is not None and self.model.vocab_size < self.vocab_size:
            # As ``_known``.
            ids_on_device = ids_on_device.clamp(max=self.model.vocab_size - 1)
        return in_width(self.model.forward(spans, ids_on_device).logits, self.vocab_size)

    def _known(self, spans: list[Span]) -> list[Span]:
        """With any stand-in for tokens that only the target has."""
        unknown = self.model.vocab_size  # and beyond
        if unknown >= self.vocab_size:
            return spans
        return [
            replace(span, token_ids=[min(token_id, unknown - 1) for token_id in span.token_ids])
            for span in spans
        ]


def in_width(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """A draft's ``logits`` [rows, its vocabulary] in the target's width: ids only one of both knows have
    probability zero."""
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return F.pad(logits, (0, missing), value=-torch.inf)
    return logits if missing == 0 else logits[:, :vocab_size]

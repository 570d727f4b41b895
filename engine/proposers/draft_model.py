"""Drafts from a smaller model with its own cache, drawn with each request's own parameters.

Its cache follows the target's: prompt chunks are computed in the same step, unless no draft is expected soon,
and what it missed (the last drafted token after a full acceptance, or more after a pause) is caught up
in the first pass of a round.
"""

from collections.abc import Sequence as Sequences
from dataclasses import replace

import torch

from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.needs import Need
from truedraft.engine.core.proposer import Proposer, ProposerCache
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import Kind, ScheduledSequence, StepPlan
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import DRAFT_MODEL
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.proposers.drawn import drawn_drafts, lengths_of
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.sampling.ops import in_width
from truedraft.engine.sampling.sampler import Sampler


class DraftModelProposer(Proposer):
    """Drafts with a model. ``pool`` is its own, as large as the target's. ``max_len`` is the longest sequence
    that the draft model can hold, ``vocab_size`` is the target's."""

    name = DRAFT_MODEL
    need = Need.DRAFT_MODEL
    draws = True

    def __init__(self, model: ModelRunner, pool: BlockPool, max_len: int, vocab_size: int) -> None:
        self.model = model
        self.cache = ProposerCache(pool)
        self.max_len = max_len
        self.vocab_size = vocab_size

    @property
    def runners(self) -> Sequences[ModelRunner]:
        return (self.model,)

    @property
    def pools(self) -> Sequences[BlockPool]:
        return (self.cache.pool,)

    def tables(self, sequence: Sequence) -> Sequences[tuple[BlockPool, BlockTable]]:
        return ((self.cache.pool, self.cache.table(sequence)),)

    def num_missing(self, sequence: Sequence) -> int:
        return self.cache.num_missing(sequence)

    def reset(self) -> None:
        self.cache.reset()

    def propose(self, plan: StepPlan, sampler: Sampler) -> Drafts:
        first_logits = self._first_pass(plan.scheduled)

        def next_logits(rows: list[int], last_ids: torch.Tensor | None) -> torch.Tensor:
            if last_ids is None:
                return in_width(first_logits, self.vocab_size)
            sequences = [plan.rows[row].sequence for row in rows]
            spans = [Span(self.cache.table(each), [0], 1, len(each)) for each in sequences]
            return in_width(self._forward(spans, last_ids), self.vocab_size)

        return drawn_drafts(lengths_of(plan, self.name), sampler, next_logits)

    def prefill(self, prompts: Sequences[ScheduledSequence]) -> None:
        self._first_pass(prompts)

    def _first_pass(self, scheduled: Sequences[ScheduledSequence]) -> torch.Tensor:
        spans = [span for part in scheduled if (span := self._catch_up(part)) is not None]
        return self._forward(self._known(spans))

    def _catch_up(self, part: ScheduledSequence) -> Span | None:
        """Returns the tokens to store in the draft's first pass: of a prompt all that the target will have
        stored after this step, of a decoding sequence those it missed while other sources drafted or none
        did."""
        sequence = part.sequence
        is_decoding = part.kind is Kind.DECODE
        if not (part.draft.source == self.name if is_decoding else part.is_prefilled_by(self.name)):
            return None
        table = self.cache.table(sequence)
        start, num_logits = table.num_computed_tokens, min(1, part.num_drawn_by(self.name))
        end = sequence.target_blocks.num_computed_tokens + part.num_tokens
        if is_decoding:
            end = start + part.num_catch_up_tokens + num_logits
        if start == end or end > self.max_len:
            return None
        return Span(table, sequence.token_ids[start:end], num_logits)

    def _forward(self, spans: list[Span], ids_on_device: torch.Tensor | None = None) -> torch.Tensor:
        """Returns logits [spans that ask for them, the draft's vocabulary]."""
        if not spans:
            return torch.empty(0)
        if ids_on_device is not None and self.model.vocab_size < self.vocab_size:
            # Ids unknown to the draft are replaced as in ``_known``.
            ids_on_device = ids_on_device.clamp(max=self.model.vocab_size - 1)
        return self.model.forward(spans, ids_on_device).logits

    def _known(self, spans: list[Span]) -> list[Span]:
        """Returns the ids with a stand-in for tokens that only the target has."""
        unknown = self.model.vocab_size  # Ids beyond the draft's vocabulary are unknown, too.
        if unknown >= self.vocab_size:
            return spans
        return [
            replace(span, token_ids=[min(token_id, unknown - 1) for token_id in span.token_ids])
            for span in spans
        ]

"""Drafts with a head: first from the target's states, then from its own.

The head's cache has a place for each token that the target has stored; place p holds the state of token p and
the token after it. ``observe`` is told the states, and the next pass that drafts stores them. Places that a
draft has filled from the head's own states are computed again from the target's states: they are never kept.
"""

from collections.abc import Sequence as Sequences
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch

from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.needs import Need
from truedraft.engine.core.proposer import Observation, Proposer, ProposerCache
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import MAX_CATCH_UP_TOKENS, StepPlan
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.messages import DraftVocabulary, HeadOutput
from truedraft.engine.models.heads.head import Head
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.proposers.drawn import drawn_drafts, lengths_of
from truedraft.engine.proposers.heads.waiting import Waiting
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.sampling.sampler import Sampler

# The content of a place depends on the token after it.
LOOKAHEAD = 1


class HeadProposer(Proposer):
    """Drafts with a head. ``runner`` runs its model over its own cache; ``pool`` is as large as the target's,
    and ``vocab_size`` is the target's."""

    can_lag = False
    need = Need.HEAD
    draws = True

    def __init__(self, head: Head, runner: ModelRunner, pool: BlockPool, vocab_size: int) -> None:
        self.name = head.method
        self.head = head
        self.runner = runner
        self.cache = ProposerCache(pool)
        self.vocab_size = vocab_size
        self.taps = head.taps
        # Rounds in C and steps by phases, which may come in any order, share the waiting states.
        self._waiting: WeakKeyDictionary[Sequence, Waiting] = WeakKeyDictionary()

    @property
    def head_output(self) -> HeadOutput:
        return self.head.drafts_with

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        return self.head.vocabulary

    @property
    def runners(self) -> Sequences[ModelRunner]:
        return (self.runner,)

    @property
    def pools(self) -> Sequences[BlockPool]:
        return (self.cache.pool,)

    def tables(self, sequence: Sequence) -> Sequences[tuple[BlockPool, BlockTable]]:
        return ((self.cache.pool, self.cache.table(sequence)),)

    def reset(self) -> None:
        self.cache.reset()
        self._waiting.clear()

    @torch.inference_mode()
    def observe(self, observations: Sequences[Observation]) -> None:
        hidden = [seen.hidden for seen in observations if seen.hidden is not None]
        states = self.head.states(hidden[0] if len(hidden) == 1 else torch.cat(hidden))
        parts = torch.split(states, [len(seen.token_ids) for seen in observations])
        spans = []
        for seen, part in zip(observations, parts, strict=True):
            waiting = self.waiting(seen.sequence, seen.first)
            if waiting.num_tokens + len(part) > MAX_CATCH_UP_TOKENS:
                # The last state is left for the next draft, whose logits it gives.
                known = torch.cat((waiting.known, part))
                spans.append(self._span(seen, known[:-1]))
                waiting.num_tokens, part = 0, known[-1:]
            waiting.add(part)
        if spans:
            self.runner.forward(spans)

    def waiting(self, sequence: Sequence, num_told: int) -> Waiting:
        """Returns the waiting states of a sequence's first ``num_told`` tokens. After a preemption none
        wait."""
        waiting, table = self._waiting.get(sequence), self.cache.table(sequence)
        if waiting is None:
            model = self.head.model
            waiting = Waiting(self.head.hidden_size, model.dtype, model.device)
            self._waiting[sequence] = waiting
        if table.num_computed_tokens + waiting.num_tokens != num_told:
            assert table.num_computed_tokens == num_told, "the head has not been told of some tokens"
            waiting.num_tokens = 0
        return waiting

    def _span(self, seen: Observation, states: torch.Tensor) -> Span:
        """Returns the tokens to store with their ``states``; the last state belongs to the last token but one
        that has been seen."""
        table = self.cache.table(seen.sequence)
        known = [*seen.sequence.token_ids[table.num_computed_tokens : seen.first], *seen.token_ids]
        return Span(table, known[1:], 0, states=states)

    def is_told(self, sequence: Sequence) -> bool:
        """Tells whether the states of all tokens but the pending one are known: the first token of a text has
        none before it is computed."""
        num_told = sequence.target_blocks.num_computed_tokens
        return num_told == len(sequence) - 1 and self.waiting(sequence, num_told).num_tokens > 0

    def propose(self, plan: StepPlan, sampler: Sampler) -> Drafts:
        sequences = [part.sequence for part in plan.rows]
        lengths = [
            length if length and self.is_told(sequence) else 0
            for sequence, length in zip(sequences, lengths_of(plan, self.name), strict=True)
        ]
        drafting: list[int] = []  # the rows of the last pass
        states: tuple[torch.Tensor, ...] = ()  # it has made these of their last tokens

        def next_logits(rows: list[int], last_ids: torch.Tensor | None) -> torch.Tensor:
            nonlocal drafting, states
            if last_ids is None:
                spans = self.first_spans([sequences[row] for row in rows])
            else:
                tables = [self.cache.table(sequences[row]) for row in rows]
                own = dict(zip(drafting, states, strict=True))
                spans = [Span(table, [0], 1, None, own[row]) for row, table in zip(rows, tables, strict=True)]
            logits, hidden = self.runner.forward(spans, last_ids, (self.head.output,))
            assert hidden is not None
            if len(hidden) > len(spans):
                ends = [end - 1 for end in accumulate(len(span.token_ids) for span in spans)]
                hidden = hidden.index_select(0, on_device(ends, hidden.device))
            drafting, states = rows, hidden.flatten(1)[:, None].unbind()
            return self.head.in_width(logits, self.vocab_size)

        drafts = drawn_drafts(lengths, sampler, next_logits)
        self.take_back([sequences[row] for row, length in enumerate(lengths) if length])
        return drafts

    def first_spans(self, sequences: Sequences[Sequence]) -> list[Span]:
        """Returns the input of a draft's first pass: the waiting states, and the tokens after them."""
        tables = [self.cache.table(sequence) for sequence in sequences]
        return [
            Span(
                table,
                sequence.token_ids[table.num_computed_tokens + 1 :],
                1,
                states=self._waiting[sequence].known,
            )
            for sequence, table in zip(sequences, tables, strict=True)
        ]

    def take_back(self, sequences: Sequences[Sequence]) -> None:
        """Removes the places that drafts have filled from the head's own states; nothing waits any more."""
        for sequence in sequences:
            self.cache.table(sequence).num_computed_tokens = len(sequence) - 1
            self._waiting[sequence].num_tokens = 0

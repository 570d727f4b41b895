"""Drafts from a model with another tokenizer: its text, encoded again with the target's.

The draft model sees the sequence's text in its own tokens, with its own cache, and continues it greedily. Its
new text becomes target tokens: a deterministic draft, which the rules verify exactly without knowing its
origin. Text that cannot be translated, or for which there is no memory, is not drafted; nothing here can
change the output. Idea: universal assisted generation (Timor et al., 2502.05202, exact match on strings).
"""

import math
import weakref
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.needs import Need
from truedraft.engine.core.proposer import Proposer
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import Kind, ScheduledSequence, StepPlan
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.recurrent_state import ROLLBACK
from truedraft.engine.messages import DRAFT_MODEL
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.proposers.known import known_drafts
from truedraft.engine.proposers.translated.draft_text import DraftText
from truedraft.engine.proposers.translated.target_text import TargetText
from truedraft.engine.proposers.translated.tokenizer import BROKEN, TextTokenizer
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.sampling.sampler import Sampler

# At most this many draft tokens are computed per target token, however short they are.
MAX_TOKENS_PER_TOKEN = 6
# This many earlier draft tokens are decoded together with the new ones.
CONTEXT = 8
# More text may change this many draft tokens at a text's end; if it changes more, states are computed anew.
UNCERTAIN = 8


@dataclass(slots=True)
class _State:
    """Holds one sequence as the draft sees it. ``stored`` are the ids in the draft's cache, drafted ones
    included: as many as ``table`` has computed."""

    target_text: TargetText
    draft_text: DraftText
    table: BlockTable = field(default_factory=BlockTable)
    stored: list[int] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        return len(self.draft_text.ids) - len(self.stored)

    def span(self, token_ids: list[int], num_logits: int) -> Span:
        """Returns the next tokens to compute, and marks them as stored."""
        num_certain = max(0, len(self.draft_text.ids) - UNCERTAIN)
        self.stored += token_ids
        return Span(self.table, token_ids, num_logits, min(num_certain, len(self.stored)))

    @property
    def draft_tokens_per_token(self) -> float:
        ratio = len(self.draft_text.ids) / max(1, self.target_text.num_tokens)
        return min(max(ratio, 1 / MAX_TOKENS_PER_TOKEN), MAX_TOKENS_PER_TOKEN)


@dataclass(slots=True)
class _Row:
    """Is a sequence that drafts in this step: ``num_steps`` draft tokens for up to ``limit`` target
    tokens."""

    state: _State
    index: int  # numbers the sequences that draw
    limit: int
    num_steps: int
    drafted: list[int] = field(default_factory=list)
    ended: bool = False


class TranslatedDraftProposer(Proposer):
    """Drafts with a model that has another tokenizer. ``pool`` holds its blocks: the scheduler counts in
    target tokens and does not know it.

    A sequence has at most ``max_num_ids`` draft tokens; ``max_batched_tokens`` of them are computed per step
    to catch up with prompts. ``eos_token_id`` is the target's end token, used where the draft ends its text.
    To the outside it is the pair's draft model; only traces tell it apart, since its drafts have no
    probabilities.
    """

    name = DRAFT_MODEL
    trace_source = "translated"
    need = Need.DRAFT_MODEL

    def __init__(
        self,
        model: ModelRunner,
        pool: BlockPool,
        target_tokenizer: TextTokenizer,
        draft_tokenizer: TextTokenizer,
        max_len: int,
        max_num_ids: int,
        max_batched_tokens: int,
        vocab_size: int,
        eos_token_id: int | None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.target_tokenizer = target_tokenizer
        self.draft_tokenizer = draft_tokenizer
        self.max_len = max_len
        self.max_num_ids = max_num_ids
        self.max_batched_tokens = max_batched_tokens
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self._end_ids = frozenset(draft_tokenizer.special_tokens) | model.model.eos_token_ids
        known = set(draft_tokenizer.special_tokens.values())
        self._special_text = {
            token_id: content if content in known else ""
            for token_id, content in target_tokenizer.special_tokens.items()
        }
        # The least recently used sequence comes first.
        self._states: weakref.WeakKeyDictionary[Sequence, _State] = weakref.WeakKeyDictionary()

    @property
    def runners(self) -> Sequences[ModelRunner]:
        return (self.model,)

    def propose(self, plan: StepPlan, sampler: Sampler) -> Drafts:
        rows = self._catch_up(plan.scheduled, plan.rows)
        self._draft(rows)
        drafted: list[list[int]] = [[] for _ in plan.rows]
        for row in rows:
            drafted[row.index] = self._translate(row)
        return known_drafts(drafted, sampler.device)

    def prefill(self, prompts: Sequences[ScheduledSequence]) -> None:
        self._catch_up(prompts, completing=[])

    def _catch_up(
        self, scheduled: Sequences[ScheduledSequence], completing: Sequences[ScheduledSequence]
    ) -> list[_Row]:
        """Computes the tokens that the draft's cache lacks, short gaps first; rows whose gap is closed have
        drafted their first token."""
        busy = [(part, self._follow(part.sequence)) for part in scheduled if self._is_mine(part)]
        indices = {id(part): index for index, part in enumerate(completing)}
        in_step = {id(state) for _, state in busy}
        budget = self.max_batched_tokens
        spans: list[Span] = []
        rows: list[_Row] = []
        for part, state in sorted(busy, key=lambda item: item[1].num_missing):
            num_ids = len(state.draft_text.ids)
            num_tokens = min(state.num_missing, budget)
            num_steps = 0
            wanted = part.num_drawn_by(self.name)
            if wanted and num_tokens == state.num_missing:
                # One target token more than wanted is drafted: the last one is dropped.
                num_steps = math.ceil((wanted + 1) * state.draft_tokens_per_token)
                num_steps = max(0, min(num_steps, self.max_num_ids - num_ids))
                if self.pool.states is not None:
                    num_steps = min(num_steps, ROLLBACK - UNCERTAIN)
            end = len(state.stored) + num_tokens
            if num_tokens == 0 or num_ids > self.max_num_ids:
                continue
            if not self._reserve(state, end + max(0, num_steps - 1), in_step):
                continue
            budget -= num_tokens
            token_ids = state.draft_text.ids[len(state.stored) : end]
            spans.append(state.span(token_ids, min(1, num_steps)))
            if num_steps:
                rows.append(_Row(state, indices[id(part)], wanted, num_steps))
        self._append_argmax(rows, spans)
        return rows

    def _draft(self, rows: list[_Row]) -> None:
        """Drafts the other tokens of each row, one pass for all rows at a time, until it has enough."""
        while active := [row for row in rows if not row.ended and len(row.drafted) < row.num_steps]:
            spans = [row.state.span(row.drafted[-1:], 1) for row in active]
            self._append_argmax(active, spans)

    def _append_argmax(self, rows: list[_Row], spans: list[Span]) -> None:
        """Appends the most likely token to each row; ``rows`` are those whose spans ask for logits, in the
        spans' order."""
        if not spans:
            return
        logits = self.model.forward(spans).logits[:, : self.draft_tokenizer.num_tokens]
        for row, token_id in zip(rows, logits.argmax(-1).tolist(), strict=True):
            row.ended = token_id in self._end_ids
            if not row.ended:
                row.drafted.append(token_id)

    def _translate(self, row: _Row) -> list[int]:
        """Returns the drafted text in target tokens, as far as they are certain: more text could change the
        last."""
        draft_text, target_text = row.state.draft_text, row.state.target_text
        context = draft_text.ids[-CONTEXT:]
        before = self.draft_tokenizer.decode(context)
        everything = self.draft_tokenizer.decode(context + row.drafted)
        if not everything.startswith(before):
            return []
        text = everything[len(before) :].rstrip(BROKEN)
        token_ids = self.target_tokenizer.encode_after(target_text.tail, text) if text else []
        if token_ids is None:
            return []
        if not row.ended:
            token_ids = token_ids[:-1]
        elif self.eos_token_id is not None:
            token_ids.append(self.eos_token_id)
        # A part of a character may be in the text already: the draft must begin with the rest of it.
        num_pending = len(target_text.pending)
        if token_ids[:num_pending] != target_text.pending:
            return []
        known = token_ids[num_pending : num_pending + row.limit]
        unknown = (place for place, token_id in enumerate(known) if token_id >= self.vocab_size)
        return known[: next(unknown, len(known))]

    def _is_mine(self, part: ScheduledSequence) -> bool:
        plain_decoding = part.draft.num_first_drafts == 0 and part.kind is Kind.DECODE
        return self.name in part.sequence.sources and not plain_decoding

    def _follow(self, sequence: Sequence) -> _State:
        """Returns the sequence's state with its newest tokens taken in, and the cache cut back to the part
        that still fits. The last id is left to be computed, as the prediction after it is needed."""
        state = self._states.pop(sequence, None)
        if state is None:
            state = _State(
                TargetText(self.target_tokenizer, self._special_text), DraftText(self.draft_tokenizer)
            )
            release = weakref.finalize(sequence, self.pool.release, state.table)
            release.atexit = False
        self._states[sequence] = state
        ids = state.draft_text.ids
        num_same = state.draft_text.append(
            state.target_text.extend(sequence.token_ids[state.target_text.num_tokens :])
        )
        for stored, token_id in zip(state.stored[num_same:], ids[num_same:], strict=False):
            if stored != token_id:
                break
            num_same += 1
        self._truncate(state, min(num_same, max(0, len(ids) - 1)))
        return state

    def _truncate(self, state: _State, num_tokens: int) -> None:
        if num_tokens < state.table.num_folded_tokens:
            num_tokens = 0
        self.pool.truncate(state.table, num_tokens)
        del state.stored[num_tokens:]

    def _reserve(self, state: _State, num_tokens: int, in_step: set[int]) -> bool:
        """Reserves blocks for ``num_tokens``, if necessary from sequences that take no part in this step."""
        for other in list(self._states.values()):
            if self.pool.can_reserve(state.table, num_tokens):
                break
            if id(other) not in in_step:
                self._truncate(other, 0)
                self.pool.release(other.table)
        if not self.pool.can_reserve(state.table, num_tokens):
            return False
        self.pool.reserve(state.table, num_tokens)
        return True

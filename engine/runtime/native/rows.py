"""A decoding sequence as C reads it (``Row`` in ``rounds.h``), kept up to date from step to step.

What never changes (rule, seed, parameters, stop tokens) is converted once. Tokens that C emits are in its
array already when the sequence has them; only what came by other ways is copied.
"""

from array import array
from collections import Counter
from ctypes import addressof, memset

import torch

from truedraft.engine.core.draft_choice import Known
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import ScheduledSequence
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.pointers import address
from truedraft.engine.native.library import Row
from truedraft.engine.proposers.heads.waiting import Waiting
from truedraft.engine.sampling.grammar import WORD_BYTES
from truedraft.engine.sampling.processors import SMALLEST

INTEGER_BYTES = 8
# These are as in rounds.h.
GREEDY = 0
RULES = {"coupled": 1, "rejection": 2}


def address_of_integers(numbers: "array[int]") -> int:
    return address(numbers, torch.int64, (len(numbers),))


def integers(length: int) -> "array[int]":
    return array("q", bytes(INTEGER_BYTES * length))


class NativeRow:
    """``address`` is that of ``row``. Arrays are kept as long as ``row`` points to them. Its sequence is not:
    a row ends with it. ``draft_table`` is the sequence's in the drafter's cache."""

    __slots__ = (
        "_block_ids",
        "_blocks",
        "_constants",
        "_counts",
        "_distinct_ids",
        "_draft_block_ids",
        "_draft_blocks",
        "_draft_ids",
        "_draft_table",
        "_drafted",
        "_masks",
        "_matcher",
        "_num_prompt_tokens",
        "_num_tokens",
        "_token_ids",
        "_uses_drafter",
        "address",
        "row",
        "sources",
        "waiting",
    )

    def __init__(self, sequence: Sequence, draft_table: BlockTable) -> None:
        params = sequence.params
        self._draft_table = draft_table
        stop_ids = array("q", sorted(sequence.stop_token_ids))
        bias_ids, biases = array("q", params.logit_bias), array("f", params.logit_bias.values())
        self._num_prompt_tokens, self._matcher = sequence.num_prompt_tokens, sequence.matcher
        self._constants = stop_ids, bias_ids, biases
        self._token_ids = integers(sequence.max_num_tokens)
        self._num_tokens = 0  # in that array
        self.row = Row(
            token_ids=address_of_integers(self._token_ids),
            max_num_tokens=sequence.max_num_tokens,
            min_num_tokens=sequence.num_prompt_tokens + params.min_tokens,
            num_stops=len(stop_ids),
            stop_ids=address_of_integers(stop_ids),
            rule=GREEDY if sequence.greedy else RULES[sequence.verification],
            seed=sequence.seed,
            top_k=params.top_k,
            temperature=max(params.temperature, SMALLEST),
            top_p=params.top_p,
            min_p=params.min_p,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            num_biases=len(bias_ids),
            bias_ids=address_of_integers(bias_ids),
            biases=address(biases, torch.float32, (len(bias_ids),)),
        )
        self.address = addressof(self.row)
        # These are of the sequence's part in the last step.
        self._block_ids: list[int] = []
        self._draft_block_ids: list[int] = []
        self._blocks = self._draft_blocks = array("q")
        self._uses_drafter = False
        self.waiting: Waiting | None = None  # states for a head that follows the sequence
        self._draft_ids: array[int] | None = None
        self._drafted: list[int] = []  # the masks know it
        self._masks: array[int] | None = None
        self.sources: list[str] = []  # say who drafted, round by round
        self._distinct_ids: array[int] | None = None
        self._counts: array[int] | None = None
        if (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1):
            self._count_tokens(sequence)

    def follow(self, waiting: Waiting | None) -> None:
        """Shares the states that wait for a head with C; None if no head follows the sequence."""
        if waiting is not self.waiting:
            states = None if waiting is None else waiting.states
            place = None if states is None else address(states, torch.float32, tuple(states.shape))
            self.waiting, self.row.waiting = waiting, place
        self.row.num_waiting = 0 if waiting is None else waiting.num_tokens

    def update(self, part: ScheduledSequence) -> int:
        """Prepares the sequence's ``part`` in a step; returns how many tokens a draft model computes before
        its first draft, the pending one included: 0 if it does not draft in the first round."""
        sequence, row = part.sequence, self.row
        num_tokens = len(sequence.token_ids)
        row.num_computed = num_tokens - part.num_tokens
        row.state_slot, row.num_folded = _states(sequence.target_blocks)
        if num_tokens != self._num_tokens:
            self._take_in(sequence)
        if sequence.target_blocks.block_ids != self._block_ids:
            self._set_blocks(sequence.target_blocks.block_ids)
        draft = part.draft
        if draft.known or self._draft_ids is not None:
            self._set_draft_ids(draft.known_ids)
        row.num_draft_tokens = draft.num_first_drafts
        drafts_first = draft.num_tokens > 0 and not draft.known
        self._uses_drafter = draft.num_tokens > 0 or self.waiting is not None
        if not self._uses_drafter:
            return 0
        if self._draft_table.block_ids != self._draft_block_ids:
            self._set_draft_blocks(self._draft_table.block_ids)
        num_computed = row.num_draft_computed = self._draft_table.num_computed_tokens
        row.draft_state_slot, row.num_draft_folded = _states(self._draft_table)
        return num_tokens - num_computed if drafts_first and self.waiting is None else 0

    def fold(self, sequence: Sequence) -> None:
        """Says how far states are folded now, whether or not a round was complete."""
        sequence.target_blocks.num_folded_tokens = self.row.num_folded
        if self._uses_drafter:
            self._draft_table.num_folded_tokens = self.row.num_draft_folded

    def commit(self, sequence: Sequence) -> list[int]:
        """What C has emitted. The sequence's tables count what the caches hold of its tokens now."""
        row, first = self.row, self._num_tokens
        self._num_tokens = end = row.num_tokens
        sequence.target_blocks.num_computed_tokens = end - 1
        if self._uses_drafter:
            self._draft_table.num_computed_tokens = row.num_draft_computed
        if self.waiting is not None:
            self.waiting.num_tokens = row.num_waiting
        return self._token_ids[first:end].tolist()

    def begin_masks(self, part: ScheduledSequence, max_drafts: int) -> None:
        """Prepares the step's first round; ``max_drafts``: the most in any."""
        matcher, row = self._matcher, self.row
        if matcher is None:
            return
        num_words = (max_drafts + 1) * matcher.mask_words
        if self._masks is None or len(self._masks) < num_words:
            self._masks = array("i", bytes(WORD_BYTES * num_words))
            row.mask = address(self._masks, torch.int32, (len(self._masks),))
            row.mask_words = matcher.mask_words
        self.sources = [part.draft.first_source]
        self._write_masks(part.draft.known_ids)

    def begin_round(self, part: ScheduledSequence) -> None:
        """Follows what C has emitted; the next drafts are what is known then, or the draft model's."""
        matcher, row, draft = self._matcher, self.row, part.draft
        assert matcher is not None
        first = self._num_prompt_tokens + matcher.num_read
        matcher.advance(self._token_ids[first : row.num_tokens].tolist())
        known = Known("none", [])
        if draft.in_round is not None:
            known = Known(draft.in_round.source, draft.in_round.drafts())
        self._set_draft_ids(known.token_ids)
        row.num_draft_tokens = len(known.token_ids) or draft.num_tokens
        self.sources.append(known.source if known.token_ids else draft.source)
        self._write_masks(known.token_ids)

    def follow_draft(self, token_id: int) -> None:
        """The draft model has drafted one more."""
        self._drafted.append(token_id)
        self._write_masks(self._drafted, len(self._drafted))

    def _write_masks(self, draft_ids: list[int], first: int = 0) -> None:
        """Writes those after ``first`` of the drafts, and after each one more."""
        row, matcher = self.row, self._matcher
        assert matcher is not None
        if first == 0:
            self._drafted, row.num_masked = draft_ids[:], 0
        if matcher.write_masks(row.mask + WORD_BYTES * row.mask_words * first, draft_ids, first):
            if row.num_masked < first:  # the grammar has begun after these
                memset(row.mask, -1, WORD_BYTES * row.mask_words * first)
            row.num_masked = len(draft_ids) + 1

    def _take_in(self, sequence: Sequence) -> None:
        """Tokens that C has not emitted. What a sequence has never changes."""
        token_ids = sequence.token_ids
        num_tokens = len(token_ids)
        first = min(self._num_tokens, num_tokens)
        self._token_ids[first:num_tokens] = array("q", token_ids[first:])
        self._num_tokens = self.row.num_tokens = num_tokens
        if self.row.num_counted > num_tokens:
            self._count_tokens(sequence)

    def _count_tokens(self, sequence: Sequence) -> None:
        """Counts the output so far, after the tokens of the prompt; C goes on from there."""
        row, end = self.row, sequence.num_prompt_tokens
        counts = Counter(dict.fromkeys(sequence.token_ids[:end], 0))
        row.num_distinct_in_prompt = len(counts)
        counts.update(sequence.token_ids[end:])
        self._distinct_ids, self._counts = (integers(sequence.max_num_tokens) for _ in range(2))
        self._distinct_ids[: len(counts)] = array("q", counts)
        self._counts[: len(counts)] = array("q", counts.values())
        row.distinct_ids = address_of_integers(self._distinct_ids)
        row.counts = address_of_integers(self._counts)
        row.num_distinct, row.num_counted = len(counts), len(sequence.token_ids)

    def _set_blocks(self, block_ids: list[int]) -> None:
        self._block_ids, self._blocks = block_ids[:], array("q", block_ids)
        self.row.blocks, self.row.num_blocks = address_of_integers(self._blocks), len(block_ids)

    def _set_draft_blocks(self, block_ids: list[int]) -> None:
        self._draft_block_ids, self._draft_blocks = block_ids[:], array("q", block_ids)
        self.row.draft_blocks = address_of_integers(self._draft_blocks)
        self.row.num_draft_blocks = len(block_ids)

    def _set_draft_ids(self, draft_ids: list[int]) -> None:
        self._draft_ids = array("q", draft_ids) if draft_ids else None
        self.row.draft_ids = None if self._draft_ids is None else address_of_integers(self._draft_ids)


def _states(table: BlockTable) -> tuple[int, int]:
    """Returns the slot of a table's states, -1 for none, and how many tokens they are folded over."""
    return -1 if table.state_slot is None else table.state_slot, table.num_folded_tokens

"""Rounds of a step as one call of C (``rounds.c``): drafts, the target's passes over them, the verdicts.

A small model's round takes a millisecond, and planning, accounting and sending another quarter of one: where
the plan stands for several rounds, they share a step. Each of them emits what it would emit alone, and what
the phases emit, bit for bit. What C does not support goes by phases.
"""

import time
from array import array
from collections.abc import Sequence as Sequences
from ctypes import byref
from typing import Any
from weakref import WeakKeyDictionary

import torch

from truedraft.engine.core.needs import Need
from truedraft.engine.core.proposer import Proposer
from truedraft.engine.core.runner import Runner
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import PhaseSeconds, Round, ScheduledSequence, StepPlan, StepResult
from truedraft.engine.memory.batch import MAX_GROUPED_QUERIES
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.pointers import address
from truedraft.engine.memory.recurrent_state import ROLLBACK
from truedraft.engine.messages import TokenLogprob
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.native.headers import Constrain
from truedraft.engine.native.library import Rounds
from truedraft.engine.runtime.native.drafter import NativeDrafter
from truedraft.engine.runtime.native.rows import INTEGER_BYTES, NativeRow, address_of_integers, integers
from truedraft.engine.sampling.logprobs import token_logprobs

NUM_PHASES = len(PhaseSeconds._fields)
NUMBER_BYTES = 4
# Logits kept for log-probabilities in a step; a step with many of them has fewer rounds.
MAX_LOGITS_BYTES = 64 << 20


class NativeRunner:
    """``can_sample``: C samples as torch does (``native_backend``). No round begins that would probably end
    later than ``step_seconds`` after the step's first one has begun. C drafts with ``drafter``; ``proposers``
    are all of them, which store prompts, and none but a drafter that is a head must be told of every step.
    ``phases`` runs all other steps.
    """

    def __init__(
        self,
        target: NativeDecoder,
        drafter: NativeDrafter | None,
        proposers: Sequences[Proposer],
        phases: Runner,
        can_sample: bool,
        step_seconds: float,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.max_draft_len = 0 if drafter is None else drafter.max_len  # the longest sequence it can hold
        self.proposers = proposers
        self.phases = phases
        self.step_seconds = step_seconds
        supports = {Need.PROMPT, Need.BIAS, Need.PENALTIES, Need.MASK, Need.LOGPROBS}
        if drafter is not None:
            supports.add(drafter.need)
        if can_sample:
            supports.add(Need.SAMPLING)
        self.supports = frozenset(supports)
        self._rows: WeakKeyDictionary[Sequence, NativeRow] = WeakKeyDictionary()

    def run(self, plan: StepPlan) -> StepResult:
        if not plan.needs <= self.supports:
            return self.phases.run(plan)
        prompt_seconds = None if plan.is_decode_only else self._prefill_prompts(plan)
        rounds = self.run_rounds(plan)
        if not rounds:
            return self.phases.run(plan)
        return StepResult(rounds, {"c": len(rounds) * len(plan.rows)}, prompt_seconds)

    def _prefill_prompts(self, plan: StepPlan) -> PhaseSeconds:
        """Proposers store prompts before they are rows, whose first pass brings more tokens."""
        started = time.perf_counter()
        for proposer in self.proposers:
            proposer.prefill([part for part in plan.prompts if part.is_prefilled_by(proposer.name)])
        return PhaseSeconds(time.perf_counter() - started, 0.0, 0.0)

    def run_rounds(self, plan: StepPlan) -> list[Round]:
        """Up to ``plan.max_rounds``, until a row ends. An empty list if the first could not be verified, as
        logits were no distribution or there was no memory: nothing has happened then but in the caches."""
        rows = [self._rows.get(part.sequence) or self._add(part.sequence) for part in plan.rows]
        if self.drafter is not None and self.drafter.head is not None:
            for row, part in zip(rows, plan.rows, strict=True):
                num_told = part.sequence.target_blocks.num_computed_tokens
                row.follow(self.drafter.waiting(part.sequence, num_told))
        num_missing = max(row.update(part) for row, part in zip(rows, plan.rows, strict=True))
        max_drafts = max(part.draft.max_num_drafts for part in plan.rows)
        if not self._holds(plan, num_missing, max_drafts):
            return []
        num_rounds = plan.max_rounds
        logits: dict[int, torch.Tensor] = {}
        if Need.LOGPROBS in plan.needs:
            logits, num_rounds = self._keep_logits(plan, rows, num_rounds, max_drafts)
        if Need.MASK in plan.needs:
            for row, part in zip(rows, plan.rows, strict=True):
                row.begin_masks(part, max_drafts)
        rounds = self._call(plan, rows, num_rounds, max_drafts)
        for number in logits:
            rows[number].row.logits = None
        if rounds and Need.MASK in plan.needs:
            _add_sources(rounds, rows, plan.rows)
        if rounds and logits:
            _add_logprobs(rounds, logits, plan.rows)
        return rounds

    def _holds(self, plan: StepPlan, num_missing: int, max_drafts: int) -> bool:
        """Tells whether C computes so many tokens of a row in one pass. Of those that a round stores none is
        certain before it is complete: logs of states must hold them all."""
        num_new = max(part.num_tokens for part in plan.rows) + max_drafts
        if self.target.has_states and num_new - 1 > ROLLBACK:
            return False
        # The last draft is not stored.
        drafter = self.drafter
        if drafter is not None and drafter.model.has_states and num_missing + max_drafts - 2 > ROLLBACK:
            return False
        return num_missing <= MAX_GROUPED_QUERIES

    def _call(self, plan: StepPlan, rows: list[NativeRow], num_rounds: int, max_drafts: int) -> list[Round]:
        """Lets C run the rounds; returns those that it has done."""
        results = _Results(len(rows), num_rounds)
        pointers = array("q", [row.address for row in rows])
        drafter = self.drafter
        if drafter is not None and drafter.need not in plan.needs and not any(row.waiting for row in rows):
            drafter = None
        self.target.reach_blocks(max(row.row.num_blocks for row in rows))
        if drafter is not None:
            drafter.model.reach_blocks(max(row.row.num_draft_blocks for row in rows))
        num_done = self.target.library.run_rounds(
            byref(self.target.decoder),
            None if drafter is None else byref(drafter.struct),
            byref(
                Rounds(
                    *(len(rows), num_rounds, max_drafts, self.max_draft_len, MAX_GROUPED_QUERIES),
                    *(self.step_seconds, address_of_integers(pointers)),
                    _constrain(rows, plan),
                    *results.addresses,
                )
            ),
        )
        for row, part in zip(rows, plan.rows, strict=True):
            row.fold(part.sequence)
        if num_done == 0:
            return []
        emitted = [row.commit(part.sequence) for row, part in zip(rows, plan.rows, strict=True)]
        return results.rounds(emitted, num_done)

    def _add(self, sequence: Sequence) -> NativeRow:
        table = BlockTable() if self.drafter is None else self.drafter.table(sequence)
        row = self._rows[sequence] = NativeRow(sequence, table)
        return row

    def _keep_logits(
        self, plan: StepPlan, rows: list[NativeRow], num_rounds: int, max_drafts: int
    ) -> tuple[dict[int, torch.Tensor], int]:
        """Room for the raw logits of rows that want log-probabilities, by row, [rounds, positions, vocab];
        and how many rounds there is room for."""
        numbers = [
            number for number, part in enumerate(plan.rows) if part.sequence.params.logprobs is not None
        ]
        vocab_size = self.target.vocab_size
        bytes_per_round = NUMBER_BYTES * len(numbers) * (max_drafts + 1) * vocab_size
        num_rounds = max(1, min(num_rounds, MAX_LOGITS_BYTES // bytes_per_round))
        shape = num_rounds, max_drafts + 1, vocab_size
        logits = {number: torch.empty(shape, dtype=torch.float32) for number in numbers}
        for number, kept in logits.items():
            rows[number].row.logits = address(kept, torch.float32, shape)
        return logits, num_rounds


def _constrain(rows: list[NativeRow], plan: StepPlan) -> Any:
    """What C calls: masks follow what their rows have emitted and drafted. An exception becomes 0."""
    if Need.MASK not in plan.needs:
        return Constrain()

    def constrain(row: int, num_drafted: int, last_draft: int) -> int:
        if num_drafted:
            rows[row].follow_draft(last_draft)
        else:
            rows[row].begin_round(plan.rows[row])
        return 1

    return Constrain(constrain)


class _Results:
    """What C fills in, round by round and row by row."""

    def __init__(self, num_rows: int, num_rounds: int) -> None:
        self.num_rows = num_rows
        self.size = num_rounds * num_rows
        self.numbers = integers(2 * self.size)  # drafted, accepted
        self.seconds = array("d", bytes(8 * NUM_PHASES * num_rounds))

    @property
    def addresses(self) -> tuple[int | None, ...]:
        first, column = address_of_integers(self.numbers), INTEGER_BYTES * self.size
        seconds = address(self.seconds, torch.float64, (len(self.seconds),))
        return first, first + column, None, seconds

    def rounds(self, emitted: list[list[int]], num_done: int) -> list[Round]:
        """Returns those of ``emitted``, row by row, in all rounds together."""
        num_rows, size = self.num_rows, self.size
        numbers, seconds = self.numbers.tolist(), self.seconds.tolist()
        starts = [0] * num_rows
        rounds: list[Round] = []
        for first in range(0, num_done * num_rows, num_rows):
            num_accepted = numbers[size + first : size + first + num_rows]
            own = emitted
            if num_done > 1:
                ends = [start + count + 1 for start, count in zip(starts, num_accepted, strict=True)]
                own = [text[a:b] for text, a, b in zip(emitted, starts, ends, strict=True)]
                starts = ends
            phase_seconds = PhaseSeconds(*seconds[NUM_PHASES * len(rounds) :][:NUM_PHASES])
            rounds.append(Round(numbers[first : first + num_rows], num_accepted, own, phase_seconds))
        return rounds


def _add_sources(rounds: list[Round], rows: list[NativeRow], parts: list[ScheduledSequence]) -> None:
    """Says who drafted in each round: rows with masks may have forced tokens in some of them."""
    for number, one in enumerate(rounds):
        one.sources = [
            row.sources[number] if row.sources else part.draft.first_source
            for row, part in zip(rows, parts, strict=True)
        ]


def _add_logprobs(
    rounds: list[Round], logits: dict[int, torch.Tensor], parts: list[ScheduledSequence]
) -> None:
    """Adds those of all emitted tokens of rows that keep ``logits``; one call for all that want as many."""
    columns: list[list[list[TokenLogprob] | None]] = [[None] * len(parts) for _ in rounds]
    wanted = {row: parts[row].sequence.params.logprobs for row in logits}
    for num_top in set(wanted.values()):
        assert num_top is not None
        members = [row for row in logits if wanted[row] == num_top]
        places = [(number, row) for row in members for number in range(len(rounds))]
        emitted = [rounds[number].emitted[row] for number, row in places]
        found = iter(_logprobs_at(places, emitted, logits, num_top))
        for (number, row), ids in zip(places, emitted, strict=True):
            columns[number][row] = [next(found) for _ in ids]
    for one, column in zip(rounds, columns, strict=True):
        one.logprobs = column


def _logprobs_at(
    places: list[tuple[int, int]], emitted: list[list[int]], logits: dict[int, torch.Tensor], num_top: int
) -> list[TokenLogprob]:
    """Returns those of what was ``emitted`` at these places, rounds and rows, one after the other."""
    kept = [logits[row][number, : len(ids)] for (number, row), ids in zip(places, emitted, strict=True)]
    return token_logprobs(torch.cat(kept), [token_id for ids in emitted for token_id in ids], num_top)

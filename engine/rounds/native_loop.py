"""Runs the rounds of a step as one call of C (``rounds.c``), where rows need only passes and draws.

A small model's round takes a millisecond, and the work of Python around its passes another one. The loop
calls the same operations in C as rounds in Python do, so both emit the same, bit for bit.
"""

from array import array
from collections.abc import Sequence as Sequences
from ctypes import byref

import numpy as np
import torch

from truedraft.engine.core.needs import Need
from truedraft.engine.core.step import PhaseSeconds, Round, StepPlan
from truedraft.engine.memory.batch import MAX_GROUPED_QUERIES
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.pointers import address
from truedraft.engine.memory.recurrent_state import ROLLBACK
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.native.library import Rounds
from truedraft.engine.proposers.draft_model import DraftModelProposer
from truedraft.engine.proposers.known import known_tokens
from truedraft.engine.rows.columns import WIDTH, Field
from truedraft.engine.rows.table import Row, RowTable

NUM_PHASES = len(PhaseSeconds._fields)
INTEGER_BYTES = 8
NEEDS = {
    *(Need.PROMPT, Need.SAMPLING, Need.OTHER_DRAWS, Need.BLOCK_RULE, Need.BIAS, Need.PENALTIES),
    Need.PICTURES,
}


class NativeLoop:
    """Runs rounds. It begins none that would probably end later than ``seconds`` after the first one has
    begun. ``draft`` is the proposer that draws drafts in C, if there is one."""

    def __init__(
        self, target: NativeDecoder, draft: DraftModelProposer | None, table: RowTable, seconds: float
    ) -> None:
        self.target = target
        self.draft = draft
        model = None if draft is None else draft.model.fast_pass
        assert model is None or isinstance(model, NativeDecoder)
        self.model = model
        # This is the longest sequence that the draft can hold.
        self.max_draft_len = 0 if draft is None else draft.max_len
        self.table = table
        self.seconds = seconds
        self.supports = frozenset(NEEDS if draft is None else {*NEEDS, draft.need})

    def runs(self, plan: StepPlan) -> bool:
        """Tells whether the loop covers the needs of all rows. Of a picture it knows what follows."""
        return plan.needs <= self.supports and not any(
            part.draft.in_round or not part.sequence.target_blocks.is_past_pictures for part in plan.rows
        )

    def run(self, plan: StepPlan, rows: Sequences[Row]) -> list[Round]:
        """Runs up to ``plan.max_rounds``, until a row ends. Returns an empty list if the first round could
        not be verified, as logits were no distribution or there was no memory: then only the caches have
        changed."""
        max_drafts = max(part.draft.max_num_drafts for part in plan.rows)
        lines = self.table.lines_of(rows)
        draws = any(part.draft.num_tokens for part in plan.rows)
        num_missing = self._begin(plan, rows, lines, draws)
        if not self._holds(max(part.num_tokens for part in plan.rows), num_missing, max_drafts):
            return []
        num_rows, num_rounds = len(rows), plan.max_rounds
        known = array("q", bytes(INTEGER_BYTES * max(1, num_rows * max_drafts)))
        for place, ids in enumerate(self._known(plan)):
            known[place * max_drafts : place * max_drafts + len(ids)] = array("q", ids)
        counts = array("q", bytes(INTEGER_BYTES * 2 * num_rounds * num_rows))  # drafted, then accepted
        seconds = array("d", bytes(8 * NUM_PHASES * num_rounds))
        first = address(counts, torch.int64, (len(counts),))
        numbers = self.table.numbers
        num_done = self.target.library.run_rounds(
            byref(self.target.decoder),
            byref(self.model.decoder) if draws and self.model is not None else None,
            byref(
                Rounds(
                    *(
                        num_rows,
                        num_rounds,
                        max_drafts,
                        self.max_draft_len,
                        MAX_GROUPED_QUERIES,
                        self.seconds,
                    ),
                    address(numbers, torch.int64, (len(numbers), WIDTH)),
                    address(lines, torch.int64, (num_rows,)),
                    address(known, torch.int64, (len(known),)),
                    first,
                    first + INTEGER_BYTES * num_rounds * num_rows,
                    address(seconds, torch.float64, (len(seconds),)),
                )
            ),
        )
        return self._end(plan, rows, num_done, counts.tolist(), seconds.tolist(), draws)

    def _begin(
        self,
        plan: StepPlan,
        rows: Sequences[Row],
        lines: "np.ndarray[tuple[int], np.dtype[np.int64]]",
        draws: bool,
    ) -> int:
        """Fills the columns that the loop reads. Returns the most tokens that the draft model computes of a
        row before its first draft, the pending one included."""
        tables = [part.sequence.target_blocks for part in plan.rows]
        numbers, drafts = self.table.numbers, [part.draft for part in plan.rows]
        columns = {
            Field.NUM_COMPUTED: [table.num_computed_tokens for table in tables],
            Field.NUM_WANTED: [draft.num_tokens for draft in drafts],
            Field.NUM_KNOWN: [len(ids) for ids in self._known(plan)],
            Field.ADAPTER: [table.adapter for table in tables],
            Field.SHIFT: [table.shift for table in tables],
            **_columns(tables, Field.STATE_SLOT, Field.NUM_FOLDED),
        }
        num_missing = 0
        if draws:
            own = self._draft_tables(plan)
            columns |= _columns(own, Field.DRAFT_STATE_SLOT, Field.DRAFT_NUM_FOLDED)
            columns[Field.NUM_DRAFT_STORED] = [table.num_computed_tokens for table in own]
            for row, table in zip(rows, own, strict=True):
                row.keep_blocks(Field.DRAFT_BLOCKS, Field.NUM_DRAFT_BLOCKS, table)
            num_missing = max(
                len(row.token_ids) - table.num_computed_tokens
                for row, table, draft in zip(rows, own, drafts, strict=True)
                if draft.num_tokens
            )
            assert self.model is not None
            self.model.reach_blocks(max(len(table.block_ids) for table in own))
        for row, table in zip(rows, tables, strict=True):
            row.copy_text()
            row.keep_blocks(Field.BLOCKS, Field.NUM_BLOCKS, table)
        for field, values in columns.items():
            numbers[lines, field] = values
        self.target.reach_blocks(max(len(table.block_ids) for table in tables))
        return num_missing

    def _holds(self, num_new: int, num_missing: int, max_drafts: int) -> bool:
        """Tells whether C can compute this many tokens of a row in one pass. None of a round's tokens is
        certain before the round is complete: logs of states must hold them all."""
        if self.target.has_states and num_new + max_drafts - 1 > ROLLBACK:
            return False
        # The last draft is not stored.
        if self.model is not None and self.model.has_states and num_missing + max_drafts - 2 > ROLLBACK:
            return False
        return num_missing <= MAX_GROUPED_QUERIES

    def _end(
        self,
        plan: StepPlan,
        rows: Sequences[Row],
        num_done: int,
        counts: list[int],
        seconds: list[float],
        draws: bool,
    ) -> list[Round]:
        """Brings sequences' tables up to date; returns the rounds that C has run."""
        num_rows, size = len(rows), plan.max_rounds * len(rows)
        lines = [self.table.numbers[row.number] for row in rows]
        own = self._draft_tables(plan) if draws else [None] * num_rows
        texts: list[list[int]] = []
        for part, row, line, draft_table in zip(plan.rows, rows, lines, own, strict=True):
            table = part.sequence.target_blocks
            table.num_folded_tokens = int(line[Field.NUM_FOLDED])
            if draft_table is not None:
                draft_table.num_folded_tokens = int(line[Field.DRAFT_NUM_FOLDED])
            if num_done:
                table.num_computed_tokens = end = int(line[Field.NUM_STORED])
                if draft_table is not None:
                    draft_table.num_computed_tokens = int(line[Field.NUM_DRAFT_STORED])
                texts.append(row.take_text(end + 1))
        starts = [0] * num_rows
        rounds = []
        for number in range(num_done):
            begin = number * num_rows
            accepted = counts[size + begin : size + begin + num_rows]
            ends = [start + count + 1 for start, count in zip(starts, accepted, strict=True)]
            emitted = [text[a:b] for text, a, b in zip(texts, starts, ends, strict=True)]
            starts = ends
            times = PhaseSeconds(*seconds[NUM_PHASES * number :][:NUM_PHASES])
            rounds.append(Round(counts[begin : begin + num_rows], accepted, emitted, times))
        return rounds

    def _known(self, plan: StepPlan) -> list[list[int]]:
        vocab_size = self.target.vocab_size
        return [
            known_tokens(part.draft.known.token_ids, vocab_size) if part.draft.known else []
            for part in plan.rows
        ]

    def _draft_tables(self, plan: StepPlan) -> list[BlockTable]:
        assert self.draft is not None
        return [self.draft.cache.table(part.sequence) for part in plan.rows]


def _columns(tables: list[BlockTable], slot: Field, num_folded: Field) -> dict[Field, list[int]]:
    """Returns the state slots of tables, -1 for none, and the numbers of tokens over which the states are
    folded."""
    return {
        slot: [-1 if table.state_slot is None else table.state_slot for table in tables],
        num_folded: [table.num_folded_tokens for table in tables],
    }

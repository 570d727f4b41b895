"""Keeps the rows of captured passes on the device: the changes from pass to pass are one message.

A captured pass reads the same addresses again and again. So every row has its place in static tensors, block
tables stay there from pass to pass, and numbers that follow from others (positions, slots) are computed
there. The host sends a few integers a row and the new entries of tables. A draft's pass writes what its next
one reads, for which nothing is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from truedraft.engine.memory.batch import ForwardBatch, PagedRows, StateRows, folded_after
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.rounds.capture.capture import Capture, SentNumbers
from truedraft.engine.rows.columns import DRAFTS_AT, IDS_AT, NUM_STATE_FIELDS, Field

TARGET, DRAFT = 0, 1  # the owner of the block tables


@dataclass(slots=True)
class _KnownTable:
    """Holds the last sent state of a row's table, and the time when it was sent."""

    block_ids: list[int] = field(default_factory=list)
    table: BlockTable | None = None
    num_cuts: int = 0
    length: int = -1  # counts reserved blocks that will not be used, too


class DeviceRows:
    """Holds up to ``max_rows`` rows, each with up to ``max_drafts``, and ``max_blocks`` of either cache. Slot
    ``scratch_slot`` belongs to no sequence: padding is stored there."""

    def __init__(
        self,
        max_rows: int,
        max_drafts: int,
        max_blocks: int,
        block_size: int,
        scratch_slot: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self.max_rows = max_rows
        self.max_drafts = max_drafts
        self.block_size = block_size
        self.scratch_slot = scratch_slot
        self.tables = torch.zeros(2, max_rows, max_blocks, dtype=torch.int64, device=device)
        self.width = DRAFTS_AT + max_drafts
        self.sent = SentNumbers(max_rows * self.width, device, capture)
        # These are places in tables, and their new entries.
        self.changes = SentNumbers(2 * self.tables.numel(), device, capture)
        self.numbers = self.sent.numbers.view(max_rows, self.width)
        self._host = self.sent.host.view(max_rows, self.width).numpy()
        self._known: dict[tuple[int, int], _KnownTable] = {}  # Each is found by cache and row.
        self._places: list[int] = []
        self._entries: list[int] = []
        self._row_of: list[dict[BlockTable, int]] = [{}, {}]  # Each cache has one.
        self.num_messages = 0

    # The functions below run on the host.

    def places_of(self, cache: int, tables: Sequence[BlockTable], num_rows: int) -> list[int]:
        """Returns a row below ``num_rows`` for each of the tables of a cache, and keeps it from one call to
        the next."""
        before = self._row_of[cache]
        kept = {table: before[table] for table in tables if before.get(table, num_rows) < num_rows}
        free = iter(sorted(set(range(num_rows)) - set(kept.values())))
        now = self._row_of[cache] = {table: kept[table] if table in kept else next(free) for table in tables}
        return list(now.values())

    def begin(self) -> None:
        """Starts a message without rows."""
        self.sent.wait()
        self.changes.wait()
        self._host[:, : Field.SEED] = 0
        self._host[:, Field.NUM_DRAFTS] = -1
        self.num_messages += 1
        self._places.clear()
        self._entries.clear()

    def set_row(self, row: int, num_stored: int, token_ids: Sequence[int], num_skipped: int = 0) -> None:
        """Sets the input of a row's pass: ``token_ids`` begin with the one before the pending one, at
        position ``num_stored``."""
        host = self._host[row]
        host[: Field.STATE_SLOT] = num_stored, len(token_ids) - 2, 0, num_skipped
        host[IDS_AT : IDS_AT + len(token_ids)] = token_ids

    def set_states(self, cache: int, row: int, table: BlockTable, num_certain_tokens: int) -> None:
        """Sets the slot of the row's states, if there are some, and how far they are folded: before the pass,
        and after it, given the number of certain tokens."""
        if table.state_slot is not None:
            first = Field.STATE_SLOT + NUM_STATE_FIELDS * cache
            folded = table.num_folded_tokens, folded_after(table, num_certain_tokens)
            self._host[row, first : first + NUM_STATE_FIELDS] = table.state_slot, *folded

    def set_table(self, cache: int, row: int, table: BlockTable) -> None:
        """Sends the entries that the row's table on the device lacks. If a table has only grown, only its end
        is compared: texts may be long."""
        block_ids, known = table.block_ids, self._known.get((cache, row))
        if known is None:
            known = self._known[cache, row] = _KnownTable()
        has_only_grown = known.table is table and known.num_cuts == table.num_cuts
        if has_only_grown and known.length == len(block_ids):
            return
        end = min(len(block_ids), self.tables.shape[2])  # More blocks may be reserved than will be used.
        first = min(len(known.block_ids), end)
        if not has_only_grown and known.block_ids[:first] != block_ids[:first]:
            first = 0
        known.table, known.num_cuts, known.length = table, table.num_cuts, len(block_ids)
        added = block_ids[first:end]
        known.block_ids[first:] = added
        if added:
            place = (cache * self.max_rows + row) * self.tables.shape[2]
            self._places += range(place + first, place + end)
            self._entries += added

    def send(self, num_rows: int) -> None:
        """Sends the first ``num_rows`` rows, before the next launch."""
        self.sent.send(num_rows * self.width)
        if self._places:
            half, end = len(self._places), 2 * len(self._places)
            self.changes.host.numpy()[:end] = [*self._places, *self._entries]
            self.changes.send(end)
            places, entries = self.changes.numbers[:half], self.changes.numbers[half:end]
            self.changes.capture.launch(lambda: self.tables.view(-1).index_copy_(0, places, entries))

    # The functions below run on the device. Shapes are static, and nothing depends on the numbers: these are
    # captured.

    def field(self, num_rows: int, field: Field) -> torch.Tensor:
        """Returns a column, [rows]."""
        return self.numbers[:num_rows, field]

    def ids(self, num_rows: int) -> torch.Tensor:
        """Returns int64 [rows, 2 + most drafts], as sent, or drawn since."""
        return self.numbers[:num_rows, IDS_AT:]

    def batch(
        self,
        cache: int,
        token_ids: torch.Tensor,
        first_positions: torch.Tensor,
        num_skipped: torch.Tensor,
        counts: torch.Tensor,
        logits_index: torch.Tensor,
    ) -> ForwardBatch:
        """Makes a batch of ``token_ids`` [rows, n], of which the first ``counts`` [rows] are real; their
        positions begin at ``first_positions`` [rows]. The first ``num_skipped`` are stored already."""
        num_rows, num_tokens = token_ids.shape
        place = torch.arange(num_tokens, device=token_ids.device)
        is_there = place < counts[:, None]
        positions = first_positions[:, None] + place
        is_stored = is_there & (place >= num_skipped[:, None]) & (positions >= 0)
        positions = torch.where(is_there, positions, 0).clamp(min=0)
        # Padding may be any row's token, even one that only the other model has.
        token_ids = torch.where(is_there, token_ids, 0)
        tables = self.tables[cache, :num_rows]
        blocks = tables.gather(1, positions // self.block_size)
        slots = blocks * self.block_size + positions % self.block_size
        slots = torch.where(is_stored, slots, self.scratch_slot)
        batch = ForwardBatch(
            [],
            self.block_size,
            token_ids.reshape(1, -1),
            positions.view(1, -1),
            slots.view(-1),
            logits_index,
            is_there=is_there.reshape(-1),
        )
        first_tokens = torch.arange(num_rows, device=token_ids.device) * num_tokens
        batch.short_rows = PagedRows(tables, first_tokens, counts, num_tokens)
        return batch

    def states(
        self,
        cache: int,
        first_positions: torch.Tensor,
        num_skipped: torch.Tensor,
        counts: torch.Tensor,
        num_tokens: int,
    ) -> StateRows:
        """Returns the ``StateRows`` of a batch of ``num_tokens`` for each row."""
        first = Field.STATE_SLOT + NUM_STATE_FIELDS * cache
        slots, before, after = self.numbers[: len(counts), first : first + NUM_STATE_FIELDS].unbind(1)
        return StateRows(
            num_tokens,
            torch.arange(len(counts), device=counts.device) * num_tokens + num_skipped,
            (counts - num_skipped).clamp(min=0),
            first_positions + num_skipped,
            slots.contiguous(),
            before.contiguous(),
            after.contiguous(),
        )

    def go_on(self, num_rows: int) -> None:
        """Turns the rows of a draft's pass into those of the next one, over one more token."""
        self.field(num_rows, Field.NUM_STORED).add_(1)
        self.field(num_rows, Field.NUM_SKIPPED).fill_(1)
        self.field(num_rows, Field.DRAFT_NUM_FOLDED).copy_(self.field(num_rows, Field.DRAFT_NUM_FOLDED_AFTER))

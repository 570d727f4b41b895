"""Keeps who owns which slot for states of recurrent layers, in plain integers.

A slot belongs to one block table, or keeps a *snapshot*: what the layers held when a text was so long, for
later texts with the same beginning. It is good for all beginnings since the last fold, as the records after
that are part of it, and found by the hash of a beginning's last block. Snapshots stay until their slot is
needed, the least recently used first.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from truedraft.engine.memory.block_table import BlockHash, BlockTable

if TYPE_CHECKING:
    from truedraft.engine.memory.cache_files import CacheFiles


class StateSlots:
    """Owns the slots. ``copy`` copies what one slot holds to another, between two passes. ``files`` keep
    snapshots, if there are some."""

    def __init__(self, num_slots: int, copy: Callable[[int, int], None]) -> None:
        self.num_slots = num_slots
        self.copy = copy
        self.files: CacheFiles | None = None
        # Which snapshot is good for a beginning, and over how many tokens its states are folded.
        self._snapshots: dict[BlockHash, tuple[int, int]] = {}
        self._hashes_of: dict[int, Sequence[BlockHash]] = {}
        # Free slots in the order of their next use: those without a snapshot, then the least recently used.
        self._free = OrderedDict.fromkeys(range(num_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def has(self, block_hash: BlockHash) -> bool:
        """Tells whether there is a snapshot for the beginning that ends with this block."""
        return block_hash in self._snapshots

    def take(self, table: BlockTable) -> None:
        """Gives ``table`` a slot, whose states are those of no text; one must be free."""
        table.state_slot, table.num_folded_tokens = self._next(), 0

    def take_over(self, table: BlockTable, block_hash: BlockHash) -> None:
        """Gives ``table`` a slot with a copy of a snapshot."""
        source, num_folded = self._snapshots[block_hash]
        self._free.move_to_end(source)
        if self.files is not None:
            self.files.keep_state(source, self._hashes_of[source], num_folded)
        slot = self._next()
        if slot != source:  # else it was the only one left
            self.copy(source, slot)
        table.state_slot, table.num_folded_tokens = slot, num_folded

    def keep(self, table: BlockTable, hashes: Sequence[BlockHash]) -> None:
        """Makes a snapshot of ``table``, which goes on, for the beginnings that end with these blocks."""
        assert table.state_slot is not None
        if not self._free or not self._is_news(hashes):
            return
        slot = self._next()
        self.copy(table.state_slot, slot)
        self._remember(slot, hashes, table.num_folded_tokens)

    def give_back(self, table: BlockTable, hashes: Sequence[BlockHash]) -> None:
        """Takes the slot of ``table``, which becomes a snapshot if there are ``hashes``, as for ``keep``."""
        slot = table.state_slot
        assert slot is not None
        if self._is_news(hashes):
            self._remember(slot, hashes, table.num_folded_tokens)
        else:
            self._free[slot] = None
            self._free.move_to_end(slot, last=False)
        table.state_slot, table.num_folded_tokens = None, 0

    def restore(self, block_hash: BlockHash, num_folded: int, data: memoryview) -> None:
        """Makes a snapshot of what files have of one, if there is a slot for it."""
        if self.files is None or not self._free or self.has(block_hash):
            return
        slot = self._next()
        self.files.store_state(slot, data)
        self._remember(slot, [block_hash], num_folded)

    def forget_all(self) -> None:
        """Forgets all snapshots."""
        self._snapshots.clear()
        self._hashes_of.clear()

    def _is_news(self, hashes: Sequence[BlockHash]) -> bool:
        return len(hashes) > 0 and not self.has(hashes[-1])

    def _remember(self, slot: int, hashes: Sequence[BlockHash], num_folded: int) -> None:
        for block_hash in hashes:
            self._snapshots[block_hash] = slot, num_folded
        self._hashes_of[slot] = hashes
        self._free[slot] = None
        if self.files is not None:
            self.files.keep_state(slot, hashes, num_folded)

    def _next(self) -> int:
        """Returns the free slot that is used next, without what it has kept."""
        slot, _ = self._free.popitem(last=False)
        if self.files is not None:
            self.files.slot_changes(slot)
        for block_hash in self._hashes_of.pop(slot, ()):
            kept = self._snapshots.get(block_hash)
            if kept is not None and kept[0] == slot:  # another snapshot may be good for it, too
                del self._snapshots[block_hash]
        return slot

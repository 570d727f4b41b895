"""Keeps who owns which slot for states of recurrent layers, in plain integers.

A slot belongs to one block table, or keeps a *snapshot*: what the layers held when a text was so long, for
later texts with the same beginning. A snapshot is found by the hash of the last block of that beginning, and
is good for it if its states are folded over no more than that. Snapshots stay until their slot is needed, the
least recently used first.
"""

from collections import OrderedDict
from collections.abc import Callable

from truedraft.engine.memory.block_table import BlockHash, BlockTable


class StateSlots:
    """``copy`` copies what one slot holds to another, between two passes."""

    def __init__(self, num_slots: int, copy: Callable[[int, int], None]) -> None:
        self.num_slots = num_slots
        self.copy = copy
        # Each snapshot's slot, and over how many tokens its states are folded.
        self._snapshots: dict[BlockHash, tuple[int, int]] = {}
        self._hash_of: dict[int, BlockHash] = {}
        # Free slots in the order of their next use: those without a snapshot, then the least recently used.
        self._free = OrderedDict.fromkeys(range(num_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def has(self, block_hash: BlockHash) -> bool:
        """Tells whether there is a snapshot of the text that ends with this block."""
        return block_hash in self._snapshots

    def take(self, table: BlockTable) -> None:
        """Gives ``table`` a slot, whose states are those of no text; one must be free."""
        table.state_slot, table.num_folded_tokens = self._next(), 0

    def take_over(self, table: BlockTable, block_hash: BlockHash) -> None:
        """Gives ``table`` a slot with a copy of a snapshot."""
        source, num_folded = self._snapshots[block_hash]
        self._free.move_to_end(source)
        slot = self._next()
        if slot != source:  # else it was the only one left
            self.copy(source, slot)
        table.state_slot, table.num_folded_tokens = slot, num_folded

    def keep(self, table: BlockTable, block_hash: BlockHash) -> None:
        """Makes a snapshot of ``table``, which goes on."""
        assert table.state_slot is not None
        if not self._free or self.has(block_hash):
            return
        slot = self._next()
        self.copy(table.state_slot, slot)
        self._remember(slot, block_hash, table.num_folded_tokens)

    def give_back(self, table: BlockTable, block_hash: BlockHash | None) -> None:
        """Takes the slot of ``table``, which becomes a snapshot if ``block_hash`` says of what."""
        slot = table.state_slot
        assert slot is not None
        if block_hash is None or self.has(block_hash):
            self._free[slot] = None
            self._free.move_to_end(slot, last=False)
        else:
            self._remember(slot, block_hash, table.num_folded_tokens)
        table.state_slot, table.num_folded_tokens = None, 0

    def _remember(self, slot: int, block_hash: BlockHash, num_folded: int) -> None:
        self._snapshots[block_hash] = slot, num_folded
        self._hash_of[slot] = block_hash
        self._free[slot] = None

    def _next(self) -> int:
        """Returns the free slot that is used next, without what it has kept."""
        slot, _ = self._free.popitem(last=False)
        if (kept := self._hash_of.pop(slot, None)) is not None:
            del self._snapshots[kept]
        return slot

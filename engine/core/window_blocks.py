"""Keeps who owns which block of layers with a window, in plain integers.

Such a layer looks at no token that lies a window or more before the newest one. A table lets go of blocks as
soon as no later token can look at them: only committed tokens count, so no truncation can go back to where a
block would be missing. Blocks that were let go stay published until their place is needed. They are the next
to be used again, unless they belong to the end of a beginning that is kept for other texts (``keep``): these
are used again the least recently used first, like those that a text ends with.

Room is promised, not taken: a table is promised as many blocks as it can have between two steps, and what a
step adds to all tables together is kept free. So no prompt has to wait for blocks halfway.

A beginning can be taken over only up to a place whose window is there, as can be done with other layers'
blocks (``WindowedPool``).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from truedraft.engine.core.block_pool import BlockPool, Blocks
from truedraft.engine.core.state_slots import StateSlots
from truedraft.engine.memory.block_table import BlockHash, BlockTable

if TYPE_CHECKING:
    from truedraft.engine.memory.cache_files import CacheFiles

# The fewest windows between two beginnings of a text that are kept; its prompt's end is kept anyway.
DISTANCE = 16


def blocks_held(window: int, block_size: int) -> int:
    """Returns how many blocks a table has between two steps at most, with one more for the step's first
    token."""
    return (window - 3) // block_size + 3


class WindowBlocks(Blocks):
    """Owns the blocks of layers with a ``window``, which is the widest one of a model. A step computes at
    most ``num_step_tokens`` of all tables, or else what ``can_extend`` allows. The block ``nobody`` comes
    after the others and belongs to no table."""

    def __init__(self, num_blocks: int, block_size: int, window: int, num_step_tokens: int) -> None:
        super().__init__(num_blocks)
        self.block_size = block_size
        self.window = window
        self.num_step_tokens = num_step_tokens
        self.nobody = num_blocks
        self.most = blocks_held(window, block_size)
        self.num_promised = 0
        self._num_promisable = num_blocks - -(-num_step_tokens // block_size)
        self._kept: set[int] = set()  # blocks of beginnings that are kept

    def fresh(self) -> "WindowBlocks":
        """Returns one like this that knows of no table."""
        return WindowBlocks(self.num_blocks, self.block_size, self.window, self.num_step_tokens)

    def first_seen(self, num_tokens: int) -> int:
        """Returns the first block that the token after ``num_tokens`` others looks at, or a later one."""
        return max(0, num_tokens + 1 - self.window) // self.block_size

    def can_promise(self, num_blocks: int, *others: BlockTable) -> bool:
        """Tells whether a table of that many blocks may have its share, once ``others`` have none."""
        given = sum(other.num_promised for other in others)
        return self.num_promised - given + min(num_blocks, self.most) <= self._num_promisable

    def follow(self, table: BlockTable) -> None:
        """Gives ``table`` an entry for each of its other blocks, and promises it as many as it needs."""
        ids = self._ids(table)
        ids += [self.nobody] * (len(table.block_ids) - len(ids))
        promised = min(len(ids), self.most)
        self.num_promised += promised - table.num_promised
        table.num_promised = promised

    def take_over(self, table: BlockTable, hashes: Sequence[BlockHash]) -> None:
        """Starts the empty ``table`` with what its next token looks at; ``hashes`` are ``usable``."""
        first = self.first_seen(len(hashes) * self.block_size)
        table.window_ids = [self.nobody] * first + [self._share(each) for each in hashes[first:]]
        table.first_window_block, table.end_window_block = first, len(hashes)

    def usable(self, hashes: Sequence[BlockHash]) -> int:
        """Returns how many of the first of ``hashes`` a table can begin with: those up to a place whose
        window is there as a whole."""
        longest = num_there = 0
        for length, block_hash in enumerate(hashes, start=1):
            num_there = num_there + 1 if self.has(block_hash) else 0
            if num_there >= length - self.first_seen(length * self.block_size):
                longest = length
        return longest

    def can_extend(self, table: BlockTable, num_tokens: int) -> bool:
        return self._num_lacking(table, num_tokens) <= len(self._free)

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        """Takes the blocks that the first ``num_tokens`` tokens are written to, which ``table`` was promised
        or a step may add."""
        ids = self._ids(table)
        for _ in range(self._num_lacking(table, num_tokens)):
            end = table.end_window_block
            ids[end] = self._take(ids[end - 1] if end > table.first_window_block else None)
            table.end_window_block += 1

    def publish(self, table: BlockTable, first: int) -> None:
        """Publishes the blocks of the hashes from number ``first`` on."""
        ids = self._ids(table)
        for number in range(max(first, table.first_window_block), len(table.hashes)):
            self._publish(ids[number], table.hashes[number])

    def keep(self, table: BlockTable, num_tokens: int) -> None:
        """Keeps what a text needs that begins with the first ``num_tokens`` tokens or with all that are
        published."""
        hashes = table.hashes[max(self.first_seen(num_tokens), table.first_window_block) :]
        self._kept |= {self._block_of[each] for each in hashes if self.has(each)}
        self._keep_in_files(hashes)

    def let_go(self, table: BlockTable) -> None:
        """Takes back the blocks that hold none of the computed tokens, and those at which no token after the
        last full block will look, with which another text may begin; these tokens must be committed."""
        ids = self._ids(table)
        self._cut(table, -(-table.num_computed_tokens // self.block_size))
        full = table.num_computed_tokens // self.block_size * self.block_size
        first = min(self.first_seen(full), table.end_window_block)
        for number in range(table.first_window_block, first):
            self._drop(ids[number], is_next=ids[number] not in self._kept)
            ids[number] = self.nobody
        table.first_window_block = max(table.first_window_block, first)

    def truncate(self, table: BlockTable, num_blocks: int) -> None:
        """Takes back the blocks from number ``num_blocks`` on. What the token after the computed ones looks
        at must be there, unless nothing of the text is left."""
        is_there = self.first_seen(table.num_computed_tokens) >= table.first_window_block
        assert num_blocks == 0 or is_there, "blocks that this text needs have been let go"
        self._cut(table, num_blocks)
        del self._ids(table)[num_blocks:]
        self.follow(table)

    def keep_end(self, table: BlockTable) -> None:
        """Lets files keep what a text needs that goes on from this one."""
        self._keep_in_files(table.hashes[table.first_window_block :])

    def restore(self, block_hash: BlockHash, data: memoryview) -> None:
        """Publishes a block that files have."""
        self._restore(block_hash, None, data)

    def _cut(self, table: BlockTable, num_blocks: int) -> None:
        """Takes back the blocks from number ``num_blocks`` on."""
        ids, first = self._ids(table), max(num_blocks, table.first_window_block)
        for number in reversed(range(first, table.end_window_block)):
            self._drop(ids[number])
            ids[number] = self.nobody
        table.end_window_block = min(table.end_window_block, num_blocks)
        table.first_window_block = min(table.first_window_block, num_blocks)

    def _num_lacking(self, table: BlockTable, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) - table.end_window_block)

    def _forget(self, block: int) -> BlockHash | None:
        self._kept.discard(block)
        return super()._forget(block)

    @staticmethod
    def _ids(table: BlockTable) -> list[int]:
        if table.window_ids is None:
            table.window_ids = []
        return table.window_ids


class WindowedPool(BlockPool):
    """Owns the blocks of a model's layers without a window, and knows those of the others, ``windows``."""

    def __init__(
        self, num_blocks: int, block_size: int, windows: WindowBlocks, states: StateSlots | None = None
    ) -> None:
        super().__init__(num_blocks, block_size, states)
        self.windows = windows
        self.distance = self.distance if states is not None else DISTANCE * windows.window

    def _alike(self, states: StateSlots | None) -> BlockPool:
        return WindowedPool(self.num_blocks, self.block_size, self.windows.fresh(), states)

    def keep_in(self, files: "CacheFiles", of_windows: "CacheFiles | None" = None) -> None:
        """``of_windows`` keep what layers with a window have."""
        super().keep_in(files)
        self.windows.files = of_windows

    @property
    def all_files(self) -> "list[CacheFiles]":
        return super().all_files + ([] if self.windows.files is None else [self.windows.files])

    @property
    def usage(self) -> float:
        """Returns the share in use of those blocks that are scarcest."""
        return max(super().usage, self.windows.usage)

    @property
    def num_writable(self) -> int:
        return min(self.num_free, self.windows.num_free)

    def can_reserve(self, table: BlockTable, num_tokens: int) -> bool:
        has_promise = self.windows.can_promise(self.blocks_for(num_tokens), table)
        return has_promise and super().can_reserve(table, num_tokens)

    def would_hold(self, num_tokens: int, others: Sequence[BlockTable]) -> bool:
        has_promise = self.windows.can_promise(self.blocks_for(num_tokens), *others)
        return has_promise and super().would_hold(num_tokens, others)

    def can_begin(self, hashes: list[BlockHash], num_tokens: int) -> bool:
        has_promise = self.windows.can_promise(self.blocks_for(num_tokens))
        return has_promise and super().can_begin(hashes, num_tokens)

    def reserve(self, table: BlockTable, num_tokens: int) -> None:
        super().reserve(table, num_tokens)
        self.windows.follow(table)

    def can_extend(self, table: BlockTable, num_tokens: int) -> bool:
        return self.windows.can_extend(table, num_tokens)

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        self.windows.extend(table, num_tokens)

    def let_go(self, table: BlockTable) -> None:
        self.windows.let_go(table)

    def usable(self, hashes: list[BlockHash]) -> list[BlockHash]:
        # Snapshots and windows need not be there at the same places.
        while len(found := super().usable(hashes)) > (length := self.windows.usable(found)):
            hashes = found[:length]
        return found

    def take_over(self, table: BlockTable, hashes: list[BlockHash]) -> None:
        super().take_over(table, hashes)
        self.windows.take_over(table, hashes)

    def publish(self, table: BlockTable, token_ids: Sequence[int], salt: str) -> None:
        num_published = len(table.hashes)
        super().publish(table, token_ids, salt)
        self.windows.publish(table, num_published)

    def _keep(self, table: BlockTable, num_tokens: int) -> None:
        super()._keep(table, num_tokens)
        self.windows.keep(table, num_tokens)

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        super().truncate(table, num_tokens)
        self.windows.truncate(table, self.blocks_for(num_tokens))

    def release(self, table: BlockTable) -> None:
        self.windows.keep_end(table)
        super().release(table)

    def use_again(self, hashes: Sequence[BlockHash]) -> None:
        super().use_again(hashes)
        self.windows.use_again(hashes)

    def forget_all(self) -> None:
        super().forget_all()
        self.windows.forget_all()

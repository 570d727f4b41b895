"""Who owns which cache block: plain integers, no tensors.

A pool hands out blocks of ``block_size`` tokens; a ``BlockTable`` is one sequence's share of one model's
pool. ``truncate`` is the only way back: it forgets computed tokens and returns the blocks beyond them.
The scheduler reserves, the engine core truncates and releases.
"""


class BlockTable:
    """Blocks of one sequence in one pool; the first ``num_computed_tokens`` of its ids are stored there."""

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.num_computed_tokens = 0


class BlockPool:
    """A fixed number of blocks, each free or owned by exactly one table."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1 - self.num_free / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_reserve(self, table: BlockTable, num_tokens: int) -> bool:
        return self.blocks_for(num_tokens) - len(table.block_ids) <= self.num_free

    def reserve(self, table: BlockTable, num_tokens: int) -> None:
        """Give ``table`` room for its first ``num_tokens`` tokens; ``can_reserve`` must hold."""
        for _ in range(self.blocks_for(num_tokens) - len(table.block_ids)):
            table.block_ids.append(self._free.pop())

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        """Keep at most the first ``num_tokens`` computed tokens and the blocks that hold them."""
        table.num_computed_tokens = min(table.num_computed_tokens, num_tokens)
        num_kept = self.blocks_for(table.num_computed_tokens)
        self._free.extend(reversed(table.block_ids[num_kept:]))
        del table.block_ids[num_kept:]

    def release(self, table: BlockTable) -> None:
        self.truncate(table, 0)

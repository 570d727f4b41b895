"""Keeps who owns which cache block, in plain integers.

A pool hands out blocks of ``block_size`` tokens; a ``BlockTable`` is one sequence's share of one model's
pool. Full blocks of committed tokens are *published* under a hash that covers everything before them, so
that a later sequence with the same beginning takes them over instead of computing them. Published blocks
that no table uses stay until their place is needed, the least recently used first. ``truncate`` is the only
way back. The scheduler calls all of it.

Where a model has recurrent layers, a table has a slot for their states, too, and a beginning can be taken
over only as far as there is a snapshot of them (``state_slots``).
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from hashlib import blake2b
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING

from truedraft.engine.core.state_slots import StateSlots
from truedraft.engine.kv_events import KvEvents
from truedraft.engine.memory.block_table import BlockHash, BlockTable
from truedraft.engine.memory.identities import FIRST_IDENTITY, IDENTITY_BYTES

if TYPE_CHECKING:
    from truedraft.engine.memory.cache_files import CacheFiles

# Rows that decode together would take blocks in alternation. A pass reads each row's keys from end to end,
# which goes faster if they lie in one piece: tables begin this many blocks apart, as long as there is room.
RUN = 32
MAX_RUNS = 256
# The fewest tokens between two snapshots inside a text; its prompt's end has one anyway. Where another text
# has begun in the same way, the second number is enough.
SNAPSHOT_DISTANCE, SHARED_DISTANCE = 1024, 64


class Blocks:
    """Owns a fixed number of blocks; each is free, or used by one table, or shared by several. ``files`` keep
    what is published, if there are some."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.files: CacheFiles | None = None
        self._num_users = [0] * num_blocks
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}
        # Free blocks in the order of their next use: unpublished ones, then the least recently used.
        self._free = OrderedDict.fromkeys(range(num_blocks))
        # A beginning of a run may be unused: else there is nothing to search for.
        self._has_beginnings = True

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Returns the share of the blocks in use, 0 to 1."""
        return 1 - len(self._free) / self.num_blocks

    def has(self, block_hash: BlockHash) -> bool:
        """Tells whether a block of this hash is published."""
        return block_hash in self._block_of

    def num_free_beside(self, hashes: Sequence[BlockHash]) -> int:
        """Counts the free blocks but for those of ``hashes``, which are published."""
        return len(self._free) - sum(self._num_users[self._block_of[each]] == 0 for each in hashes)

    def num_unused(self, hashes: Set[BlockHash]) -> int:
        """Counts the blocks of these hashes that no table uses, whether they are published or not."""
        used = (each in self._block_of and self._num_users[self._block_of[each]] > 0 for each in hashes)
        return len(hashes) - sum(used)

    def use_again(self, hashes: Sequence[BlockHash]) -> None:
        """Makes the blocks of a text the last ones to be used for something else."""
        for block_hash in reversed(hashes):
            block = self._block_of.get(block_hash)
            if block is not None and block in self._free:
                self._free.move_to_end(block)

    def forget_all(self) -> None:
        """Forgets what is published; sequences that run keep their blocks."""
        for block in list(self._hash_of):
            self._forget(block)
        self._has_beginnings = True
        if self.files is not None:
            self.files.all_changes()

    def _take(self, last: int | None) -> int:
        """Gives a free block to a table that goes on after the block ``last``, if it has one."""
        block = self._best_after(last)
        del self._free[block]
        self._forget(block)
        self._num_users[block] = 1
        return block

    def _best_after(self, last: int | None) -> int:
        """Finds the free block that a table goes on with: the one after its last one, so that its text lies
        in one piece, or the beginning of a run without a table, or the first one."""
        following = -1 if last is None else last + 1
        if self._is_unused(following):
            return following
        if self._has_beginnings:
            # Always from the first one on: memory that was never touched takes time to be touched.
            for beginning in range(0, min(self.num_blocks, RUN * MAX_RUNS), RUN):
                if self._is_unused(beginning):
                    return beginning
            self._has_beginnings = False
        first: int = next(iter(self._free))
        return first

    def _is_unused(self, block: int) -> bool:
        """Tells whether it is free and holds nothing that could be taken over."""
        return block in self._free and block not in self._hash_of

    def _share(self, block_hash: BlockHash) -> int:
        """Gives a published block to one table more."""
        block = self._block_of[block_hash]
        self._free.pop(block, None)
        self._num_users[block] += 1
        return block

    def _publish(self, block: int, block_hash: BlockHash) -> bool:
        """Returns False if another block has this hash: the same text may have been computed twice at once,
        and one copy is enough to find."""
        if block_hash in self._block_of:
            return False
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def _drop(self, block: int, is_next: bool = False) -> None:
        """Counts one user less. The last blocks of a text are dropped first, so they are also lost first; one
        that ``is_next`` is the next to be used for something else."""
        self._num_users[block] -= 1
        if self._num_users[block] == 0:
            self._free[block] = None
            if is_next or block not in self._hash_of:
                self._free.move_to_end(block, last=False)
                self._has_beginnings |= block % RUN == 0

    def _forget(self, block: int) -> BlockHash | None:
        """Forgets what a block was published as; returns it."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            if self.files is not None:
                self.files.block_changes(block)
        return block_hash

    def _restore(self, block_hash: BlockHash, last: int | None, data: memoryview) -> bool:
        """Publishes a block that files have, in place of the free one that would be used next after ``last``;
        returns False if there is none."""
        if self.files is None or not self._free or self.has(block_hash):
            return False
        block = self._best_after(last)
        self._forget(block)
        self.files.store_block(block, data)
        self._publish(block, block_hash)
        self._free.move_to_end(block)
        return True

    def _keep_in_files(self, hashes: Iterable[BlockHash]) -> None:
        """Lets files keep those of these blocks that are published."""
        kept = [(each, self._block_of[each]) for each in hashes if self.has(each)]
        if self.files is not None and kept:
            self.files.keep_blocks(kept)


class BlockPool(Blocks):
    """Owns the blocks of one model's cache, or of its layers without a window (``window_blocks``).

    ``states`` are the slots of a model with recurrent layers. What is stored of a token may depend on up to
    ``lookahead`` tokens after it, besides those before it. ``files`` keep what is published, if there are
    some (``keep_in``). A beginning of a text is kept for others every ``distance`` tokens, where it takes
    more than published blocks.
    """

    distance = SNAPSHOT_DISTANCE

    def __init__(
        self, num_blocks: int, block_size: int, states: StateSlots | None = None, lookahead: int = 0
    ) -> None:
        super().__init__(num_blocks)
        self.block_size = block_size
        self.states = states
        self.lookahead = lookahead
        self.events: KvEvents | None = None

    def fresh(self) -> "BlockPool":
        """Returns one like this that knows of no table."""
        fresh = self._alike(self.states and StateSlots(self.states.num_slots, self.states.copy))
        fresh.events = self.events
        if self.events is not None:
            self.events.cleared()
        for files in self.all_files:
            files.all_changes()
        if self.files is not None:
            fresh.keep_in(*self.all_files)
        return fresh

    def _alike(self, states: StateSlots | None) -> "BlockPool":
        return BlockPool(self.num_blocks, self.block_size, states, self.lookahead)

    def keep_in(self, files: "CacheFiles") -> None:
        """Lets ``files`` keep what is published from now on."""
        self.files = files
        if self.states is not None:
            self.states.files = files

    @property
    def all_files(self) -> "list[CacheFiles]":
        """Returns what ``keep_in`` was given."""
        return [] if self.files is None else [self.files]

    @property
    def num_writable(self) -> int:
        """Returns how many blocks tables can have together if a pass may write to all of them."""
        return self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_reserve(self, table: BlockTable, num_tokens: int) -> bool:
        has_slot = table.state_slot is not None or self.has_slots(1)
        return has_slot and self.blocks_for(num_tokens) - len(table.block_ids) <= self.num_free

    def would_hold(self, num_tokens: int, others: Sequence[BlockTable]) -> bool:
        """Tells whether there would certainly be room for so many tokens without ``others``."""
        given = sum(self._num_users[block] == 1 for other in others for block in other.block_ids)
        return self.blocks_for(num_tokens) <= self.num_free + given

    def has_slots(self, num_tables: int) -> bool:
        """Tells whether ``num_tables`` more can have slots for states, where they need them."""
        return self.states is None or self.states.num_free >= num_tables

    def reserve(self, table: BlockTable, num_tokens: int) -> None:
        """Gives ``table`` room for its first ``num_tokens`` tokens; ``can_reserve`` must hold."""
        if self.states is not None and table.state_slot is None:
            self.states.take(table)
        for _ in range(self.blocks_for(num_tokens) - len(table.block_ids)):
            table.block_ids.append(self._take(table.block_ids[-1] if table.block_ids else None))

    def can_extend(self, table: BlockTable, num_tokens: int) -> bool:
        """Tells whether a step can store ``num_tokens`` tokens of ``table``, whatever other tables it has."""
        return True

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        """Prepares ``table`` for a step after which it has up to ``num_tokens`` tokens; these must be
        reserved."""

    def let_go(self, table: BlockTable) -> None:
        """Takes back what no token after the computed ones will look at, which must be committed."""

    def find(
        self, token_ids: Sequence[int], salt: str, remembered: Sequence[BlockHash] = ()
    ) -> list[BlockHash]:
        """Returns hashes of the longest published beginning of ``token_ids``, in whole blocks, each with the
        tokens that it looks ahead to. The first ones of its text may be ``remembered``."""
        known = remembered[: max(0, (len(token_ids) - self.lookahead) // self.block_size)]
        hashes = chain(known, self.hash_chain(token_ids, salt, known))
        return list(takewhile(self._block_of.__contains__, hashes))

    def remembered(self, table: BlockTable, token_ids: Sequence[int], salt: str) -> list[BlockHash]:
        """Returns hashes of all whole blocks of ``token_ids``, with which the text of ``table`` begins; they
        are computed once."""
        table.beginning += self.hash_chain(token_ids, salt, table.beginning)
        return table.beginning[: max(0, (len(token_ids) - self.lookahead) // self.block_size)]

    def usable(self, hashes: list[BlockHash]) -> list[BlockHash]:
        """Returns as many of the first of ``hashes``, which come from ``find``, as a table can begin with."""
        if self.states is None:
            return hashes
        length = next((n for n in range(len(hashes), 0, -1) if self.states.has(hashes[n - 1])), 0)
        return hashes[:length]

    def expect_shared(self, table: BlockTable, found: list[BlockHash], usable: list[BlockHash]) -> None:
        """Remembers that another text has begun with all of what was ``found``, but that only so much of it
        is ``usable``: the next one will be better off."""
        more = (len(found) - len(usable)) * self.block_size
        table.num_shared_tokens = len(found) * self.block_size if more >= SHARED_DISTANCE else 0

    def can_begin(self, hashes: list[BlockHash], num_tokens: int) -> bool:
        """Tells whether a table can take these over and reserve room for ``num_tokens``."""
        num_needed = self.blocks_for(num_tokens) - len(hashes)
        return self.has_slots(1) and num_needed <= self.num_free_beside(hashes)

    def take_over(self, table: BlockTable, hashes: list[BlockHash]) -> None:
        """Starts the empty ``table`` with published blocks, as computed; ``hashes`` come from ``usable``."""
        table.block_ids += map(self._share, hashes)
        table.hashes = list(hashes)
        table.num_computed_tokens = table.num_kept_tokens = len(hashes) * self.block_size
        if self.states is not None and hashes:
            self.states.take_over(table, hashes[-1])

    def publish(self, table: BlockTable, token_ids: Sequence[int], salt: str) -> None:
        """Publishes the full blocks of ``token_ids``, which must be committed and, but for those that the
        last block looks ahead to, computed."""
        num_published = len(table.hashes)
        if (len(token_ids) - self.lookahead) // self.block_size <= num_published:
            return
        chain = self.hash_chain(token_ids, salt, table.hashes)
        published = []
        for block, block_hash in zip(islice(table.block_ids, num_published, None), chain, strict=False):
            table.hashes.append(block_hash)
            if self._publish(block, block_hash):
                published.append((block_hash, block))
                if self.events is not None and not salt:
                    end = len(table.hashes) * self.block_size
                    self.events.stored(table.hashes[-2:], token_ids[end - self.block_size : end])
        if self.files is not None:
            self.files.keep_blocks(published)

    def keep_beginning(self, table: BlockTable, num_prompt_tokens: int) -> None:
        """Keeps what those need, besides blocks, who take over what ``table`` has published: at the end of
        the prompt, where it has been found to part from another one, and where enough tokens have been
        computed since the last time."""
        num_published = len(table.hashes) * self.block_size
        if not table.num_folded_tokens <= num_published > table.num_kept_tokens:
            return
        # All of the prompt but a token can be taken over, in whole blocks.
        prompt_end = (num_prompt_tokens - 1) // self.block_size * self.block_size
        is_prompt = table.num_kept_tokens < prompt_end <= num_published
        if (
            is_prompt
            or num_published == table.num_shared_tokens
            or num_published - table.num_kept_tokens >= self.distance
        ):
            self._keep(table, prompt_end if is_prompt else num_published)
            table.num_kept_tokens = num_published

    def _keep(self, table: BlockTable, num_tokens: int) -> None:
        """Keeps it for texts that begin with the first ``num_tokens`` tokens, or with all that are
        published."""
        if self.states is not None:
            self.states.keep(table, self._unfolded(table))

    def _unfolded(self, table: BlockTable) -> list[BlockHash]:
        """Returns the published blocks that end where its states are folded, or after that."""
        first = max(self.blocks_for(table.num_folded_tokens), 1) - 1
        return table.hashes[first:]

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        """Keeps room for the first ``num_tokens`` tokens, and those of them that are computed.

        The room of tokens that are not is kept too: a draft's table that lags would give it back after every
        step and take it again in the next. Published blocks hold committed tokens only, so a kept block that
        will be written to again is never one of them. States cannot go back to before they were folded.
        """
        assert num_tokens == 0 or num_tokens >= table.num_folded_tokens, "states are folded over these tokens"
        table.num_computed_tokens = min(table.num_computed_tokens, num_tokens)
        num_kept = self.blocks_for(num_tokens)
        if num_kept >= len(table.block_ids):
            return
        for block in reversed(table.block_ids[num_kept:]):
            self._drop(block)
        del table.block_ids[num_kept:]
        table.num_cuts += 1
        del table.hashes[num_kept:]

    def release(self, table: BlockTable) -> None:
        """Takes back all that ``table`` has. Its states stay as a snapshot if others can begin with them."""
        if self.states is not None and table.state_slot is not None:
            self.states.give_back(table, self._unfolded(table))
        # The last blocks of a text are the first to be lost, as they are in memory.
        self._keep_in_files(reversed(table.hashes))
        table.num_kept_tokens = 0
        self.truncate(table, 0)

    def restore(
        self, chain: Sequence[BlockHash], token_ids: Sequence[int], salt: str, data: memoryview
    ) -> None:
        """Publishes a block that files have, in place of the free one that would be used next. ``chain`` is
        its hash, after that of the block before it in its text; ``token_ids`` are its own."""
        *before, block_hash = chain
        last = next((self._block_of[each] for each in before if self.has(each)), None)
        if not self._restore(block_hash, last, data):
            return
        if self.events is not None and not salt:
            self.events.stored(chain, token_ids)

    def forget_all(self) -> None:
        super().forget_all()
        if self.states is not None:
            self.states.forget_all()

    def _forget(self, block: int) -> BlockHash | None:
        block_hash = super()._forget(block)
        if block_hash is not None and self.events is not None:
            self.events.removed(block_hash)
        return block_hash

    def hash_chain(
        self, token_ids: Sequence[int], salt: str, known: Sequence[BlockHash] = ()
    ) -> Iterator[BlockHash]:
        """Hashes each full block after the ``known`` ones: its tokens, all before them, those that it looks
        ahead to, and the salt. ``token_ids`` are those of ``Sequence.prefix_ids``.

        128 bits of a cryptographic hash: a collision would show one user another's text.
        """
        previous, size = known[-1] if known else salt.encode(), self.block_size + self.lookahead
        for start in range(len(known) * self.block_size, len(token_ids) - size + 1, self.block_size):
            digest = blake2b(previous, digest_size=16)
            digest.update(b"".join(map(_encoded, token_ids[start : start + size])))
            previous = digest.digest()
            yield previous


def _encoded(token_id: int) -> bytes:
    """Returns a token as bytes, those of a picture with as many as its digest needs."""
    return token_id.to_bytes(4 if token_id < FIRST_IDENTITY else IDENTITY_BYTES, "little")

"""Connects one model's cache with files: a block or a snapshot of states is written and read as its bytes.

The engine's thread says what is worth keeping, and a thread of its own writes it straight from the cache. The
engine does not wait for that: it counts each new use of a block or a slot, and what was written of one whose
count has changed meanwhile is thrown away.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from queue import Full, Queue
from threading import Thread, current_thread
from typing import TYPE_CHECKING

from truedraft.engine.memory.block_table import BlockHash
from truedraft.engine.memory.prefix_files import PrefixFolder

if TYPE_CHECKING:
    from truedraft.engine.memory.kv_cache import KVCache

logger = logging.getLogger(__name__)

# What a file holds: a block, one of layers with a window, a slot's states and records, or the hash of a
# beginning whose states are also good for another one.
BLOCK, WINDOW, STATE, ALIAS = b"block", b"window", b"state", b"alias"


class Background:
    """Does one thing after the other in a thread; at most ``most`` wait, 0 for any number."""

    def __init__(self, name: str, most: int = 0) -> None:
        self._queue: Queue[Callable[[], None] | None] = Queue(most)
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> bool:
        """Returns False if too much waits already."""
        try:
            self._queue.put_nowait(work)
        except Full:
            return False
        return True

    def close(self, seconds: float) -> None:
        """Ends the thread after what waits. It is not waited for longer than ``seconds``."""
        try:
            self._queue.put(None, timeout=seconds)
        except Full:
            return
        if self._thread is not current_thread():  # the garbage collector may close in any thread
            self._thread.join(seconds)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                logger.exception("Something failed in the thread %s, which goes on", self._thread.name)
            del work  # what it holds may be freed while the thread waits


class CacheFiles:
    """Holds the files of one model's cache, or of its layers with a window (``of_windows``) that have blocks
    of their own. ``identity`` says all that its bytes depend on, apart from the texts; the ``writer`` does
    what takes long."""

    def __init__(
        self,
        cache: "KVCache",
        identity: str,
        folder: PrefixFolder,
        writer: Background,
        of_windows: bool = False,
    ) -> None:
        self.folder = folder
        self._writer = writer
        self._identity = blake2b(identity.encode(), digest_size=32).digest()
        self._kind = WINDOW if of_windows else BLOCK
        self._of_blocks, self._of_slots = cache.bytes_of_blocks(of_windows), cache.bytes_of_slots()
        self._block_uses = [0] * self._of_blocks.number
        self._slot_uses = [0] * self._of_slots.number

    def block_changes(self, block: int) -> None:
        """Is told before a block that was published is used for something else."""
        self._block_uses[block] += 1

    def slot_changes(self, slot: int) -> None:
        """Is told before a slot with a snapshot is used for something else."""
        self._slot_uses[slot] += 1

    def all_changes(self) -> None:
        """Is told when nothing that is in the cache may be written any more."""
        for uses in (self._block_uses, self._slot_uses):
            uses[:] = [number + 1 for number in uses]

    def keep_blocks(self, found: Sequence[tuple[BlockHash, int]]) -> None:
        """Writes published blocks that are not in files yet; the files of others become the newest ones, that
        of the last block last."""
        noted = [(block_hash, block, self._block_uses[block]) for block_hash, block in found]
        self._submit(partial(self._write_blocks, noted))

    def keep_state(self, slot: int, hashes: Sequence[BlockHash], num_folded: int) -> None:
        """Does the same with a snapshot, which is good for the beginnings that end with these blocks."""
        use = self._slot_uses[slot]
        self._submit(partial(self._write_state, slot, use, list(hashes), num_folded))

    def clear(self) -> str:
        """Forgets all files of the folder, those of other models' caches included; returns why that cannot
        be. A disk may take long for it."""
        error = self.folder.clear()
        self._submit(self.folder.tidy)
        return error

    def _submit(self, work: Callable[[], None]) -> None:
        if not self._writer.submit(work):
            self.folder.counts["dropped"] += 1

    def _write_blocks(self, noted: Sequence[tuple[BlockHash, int, int]]) -> None:
        for block_hash, block, use in noted:
            name, key = self._named(self._kind, block_hash)
            is_still = partial(self._is_unchanged, self._block_uses, block, use)
            if is_still() and not self.folder.touch(name):
                self.folder.write(name, key, 0, self._of_blocks.parts(block), is_still)

    def _write_state(self, slot: int, use: int, hashes: list[BlockHash], num_folded: int) -> None:
        *others, last = hashes
        name, key = self._named(STATE, last)
        is_still = partial(self._is_unchanged, self._slot_uses, slot, use)
        if not is_still():
            return
        if not self.folder.touch(name):
            self.folder.write(name, key, num_folded, self._of_slots.parts(slot), is_still)
        for other in others:
            name, key = self._named(ALIAS, other)
            if not self.folder.touch(name):
                self.folder.write(name, key, num_folded, [memoryview(last)], is_still)

    @staticmethod
    def _is_unchanged(uses: Sequence[int], place: int, use: int) -> bool:
        return uses[place] == use

    def has_block(self, block_hash: BlockHash) -> bool:
        return self.folder.has(self._named(self._kind, block_hash)[0])

    def has_state(self, block_hash: BlockHash) -> bool:
        return any(self.folder.has(self._named(kind, block_hash)[0]) for kind in (STATE, ALIAS))

    def read_block(self, block_hash: BlockHash) -> memoryview | None:
        """Returns a block's bytes, if there is a file of it."""
        found = self.folder.read(*self._named(self._kind, block_hash), self._of_blocks.num_bytes)
        return None if found is None else found[1]

    def read_state(self, block_hash: BlockHash) -> tuple[int, memoryview] | None:
        """Returns over how many tokens a snapshot is folded that is good for this beginning, and its
        bytes."""
        found = self.folder.read(*self._named(STATE, block_hash), self._of_slots.num_bytes)
        if found is None:
            alias = self.folder.read(*self._named(ALIAS, block_hash), len(block_hash))
            if alias is not None:
                found = self.folder.read(*self._named(STATE, bytes(alias[1])), self._of_slots.num_bytes)
            # The same text may have been kept twice, folded over more of it than this beginning has.
            if alias is not None and found is not None and alias[0] != found[0]:
                return None
        return found

    def store_block(self, block: int, data: memoryview) -> None:
        self._of_blocks.store(block, data)

    def store_state(self, slot: int, data: memoryview) -> None:
        self._of_slots.store(slot, data)

    def _named(self, kind: bytes, block_hash: BlockHash) -> tuple[str, bytes]:
        """Returns a file's name, and the key that is in it: whose cache it is of, and which text."""
        key = self._identity + block_hash
        return blake2b(kind + key, digest_size=16).hexdigest(), key

"""Brings back from files what sequences that wait begin with, before they are admitted.

Blocks come back as published ones that no table uses, and snapshots as snapshots: after that a prefix in
files is a prefix in the cache like any other. Where layers with a window have blocks of their own, only those
come back at which the next token will look. A thread reads ahead, and the engine's thread stores what has
been read, for a bounded time between two steps. A sequence whose files take too long is computed instead.
"""

import time
from collections.abc import Sequence as Sequences
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, Full, Queue
from threading import Event

from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.window_blocks import WindowBlocks, WindowedPool
from truedraft.engine.memory.block_table import BlockHash
from truedraft.engine.memory.cache_files import Background, CacheFiles
from truedraft.engine.memory.prefix_files import PrefixFolder
from truedraft.engine.messages import PrefixFileStats

# Blocks and snapshots that are read ahead of what the engine has stored.
READ_AHEAD = 16
# Seconds that the engine stores between two steps while sequences run, and while none does.
BESIDE_SECONDS, ALONE_SECONDS = 0.005, 0.05
# After this many seconds without anything from files, a sequence is computed.
TIMEOUT_SECONDS = 10.0
# Seconds between two looks of the reader, while there is no room, whether what it has read is still wanted.
LOOK_SECONDS = 0.5


@dataclass(slots=True)
class Part:
    """Holds the beginning of a text in one pool: the hashes of its blocks, the first ``num_found`` of which
    the cache has. ``held`` are those of blocks that it has, ``snapshots`` those with a snapshot, ``windows``
    those that layers with a window have in blocks of their own."""

    pool: BlockPool
    files: CacheFiles
    hashes: list[BlockHash]
    num_found: int
    held: set[BlockHash]
    snapshots: set[BlockHash]
    windows: set[BlockHash]


@dataclass(slots=True, eq=False)
class Load:
    """Is what one sequence waits for, since ``begun``."""

    sequence: Sequence
    parts: list[Part]
    is_wanted: bool = True
    begun: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Arrived:
    """Is a block that was read, of layers with a window or of the others, or a snapshot, which is folded over
    ``num_folded`` tokens; ``place`` is that of the block, or of the last one of the snapshot's beginning.
    Without ``data`` the load is over."""

    load: Load
    part: Part | None = None
    place: int = 0
    num_folded: int | None = None
    data: memoryview | None = None
    is_window: bool = False


class Restoring:
    """Knows which sequences wait for their files. The first of a request's choices restores for all."""

    def __init__(self, reader: Background) -> None:
        self._reader = reader
        self._loads: dict[str, Load] = {}  # keys: request ids
        self._arrived: Queue[Arrived] = Queue(READ_AHEAD)
        self._news = Event()
        self._heard = 0.0  # when something has come last

    def is_ready(
        self, sequence: Sequence, shares: Sequences[tuple[BlockPool, object]], num_tokens: int
    ) -> bool:
        """Tells whether a sequence need not wait. Begins to read what files have of its first ``num_tokens``
        in the pools of ``shares``, whose first one is the target's."""
        if sequence.is_looked_up:
            return True
        if sequence.request_id in self._loads:
            return False
        salt = sequence.prefix_salt
        parts = [
            _part(pool, list(pool.hash_chain(sequence.prefix_ids(num_tokens + pool.lookahead), salt)))
            for pool, _ in shares
            if pool.files is not None
        ]
        if not parts or not _may_gain(parts[0]):
            sequence.is_looked_up = True
            return True
        for part in parts:
            part.pool.use_again(part.hashes[: part.num_found])
        load = self._loads[sequence.request_id] = Load(sequence, parts)
        self._reader.submit(partial(self._read, load))
        return False

    def store(self, is_alone: bool) -> None:
        """Stores what has been read, for a bounded time, and ends loads that are complete, or take too
        long."""
        now = time.monotonic()
        until = now + (ALONE_SECONDS if is_alone else BESIDE_SECONDS)
        while now < until:
            try:
                arrived = self._arrived.get_nowait()
            except Empty:
                break
            now = self._heard = time.monotonic()
            if arrived.load.is_wanted:
                self._store(arrived)
        for load in [*self._loads.values()]:
            if now - max(load.begun, self._heard) > TIMEOUT_SECONDS:
                self._end(load)

    def wait(self) -> None:
        """Waits until something has been read, or for a moment."""
        if self._loads and self._arrived.empty():
            self._news.wait(ALONE_SECONDS)
        self._news.clear()

    def forget(self, sequence: Sequence) -> None:
        """Ends the load of a sequence that has left the queue."""
        load = self._loads.get(sequence.request_id)
        if load is not None and load.sequence is sequence:
            load.is_wanted = False
            del self._loads[sequence.request_id]

    def forget_all(self) -> None:
        """Ends all loads; sequences are computed without them."""
        for load in [*self._loads.values()]:
            self._end(load)

    def _store(self, arrived: Arrived) -> None:
        load, part, place = arrived.load, arrived.part, arrived.place
        if part is None or arrived.data is None:
            self._end(load)
            return
        block_hash = part.hashes[place]
        if arrived.is_window:
            if (windows := _windows(part.pool)) is not None:
                windows.restore(block_hash, arrived.data)
            return
        if arrived.num_folded is not None:
            if part.pool.states is not None:
                part.pool.states.restore(block_hash, arrived.num_folded, arrived.data)
            return
        size, sequence = part.pool.block_size, load.sequence
        token_ids = sequence.prefix_ids((place + 1) * size, place * size)
        chain = part.hashes[max(0, place - 1) : place + 1]
        part.pool.restore(chain, token_ids, sequence.prefix_salt, arrived.data)
        if part is load.parts[0]:
            sequence.num_restored_tokens += size

    def _end(self, load: Load) -> None:
        self.forget(load.sequence)
        load.sequence.is_looked_up = True
        for part in load.parts:
            part.pool.use_again(part.hashes)

    def _read(self, load: Load) -> None:
        """Reads in the reader's thread; all that it needs of the pools was noted before."""
        try:
            most = len(load.parts[0].hashes)
            for part in load.parts:
                # A draft begins with no more than the target does.
                found = self._read_part(load, part, most)
                most = min(most, found)
        finally:
            self._send(Arrived(load))

    def _read_part(self, load: Load, part: Part, most: int) -> int:
        """Returns how many of the first ``most`` blocks a table can begin with, once all is stored."""
        files, hashes = part.files, part.hashes[:most]
        length = min(part.num_found, len(hashes))
        while length < len(hashes) and (hashes[length] in part.held or files.has_block(hashes[length])):
            length += 1
        length = _with_end(part, length)
        for place in range(min(part.num_found, length), length):
            if not load.is_wanted:
                return 0
            if hashes[place] in part.held:
                continue
            data = files.read_block(hashes[place])
            if data is None:
                length = place
                break
            self._send(Arrived(load, part, place, data=data))
        while length := _with_end(part, length):
            if self._read_state(load, part, length) and self._read_window(load, part, length):
                break
            length -= 1
        return length

    def _read_state(self, load: Load, part: Part, length: int) -> bool:
        """Reads the states after ``length`` blocks, where there are states; returns False if it cannot."""
        block_hash = part.hashes[length - 1]
        if part.pool.states is None or block_hash in part.snapshots:
            return True
        state = part.files.read_state(block_hash)
        if state is not None:
            self._send(Arrived(load, part, length - 1, *state))
        return state is not None

    def _read_window(self, load: Load, part: Part, length: int) -> bool:
        """Reads the windows' blocks at which the token after ``length`` blocks looks, where they have their
        own; returns False if it cannot."""
        windows = _windows(part.pool)
        if windows is None or windows.files is None:
            return True
        for place in range(windows.first_seen(length * windows.block_size), length):
            if not load.is_wanted:
                return False
            if part.hashes[place] not in part.windows:
                data = windows.files.read_block(part.hashes[place])
                if data is None:
                    return False
                self._send(Arrived(load, part, place, data=data, is_window=True))
        return True

    def _send(self, arrived: Arrived) -> None:
        """Waits for room in the queue, as long as the load is wanted."""
        while arrived.load.is_wanted:
            with suppress(Full):
                self._arrived.put(arrived, timeout=LOOK_SECONDS)
                self._news.set()
                return


def stats_of(folder: PrefixFolder, num_hits: int) -> PrefixFileStats:
    """Returns what has become of files, with the tokens that were found since they had been read."""
    return PrefixFileStats(
        num_hits=num_hits,
        num_bytes=folder.num_bytes,
        read_bytes=folder.counts["read_bytes"],
        read_seconds=folder.read_seconds,
        written_bytes=folder.counts["written_bytes"],
        num_damaged=folder.counts["damaged"],
        num_failures=folder.counts["failed"],
        num_dropped=folder.counts["dropped"],
        is_writing=folder.is_writing,
    )


def _part(pool: BlockPool, hashes: list[BlockHash]) -> Part:
    """Notes what a pool's cache has of a text, no further than there are blocks for."""
    assert pool.files is not None
    held = {each for each in hashes if pool.has(each)}
    num_found = next((place for place, each in enumerate(hashes) if each not in held), len(hashes))
    states = pool.states
    snapshots = set() if states is None else {each for each in hashes if states.has(each)}
    own = _windows(pool)
    windows = set() if own is None else {each for each in hashes if own.has(each)}
    most = num_found + pool.num_free_beside(hashes[:num_found])
    return Part(pool, pool.files, hashes[:most], num_found, held, snapshots, windows)


def _windows(pool: BlockPool) -> WindowBlocks | None:
    return pool.windows if isinstance(pool, WindowedPool) else None


def _may_gain(part: Part) -> bool:
    """Tells whether files may have more of a text than the cache has, by one look."""
    found = part.hashes[: part.num_found]
    if len(part.pool.usable(found)) < len(found):
        return True
    return part.num_found < len(part.hashes) and part.files.has_block(part.hashes[part.num_found])


def _with_end(part: Part, length: int) -> int:
    """Returns the longest beginning, no longer than ``length`` blocks, whose states and windows are
    somewhere."""
    longest = -1
    while length != longest:
        longest = length
        length = _with_window(part, _with_state(part, length))
    return length


def _with_window(part: Part, length: int) -> int:
    """Does the same for the windows' blocks at which the next token looks."""
    windows = _windows(part.pool)
    if windows is None or windows.files is None:
        return length
    while length:
        seen = range(windows.first_seen(length * windows.block_size), length)
        hashes = part.hashes
        lacking = (
            place
            for place in reversed(seen)
            if hashes[place] not in part.windows and not windows.files.has_block(hashes[place])
        )
        if (last := next(lacking, None)) is None:
            break
        length = last
    return length


def _with_state(part: Part, length: int) -> int:
    """Returns the longest beginning, no longer than ``length`` blocks, whose states are somewhere."""
    if part.pool.states is None:
        return length
    while length and part.hashes[length - 1] not in part.snapshots:
        if part.files.has_state(part.hashes[length - 1]):
            break
        length -= 1
    return length

"""Brings back from files what sequences that wait begin with, before they are admitted.

Blocks come back as published ones that no table uses, and snapshots as snapshots: after that a prefix in
files is a prefix in the cache like any other. Where layers with a window have blocks of their own, only those
come back at which the next token will look. Threads look for files and read ahead, and the engine's thread
stores what has been read, for a bounded time between two steps. It asks the disk for nothing itself. What
has been restored for a sequence keeps its place until that one is admitted: other sequences are restored
only where there is room for both. A sequence whose files take too long is computed instead.
"""

import time
from collections.abc import Sequence as Sequences
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Condition, Event

from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.window_blocks import WindowBlocks, WindowedPool
from truedraft.engine.memory.block_table import BlockHash, BlockTable
from truedraft.engine.memory.cache_files import Background, CacheFiles
from truedraft.engine.memory.prefix_files import PrefixFolder
from truedraft.engine.messages import PrefixFileStats

# Bytes that are read ahead of what the engine has stored; one block or snapshot in any case.
READ_AHEAD_BYTES = 64 << 20
# Seconds that a new sequence's step waits to hear that there are no files for it. Most have none, and these
# need not wait for the next step.
GLANCE_SECONDS = 0.002
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
    those that layers with a window have in blocks of their own. A table could begin with the first
    ``num_usable`` of what is found."""

    pool: BlockPool
    files: CacheFiles
    hashes: list[BlockHash]
    num_found: int
    held: set[BlockHash]
    snapshots: set[BlockHash]
    windows: set[BlockHash]
    num_usable: int


@dataclass(slots=True, eq=False)
class Load:
    """Is what one sequence waits for: to hear whether there are files (``has_files``), then for room, and
    then for what is read of them. ``since`` is the time of the last of these steps."""

    sequence: Sequence
    parts: list[Part]
    is_wanted: bool = True
    has_files: bool | None = None
    is_read: bool = False
    heard: Event = field(default_factory=Event)
    since: float = field(default_factory=time.monotonic)

    def blocks_in(self, pool: BlockPool) -> set[BlockHash]:
        return {each for part in self.parts if part.pool is pool for each in part.hashes}


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

    @property
    def num_bytes(self) -> int:
        return 0 if self.data is None else len(self.data)


class Restoring:
    """Knows which sequences wait for their files. The first of a request's choices restores for all. The
    ``looker`` does what is short."""

    def __init__(self, reader: Background, looker: Background) -> None:
        self._reader, self._looker = reader, looker
        # Keys are request ids. A load stays here until its sequence is admitted.
        self._loads: dict[str, Load] = {}
        self._arrived: SimpleQueue[Arrived] = SimpleQueue()
        self._num_ahead, self._room = 0, Condition()  # bytes in the queue
        self._news = Event()
        self._heard = 0.0  # when something has come last
        self._hangs = False  # the disk has not answered for too long

    def is_ready(
        self, sequence: Sequence, shares: Sequences[tuple[BlockPool, BlockTable]], num_tokens: int
    ) -> bool:
        """Tells whether a sequence need not wait. Begins to look for files of its first ``num_tokens`` in the
        pools of ``shares``, whose first one is the target's."""
        if sequence.is_looked_up or self._hangs:
            return True
        if sequence.request_id in self._loads:
            return False
        salt = sequence.prefix_salt
        parts = [
            _part(pool, pool.remembered(table, sequence.prefix_ids(num_tokens + pool.lookahead), salt))
            for pool, table in shares
            if pool.files is not None
        ]
        if not parts or not _lacks_something(parts[0]):
            sequence.is_looked_up = True
            return True
        load = self._loads[sequence.request_id] = Load(sequence, parts)
        self._looker.submit(partial(self._look, load))
        load.heard.wait(GLANCE_SECONDS)
        if load.has_files is False:
            self._end(load)
        return sequence.is_looked_up

    def store(self, is_alone: bool) -> None:
        """Stores what has been read, for a bounded time, begins to read, and ends loads that are complete, or
        take too long."""
        now = time.monotonic()
        until = now + (ALONE_SECONDS if is_alone else BESIDE_SECONDS)
        while now < until:
            try:
                arrived = self._arrived.get_nowait()
            except Empty:
                break
            now = self._heard = time.monotonic()
            with self._room:
                self._num_ahead -= arrived.num_bytes
                self._room.notify()
            if arrived.load.is_wanted:
                self._store(arrived)
        must_wait = False
        for load in [one for one in self._loads.values() if one.is_wanted]:
            if load.has_files is False:
                self._end(load)
            elif load.has_files and not load.is_read:
                must_wait = must_wait or not self._begin(load, is_alone=is_alone)
                if not load.is_read and now - load.since > TIMEOUT_SECONDS:
                    self._end(load)  # There is never room: it is computed, and waits for blocks as others do.
            elif now - max(load.since, self._heard) > TIMEOUT_SECONDS:
                self._hangs = True
                self._end(load)

    def wait(self) -> None:
        """Waits until something has been heard, or for a moment."""
        if self._arrived.empty() and any(load.is_wanted for load in self._loads.values()):
            self._news.wait(ALONE_SECONDS)
        self._news.clear()

    def forget(self, sequence: Sequence) -> None:
        """Ends the load of a sequence that has left the queue, and gives up what was kept for it."""
        load = self._loads.get(sequence.request_id)
        if load is not None and load.sequence is sequence:
            load.is_wanted = False
            del self._loads[sequence.request_id]

    def forget_all(self) -> None:
        """Ends all loads; sequences are computed without them."""
        for load in [*self._loads.values()]:
            self._end(load)
        self._loads.clear()

    def clear(self, files: CacheFiles) -> Future[str]:
        """Begins to forget the files; none is read any more. The result says why they could not be."""
        files.folder.begin_to_clear()
        cleared: Future[str] = Future()

        def work() -> None:
            try:
                cleared.set_result(files.clear())
            except Exception as error:
                cleared.set_result(str(error))
                raise

        self._looker.submit(work)
        return cleared

    def _look(self, load: Load) -> None:
        """Looks in its own thread whether reading gains something."""
        load.has_files = _has_files(load.parts[0])
        self._hangs = False
        load.heard.set()
        self._news.set()

    def _begin(self, load: Load, *, is_alone: bool) -> bool:
        """Begins to read, unless all of it has no room next to what others wait for, and run with."""
        others = [one for one in self._loads.values() if one.is_read]
        for part in load.parts:
            kept = {each for one in others for each in one.blocks_in(part.pool)}
            must_fit = others or not is_alone
            if must_fit and part.pool.num_unused(kept.union(part.hashes)) > part.pool.num_free:
                return False
        # The cache may have more of the text than when it was looked at first, or less.
        load.parts = [_part(part.pool, part.hashes) for part in load.parts]
        for part in load.parts:
            found = part.hashes[: part.num_found]
            part.pool.use_again(found)
            del part.hashes[len(found) + part.pool.num_free_beside(found) :]
        load.is_read, load.since = True, time.monotonic()
        self._reader.submit(partial(self._read, load))
        return True

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
        """Lets the sequence be admitted; what has been restored for it is kept until it is."""
        load.is_wanted = False
        load.sequence.is_looked_up = True
        if not load.is_read:
            self.forget(load.sequence)
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
            if not load.is_wanted:
                return 0
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
        """Waits until so much may be read ahead, as long as the load is wanted."""
        with self._room:
            while self._num_ahead and self._num_ahead + arrived.num_bytes > READ_AHEAD_BYTES:
                if not arrived.load.is_wanted:
                    return
                self._room.wait(LOOK_SECONDS)
            self._num_ahead += arrived.num_bytes
        self._hangs = False
        self._arrived.put(arrived)
        self._news.set()


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
    """Notes what a pool's cache has of a text."""
    assert pool.files is not None
    held = {each for each in hashes if pool.has(each)}
    num_found = next((place for place, each in enumerate(hashes) if each not in held), len(hashes))
    states = pool.states
    snapshots = set() if states is None else {each for each in hashes if states.has(each)}
    own = _windows(pool)
    windows = set() if own is None else {each for each in hashes if own.has(each)}
    num_usable = len(pool.usable(hashes[:num_found]))
    return Part(pool, pool.files, list(hashes), num_found, held, snapshots, windows, num_usable)


def _windows(pool: BlockPool) -> WindowBlocks | None:
    return pool.windows if isinstance(pool, WindowedPool) else None


def _lacks_something(part: Part) -> bool:
    """Tells whether a table cannot begin with all of a text yet."""
    return part.num_usable < len(part.hashes)


def _has_files(part: Part) -> bool:
    """Tells whether files may have more of a text than the cache has, by few looks."""
    is_found = part.num_found < len(part.hashes) and part.files.has_block(part.hashes[part.num_found])
    return is_found or _with_end(part, part.num_found) > part.num_usable


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

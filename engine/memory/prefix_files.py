"""Keeps pieces of caches in files below one folder, within a quota; knows bytes and names, and no tensors.

A file is named after what it holds and is never changed: it is written under another name, and then renamed.
It is served only if its name, its header, its length and its checksum agree; whatever else lies in its place
is removed. Other servers may use the folder at the same time. The oldest files give way where the quota is
reached; a file that is used again is as good as new.
"""

import errno
import logging
import os
import re
import stat
import struct
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import count
from pathlib import Path

from truedraft.engine.errors import ModelLoadError

logger = logging.getLogger(__name__)

# Whoever changes what files hold, or how, changes the version: it is part of each folder's name.
MAGIC, VERSION = b"TDPREFIX", 1
HEADER = struct.Struct("<8sIQQ48s")  # magic, version, a number of the file's kind, payload bytes, key
CHECKSUM_BYTES = 16
# Files of ours, finished or not; nothing else is ever removed.
OURS, GONE = re.compile(r"[0-9a-f]{32}(\.[0-9a-z-]+\.new)?"), ".gone-"
FOLDERS = "truedraft-*"
# Systems give a file whole pages of this size.
PAGE = 4096
# The folder is looked through again once this part of the quota has been written: others write there, too.
PART = 16


class PrefixFolder:
    """Reads and writes the files of one ``identity`` below ``root``. One thread writes, another one reads.

    ``num_bytes`` is what all files below ``root`` take, those of others included, as far as it is known.
    ``counts`` has the keys damaged, failed (reads and writes), dropped, read_bytes and written_bytes.
    """

    def __init__(self, root: Path, identity: bytes, quota: int) -> None:
        self.root = root.expanduser()
        self.folder = self.root / f"truedraft-{identity.hex()[:32]}"
        self.quota = quota
        self.num_bytes = 0
        self.read_seconds = 0.0
        self.counts: Counter[str] = Counter()
        self.is_writing = True
        self.is_reading = True
        # Each is counted by a thread of its own.
        self._num_clearings = self._num_cleared = 0
        self._unscanned = quota  # bytes written since the folder was last looked through
        self._own, self._numbers = uuid.uuid4().hex[:8], count()
        self._last_use = 0
        self._has_warned = False
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make()
            found = self.folder.lstat()
        except OSError as error:
            raise ModelLoadError(f"prefix_cache_dir {self.root} cannot be used: {error}") from error
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
        if not is_ours:
            raise ModelLoadError(
                f"{self.folder} belongs to another user or may be written to by others, so what it holds "
                "cannot be trusted: choose another prefix_cache_dir"
            )

    def has(self, name: str) -> bool:
        # Whatever is wrong with the folder, it has nothing then.
        return self._may_read and os.path.exists(self.folder / name)

    @property
    def _may_read(self) -> bool:
        return self.is_reading and self._num_clearings == self._num_cleared

    def touch(self, name: str) -> bool:
        """Makes a file the newest one; returns False if it is not there."""
        self._last_use = max(self._last_use + 1, time.time_ns())
        try:
            os.utime(self.folder / name, ns=(self._last_use, self._last_use))
        except OSError:
            return False
        return True

    def read(self, name: str, key: bytes, num_bytes: int) -> tuple[int, memoryview] | None:
        """Returns the number and the payload that ``write`` was given; None if that is not there, whole and
        unchanged."""
        started = time.perf_counter()
        size = HEADER.size + num_bytes + CHECKSUM_BYTES
        if not self._may_read:
            return None
        try:
            with open(self.folder / name, "rb", buffering=0) as file:
                data = file.read() if os.fstat(file.fileno()).st_size == size else b""
        except FileNotFoundError:
            return None
        except OSError as error:
            self.counts["failed"] += 1
            if not self._has_warned:
                self._has_warned = True
                logger.warning("Files of prefix_cache_dir cannot be read, and are computed anew: %s", error)
            return None
        view = memoryview(data)
        head, payload = view[: HEADER.size], view[HEADER.size : -CHECKSUM_BYTES]
        number = HEADER.unpack(head)[2] if len(data) == size else 0
        is_whole = head == _header(number, num_bytes, key)
        is_whole = is_whole and view[-CHECKSUM_BYTES:] == _checksum(head, [payload])
        self.read_seconds += time.perf_counter() - started
        if not is_whole:
            self.counts["damaged"] += 1
            logger.warning("%s is damaged or of something else: it is removed and computed anew", file.name)
            self._remove(self.folder / name)
            return None
        self.counts["read_bytes"] += size
        return number, payload

    def write(
        self,
        name: str,
        key: bytes,
        number: int,
        parts: Sequence[memoryview],
        is_still: Callable[[], bool],
    ) -> None:
        """Writes a file, unless ``is_still`` says afterwards that ``parts`` have changed meanwhile."""
        num_bytes = sum(map(len, parts))
        size = HEADER.size + num_bytes + CHECKSUM_BYTES
        if not self.is_writing or not self._has_room(size):
            self.counts["dropped"] += 1
            return
        head = _header(number, num_bytes, key)
        new = self.folder / f"{name}.{self._own}-{next(self._numbers)}.new"
        try:
            descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with open(descriptor, "wb", buffering=1 << 20) as file:
                file.writelines((head, *parts, _checksum(head, parts)))
            if is_still():
                new.replace(self.folder / name)
                self.num_bytes += _taken(size)
                self._unscanned += _taken(size)
                self.counts["written_bytes"] += size
            else:
                self.counts["dropped"] += 1
                self._remove(new)
        except OSError as error:
            self._remove(new)
            self._failed(error)

    def begin_to_clear(self) -> None:
        """Lets nothing be read until ``clear`` is done, which another thread does."""
        self._num_clearings += 1

    def clear(self) -> str:
        """Forgets all files of this identity. They are out of reach then; ``tidy`` removes them. Where the
        folder cannot be renamed, nothing of it is read any more, and the reason is returned."""
        try:
            self.folder.rename(f"{self.folder}{GONE}{uuid.uuid4().hex[:8]}")
            self._make()
            self._unscanned = self.quota
        except OSError as error:
            if error.errno != errno.ENOENT:
                self.counts["failed"] += 1
                self.is_reading = self.is_writing = False
                logger.warning(
                    "The files of prefix_cache_dir cannot be cleared, so they are neither read nor written "
                    "until the next start: %s",
                    error,
                )
                return error.strerror or str(error)
            self._failed(error)  # another server has just cleared it
        finally:
            self._num_cleared += 1
        return ""

    def tidy(self, size: int = 0) -> None:
        """Looks through the folder, and removes what was cleared and the oldest files, until the quota has
        room for ``size`` bytes."""
        found = []
        for folder in self.root.glob(FOLDERS):
            if folder.is_symlink():
                continue  # whatever it points to is not ours
            files = _files(folder)
            if GONE in folder.name:
                for *_, path in files:
                    self._remove(path)
                self._remove_folder(folder)
            else:
                found += files
        total = sum(taken for _, taken, _ in found)
        if total + size > self.quota:
            for _, taken, path in sorted(found):
                if total + size <= self.quota - self.quota // PART:
                    break
                self._remove(path)
                total -= taken
        self.num_bytes, self._unscanned = total, 0

    def _has_room(self, size: int) -> bool:
        size = _taken(size)
        if size > self.quota - self.quota // PART:
            return False  # everything else would be removed for it
        if self._unscanned > self.quota // PART or self.num_bytes + size > self.quota:
            try:
                self.tidy(size)
            except OSError as error:
                self._failed(error)
        return self.num_bytes + size <= self.quota

    def _failed(self, error: OSError) -> None:
        """Ends writing, unless another server has just cleared the folder."""
        if error.errno == errno.ENOENT:
            try:
                self._make()
                return
            except OSError as again:
                error = again
        self.counts["failed"] += 1
        if self.is_writing:
            self.is_writing = False
            logger.warning(
                "Nothing is written to prefix_cache_dir any more, until the next start: %s. What is there is "
                "still read.",
                error,
            )

    def _make(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def _remove(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def _remove_folder(self, folder: Path) -> None:
        with suppress(OSError):  # somebody has put something else into it
            folder.rmdir()


def _files(folder: Path) -> list[tuple[int, int, Path]]:
    """Returns times, bytes and paths of the files of ours in a folder. Others may remove some meanwhile."""
    found = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            if OURS.fullmatch(entry.name):
                with suppress(OSError):
                    seen = entry.stat(follow_symlinks=False)
                    found.append((seen.st_mtime_ns, _taken(seen.st_size), Path(entry.path)))
    return found


def _taken(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _header(number: int, num_bytes: int, key: bytes) -> bytes:
    return HEADER.pack(MAGIC, VERSION, number, num_bytes, key)


def _checksum(head: bytes | memoryview, parts: Sequence[memoryview]) -> bytes:
    digest = blake2b(head, digest_size=CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()

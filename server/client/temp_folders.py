"""The temporary folders that hold the worker's sockets, and the removal of those that a killed server left.

A folder belongs to a live process as long as its lock is held, which the kernel ends with the process.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "foretoken-"
LOCK = "lock"
# The kernel's limit for a socket's path is 107 characters; the rest is for the socket's own name.
MAX_PATH_LENGTH = 70


class SocketFolder:
    """A new folder of this process; removed by ``close``, or by the next server's ``sweep``."""

    def __init__(self) -> None:
        if len(os.fsencode(tempfile.gettempdir())) > MAX_PATH_LENGTH:
            raise OSError(f"{tempfile.gettempdir()} is too long a path for sockets; set TMPDIR to another")
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep() -> None:
    """Remove this user's folders whose process is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return False
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # another program's, or not complete yet
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True

"""Watches the weight files that this process has mapped: writing over them changes its answers.

Replacing a file by renaming another one over it does no harm: the mapping keeps the old one. Mappings are
read as Linux lists them; elsewhere nothing is watched.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

# Names of weight files end so; the hub's cache keeps them under names without an ending.
ENDINGS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")
HUB_FOLDER = "/blobs/"
MAPS = Path("/proc/self/maps")


class FileState(NamedTuple):
    """Changes with everything that is written into a file. A rename over it or a new link changes none of
    it."""

    size: int
    modified: int

    @classmethod
    def of(cls, descriptor: int) -> Self:
        found = os.fstat(descriptor)
        return cls(found.st_size, found.st_mtime_ns)


class MappedFiles:
    """Keeps each file open, so that the mapped file is checked, whatever file has its name by now."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, FileState]] = {}

    def watch(self) -> None:
        """Begins to watch the files that are mapped now."""
        for path, inode in mapped_weights():
            with suppress(OSError):  # A file without a name cannot be written over by its name.
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if os.fstat(descriptor).st_ino == inode and path not in self._known:
                    self._known[path] = descriptor, FileState.of(descriptor)
                else:
                    os.close(descriptor)

    def fault(self) -> str:
        """Says what has happened to one of them; empty as long as nothing has."""
        for path, (descriptor, before) in self._known.items():
            now = FileState.of(descriptor)
            if now != before:
                what = "cut off" if now.size < before.size else "written over"
                return (
                    f"{path} was {what} while it was served, so that answers would mix the old and the new "
                    "file. Replace such a file by renaming another one over it."
                )
        return ""


def mapped_weights() -> list[tuple[str, int]]:
    """Returns path and inode of each file of weights that is mapped."""
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:
        return []
    found = {}
    for line in lines:
        _, access, _, _, inode, *rest = line.split(maxsplit=5)
        path = rest[0] if rest else ""
        if "x" not in access and (path.endswith(ENDINGS) or HUB_FOLDER in path):
            found[path] = int(inode)
    return [*found.items()]

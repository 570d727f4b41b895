"""Reads GGUF files, whole or in parts: their metadata, and where their tensors lie.

Both processes read them, the front end without torch. ``gguf``'s own reader takes seconds for a vocabulary of
usual size, as it makes an array of every string; this one takes a tenth of a second.
"""

import math
import re
import struct
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# The file names the types of metadata by these numbers.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
# A header beyond these limits belongs to no model, but to a damaged file. Models have some 50,000 tensors,
# half a million merges and 20 MB of both at most.
MAX_DIMENSIONS, MAX_TENSORS, MAX_ITEMS, MAX_HEADER = 4, 1 << 17, 1 << 22, 1 << 27

# This key counts the parts of a file from 0.
PART_NUMBER = "split.no"
# A part's name ends with its number and the number of parts.
PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)$", re.IGNORECASE)


class GgufError(ValueError):
    """A GGUF file cannot be read or is not supported; the message is for the user."""


class TensorPlace(NamedTuple):
    """Says where a tensor lies. ``shape`` has rows first, ``type`` is ggml's number, and ``offset`` counts
    from the start of ``data``, the mapped file at ``path``."""

    shape: tuple[int, ...]
    type: int
    offset: int
    data: mmap
    path: str


@dataclass(frozen=True)
class GgufFile:
    """Holds the ``metadata`` of the first part, and the tensors of all ``parts``, the mapped files."""

    path: str
    parts: list[mmap]
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorPlace] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))


def is_gguf(path: str) -> bool:
    return path.lower().endswith(SUFFIX)


def read_gguf(path: str) -> GgufFile:
    """Reads everything that precedes the tensors' data, lists and texts included; raises ``GgufError``.

    Any part of a file in parts stands for all of them.
    """
    first, *others = part_names(path)
    file = _Reader(first).read()
    _check_part(file, file, 0)
    for number, name in enumerate(others, 1):
        part = _Reader(name).read()
        _check_part(file, part, number)
        if twice := file.tensors.keys() & part.tensors.keys():
            raise GgufError(f"{path} is damaged: two of its parts have a tensor {min(twice)}")
        file.parts.extend(part.parts)
        file.tensors.update(part.tensors)
    for key, found in (("split.count", len(file.parts)), ("split.tensors.count", len(file.tensors))):
        said = file.metadata.get(key, found)
        if said not in (found, 0):
            raise GgufError(f"{path} is not whole: its {key} is {said}, but {found} are found")
    return file


def _check_part(first: GgufFile, part: GgufFile, number: int) -> None:
    """Raises ``GgufError`` for a part whose metadata contradicts its name."""
    said = part.metadata.get(PART_NUMBER, number)
    if said != number:
        raise GgufError(f"{part.path} is not part {number + 1} of its model: its {PART_NUMBER} is {said}")
    for key in sorted(first.metadata.keys() & part.metadata.keys() - {PART_NUMBER}):
        if part is not first and first.metadata[key] != part.metadata[key]:
            raise GgufError(f"{first.path} and {part.path} are not parts of one model: their {key} differs")


def part_names(path: str) -> list[str]:
    """Returns the paths of all parts in order; only ``path`` where the file is no part."""
    named = PART.search(path)
    if named is None:
        return [path]
    count = int(named[2])
    if not 1 <= int(named[1]) <= count:
        raise GgufError(f"{path} is named as part {int(named[1])} of {count}")
    return [f"{path[: named.start()]}-{number:05d}-of-{named[2]}{named[3]}" for number in range(1, count + 1)]


def _mapped(path: str) -> mmap:
    try:
        with Path(path).expanduser().open("rb") as opened:
            return mmap(opened.fileno(), 0, access=ACCESS_READ)
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise GgufError(f"{path} is empty") from error


class _Reader:
    """Reads the header of one file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.data = _mapped(path)
        self.position = 0
        self.end = min(len(self.data), MAX_HEADER)

    def read(self) -> GgufFile:
        try:
            return self._read()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise GgufError(
                f"{self.path} is cut off or damaged: its header does not end where it should"
            ) from error

    def _read(self) -> GgufFile:
        file, path = GgufFile(self.path, [self.data]), self.path
        if self.data[:4] != MAGIC:
            raise GgufError(f"{path} is not a GGUF file: it does not begin with GGUF")
        self.position = 4
        (version,) = self._unpack("<I")
        if version not in VERSIONS:
            raise GgufError(f"{path} is of GGUF version {version}; versions 2 and 3 (little-endian) are read")
        num_tensors, num_values = self._unpack("<QQ")
        for _ in range(num_values):
            name = self._string()
            (kind,) = self._unpack("<I")
            if name in file.metadata:
                raise GgufError(f"{path} is damaged: it has two values of {name}")
            file.metadata[name] = self._value(kind)
        places = [(self._string(), self._place()) for _ in range(self._number(num_tensors, MAX_TENSORS))]
        alignment = file.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufError(f"{path} is damaged: its alignment is {alignment}")
        start = -(-self.position // alignment) * alignment
        for name, place in places:
            if name in file.tensors:
                raise GgufError(f"{path} is damaged: it has two tensors {name}")
            file.tensors[name] = place._replace(offset=start + place.offset)
        return file

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _string(self) -> str:
        (length,) = LENGTH.unpack_from(self.data, self.position)
        self.position += LENGTH.size
        return self._take(length).decode()

    def _take(self, length: int) -> bytes:
        start, self.position = self.position, self.position + length
        if self.position > self.end:
            raise struct.error
        return self.data[start : self.position]

    def _number(self, found: int, largest: int) -> int:
        if found > largest:
            raise struct.error
        return found

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._unpack("<" + SCALARS[kind])[0]
        if kind != ARRAY:
            raise GgufError(f"{self.path} is damaged: it has metadata of the unknown type {kind}")
        kind, found = self._unpack("<IQ")
        count = self._number(found, MAX_ITEMS)
        if kind in SCALARS:
            return list(self._unpack(f"<{count}{SCALARS[kind]}"))
        if kind == ARRAY:
            raise GgufError(f"{self.path} is damaged: it has metadata of lists of lists")
        return [self._value(kind) for _ in range(count)]

    def _place(self) -> TensorPlace:
        (dimensions,) = self._unpack("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise struct.error
        shape = self._unpack(f"<{dimensions}Q")
        kind, offset = self._unpack("<IQ")
        if math.prod(shape) == 0:
            raise struct.error
        return TensorPlace(tuple(reversed(shape)), kind, offset, self.data, self.path)

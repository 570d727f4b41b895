"""Finds drafts for a model by the names of files and folders that lie next to it.

Nothing is loaded here: passes that are measured at start decide which of them drafts.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from truedraft.engine.formats.gguf_file import PART, is_gguf
from truedraft.engine.hub.repository import DRAFTER, LABEL, is_companion, is_drafter, series_of

# At most this many siblings are tried.
MOST = 4
# Names have numbers of parameters in forms such as 0.6b, 135m, e4b and a3b.
PARAMETERS = re.compile(r"[ae]?(\d+(?:\.\d+)?)([bmt])")
BILLIONS = {"m": 0.001, "b": 1.0, "t": 1000.0}
# These words of names say how a model was made, and not to which family it belongs.
OF_ANY_FAMILY = {
    "it",
    "instruct",
    "chat",
    "base",
    "gguf",
    "ud",
    "hf",
    "bf16",
    "fp8",
    "awq",
    "gptq",
    "int4",
    "int8",
}


@dataclass(frozen=True)
class Sibling:
    """Is a possible draft. ``path`` can be the value of the setting draft; ``num_bytes`` is the size of its
    weights."""

    path: str
    num_bytes: int


@dataclass(frozen=True)
class _Name:
    """Holds the words of a model's name that tell its family, and its parameters in billions if the name has
    them."""

    family: frozenset[str]
    size: float | None
    is_drafter: bool

    @classmethod
    def of(cls, name: str) -> "_Name":
        plain = PART.sub(r"\3", name.rpartition("/")[2]).removesuffix(".gguf")
        text = DRAFTER.sub(" ", LABEL.sub("", plain)).lower()
        words = [word.strip(".") for word in re.split(r"[-_ ]+", text)]
        sizes = [match for word in words if (match := PARAMETERS.fullmatch(word))]
        family = {word for word in words if not PARAMETERS.fullmatch(word)}
        size = float(sizes[0][1]) * BILLIONS[sizes[0][2]] if sizes else None
        return cls(frozenset(family - OF_ANY_FAMILY - {""}), size, is_drafter(plain))

    def may_draft_for(self, target: "_Name") -> bool:
        """Tells whether this is the name of a draft made for the target, or of a smaller model of its
        family."""
        if self.is_drafter and (self.family <= target.family or self.family >= target.family):
            return self.size in (None, target.size) or self._is_smaller(target)
        return self.family == target.family and self._is_smaller(target)

    def _is_smaller(self, target: "_Name") -> bool:
        return self.size is not None and target.size is not None and self.size <= target.size / 2


def siblings(target: str) -> list[Sibling]:
    """Returns the models next to the file or folder ``target`` that may draft for it, the most likely
    first."""
    place = Path(target).expanduser().absolute()
    inside = [entry for entry in _entries(place) if is_drafter(entry.name)] if place.is_dir() else []
    # A folder of the hub's cache lies among other revisions of the same model.
    around = [] if place.parent.name == "snapshots" and place.is_dir() else [*_entries(place.parent)]
    if place.is_dir():  # A drafter that lies among other models' folders must have the model's name.
        around = [entry for entry in around if _Name.of(entry.name).family]
    others = {str(entry): entry for entry in around if entry != place}
    found = [*inside, *(others[path] for path in most_likely(str(place), others))]
    return [Sibling(str(entry), weights_size(entry)) for entry in found]


def most_likely(target: str, names: Iterable[str]) -> list[str]:
    """Returns those of the ``names`` that may belong to drafts for ``target``, the most likely first.

    Names of drafters come before models of the same family, and MTP heads, which were trained with the
    target, before other drafters; then come the names that share most with the target's, and small models.
    """
    wanted = _Name.of(target)
    found = [(name, _Name.of(name)) for name in names]
    fitting = [(name, read) for name, read in found if read.may_draft_for(wanted)]

    def unlikeliness(item: tuple[str, _Name]) -> tuple[bool, bool, int, float]:
        name, read = item
        return not read.is_drafter, "mtp" not in name.lower(), -len(read.family), read.size or 0.0

    return [name for name, _ in sorted(fitting, key=unlikeliness)]


def _entries(folder: Path) -> Iterator[Path]:
    """Yields paths that may be models: GGUF files, the first part of split ones, and folders of
    safetensors."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        part = PART.search(entry.name)
        if is_gguf(entry.name) and entry.is_file():
            if not is_companion(entry.name) and (part is None or int(part[1]) == 1):
                yield entry
        elif entry.is_dir() and (entry / "config.json").is_file():
            yield entry


def weights_size(place: Path) -> int:
    """Returns the bytes of the weights in a folder, or of a GGUF file with its other parts."""
    if place.is_dir():
        return sum(file.stat().st_size for file in place.glob("*.safetensors"))
    series = series_of(place.name)
    parts = [file for file in place.parent.glob("*.gguf") if series_of(file.name) == series]
    return sum(file.stat().st_size for file in parts)

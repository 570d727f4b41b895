"""Decides which files of a repository make the model that a name asks for."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.formats.gguf_file import PART, is_gguf
from truedraft.engine.hub.names import HubName

DEFAULT_QUANT = "Q4_K_M"
# Finds the label of a quantisation inside a file's name, between points, dashes and slashes.
LABEL = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|(?:MX|NV)FP4(?:_MOE)?|BF16|FP?16|FP?32))(?![A-Za-z0-9])",
    re.IGNORECASE,
)
# These GGUF files, or all files in folders of that name, belong to a model and are no models themselves.
COMPANIONS = re.compile(r"(^|[-_./])(mmproj|control-vector)([-_./]|$)", re.IGNORECASE)
# Files with this in their names do so, too, unless they have a quantisation's label: the matrix was used for
# that one.
MATRIX = re.compile(r"(^|[-_.])imatrix([-_.]|$)", re.IGNORECASE)
# Files and repositories with these names have drafts for a model.
DRAFTER = re.compile(r"(^|[-_./])(mtp|eagle3?|dflash|dspark|medusa|assistant|draft)([-_.]|$)", re.IGNORECASE)
# A checkpoint in safetensors needs these text files.
SETTINGS = (".json", ".jinja", ".model", ".txt", ".tiktoken")
# A model that makes vectors has its further modules in folders with these names.
MODULE = re.compile(r"\d+_[A-Za-z]+/(config\.json|model\.safetensors)$")


@dataclass(frozen=True)
class RepoFile:
    name: str
    size: int  # bytes


@dataclass(frozen=True)
class Choice:
    """Lists the files to fetch. ``entry`` is the GGUF file to load, None for a folder of safetensors."""

    files: Sequence[RepoFile]
    entry: str | None
    note: str = ""  # notes for a person about the choice

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Variant:
    """Is one model in GGUF: a file, or the parts of a split one."""

    label: str  # such as Q4_K_M; the file's name where it has no such label
    parts: tuple[RepoFile, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def __str__(self) -> str:
        return f"{self.label} ({shown_size(self.size)})"

    def is_called(self, name: str) -> bool:
        """Tells whether it has this label, or one of its files this name, in any case."""
        files = [part.name.rpartition("/")[2] for part in self.parts]
        names = [self.label, *files, *(file.removesuffix(".gguf") for file in files)]
        return name.lower() in map(str.lower, names)


def choose(
    name: HubName,
    files: Sequence[RepoFile],
    free_bytes: int,
    *,
    allow_pickle: bool = False,
    with_code: bool = False,
) -> Choice:
    """Returns the files to fetch; raises ``ModelLoadError``, which lists the alternatives, where the name
    fits nothing.

    A file that is named is taken. A repository with safetensors is taken as that checkpoint, unless a
    quantisation is named. Of GGUF files the named quantisation is taken, by default Q4_K_M, and the largest
    that fits into ``free_bytes`` where there is no Q4_K_M or it does not fit.
    """
    if name.file is not None:
        return _named_file(name, files)
    if name.folder is not None:
        files = [file for file in files if file.name.startswith(f"{name.folder}/")]
    has_weights = any(_is_weights(file.name, allow_pickle) for file in files)
    if name.quant is None and has_weights:
        return Choice(checkpoint_files(files, allow_pickle=allow_pickle, with_code=with_code), None)
    # A repository of drafters alone is asked for by --draft.
    found = variants(files) or drafters(files)
    if found:
        return _quantisation(name, found, free_bytes)
    where = name.repo if name.folder is None else f"the folder {name.folder} of {name.repo}"
    if name.quant is not None:
        raise ModelLoadError(
            f"{where} has no GGUF files of a model, so no quantisation {name.quant}. {_what(files)}"
        )
    kinds = "no safetensors and" if name.folder is None else "safetensors are taken from the top alone, and"
    raise ModelLoadError(f"{where} has no model: {kinds} no GGUF file of a model. {_what(files)}")


def variants(files: Iterable[RepoFile]) -> list[Variant]:
    """Returns the models among GGUF files, the smallest first; projectors and drafters are left out."""
    return _grouped(file for file in files if not is_companion(file.name) and not is_drafter(file.name))


def _grouped(files: Iterable[RepoFile]) -> list[Variant]:
    parts: dict[str, list[RepoFile]] = {}
    for file in files:
        if is_gguf(file.name):
            parts.setdefault(series_of(file.name), []).append(file)
    found = [
        Variant(_label(each[0].name), tuple(sorted(each, key=lambda file: file.name)))
        for each in parts.values()
    ]
    return sorted(found, key=lambda variant: (variant.size, variant.label))


def is_companion(name: str) -> bool:
    """Tells whether a GGUF file belongs to a model without being one, and without drafting for it."""
    last = name.rpartition("/")[2]
    is_matrix = MATRIX.search(last) is not None and LABEL.search(last) is None
    return is_matrix or COMPANIONS.search(name) is not None


def is_drafter(name: str) -> bool:
    return DRAFTER.search(LABEL.sub("", name)) is not None


def drafters(files: Iterable[RepoFile]) -> list[Variant]:
    """Returns the GGUF files of a repository that draft for its model."""
    return _grouped(file for file in files if is_drafter(file.name) and not is_companion(file.name))


def series_of(name: str) -> str:
    """Returns a GGUF file's name without its number among the parts of a split model: one for all parts."""
    return PART.sub(r"-of-\2\3", name)


def missing_parts(files: Sequence[RepoFile]) -> int:
    """Counts the parts of a split model that are not among its ``files``."""
    part = PART.search(files[0].name)
    return 0 if part is None else max(0, int(part[2]) - len(files))


def checkpoint_files(
    files: Iterable[RepoFile], *, allow_pickle: bool = False, with_code: bool = False
) -> list[RepoFile]:
    """Returns the files of a checkpoint at the top of a repository, and those of modules in their folders."""
    names = {file.name for file in files}
    is_indexed = "model.safetensors.index.json" in names or "model.safetensors" in names
    wanted = []
    for file in files:
        inside = "/" in file.name
        is_setting = MODULE.match(file.name) is not None if inside else file.name.endswith(SETTINGS)
        is_code = with_code and file.name.endswith(".py") and not inside
        is_copy = is_indexed and file.name.startswith("consolidated")
        if is_setting or is_code or (_is_weights(file.name, allow_pickle) and not is_copy):
            wanted.append(file)
    return wanted


def shown_size(num_bytes: float) -> str:
    """Returns a size as hubs show it: in powers of 1000."""
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def _named_file(name: HubName, files: Sequence[RepoFile]) -> Choice:
    assert name.file is not None
    by_name = {file.name: file for file in files}
    if name.file not in by_name:
        raise ModelLoadError(f"{name.repo} has no file {name.file}. {_what(files)}")
    parts = [file for file in files if series_of(file.name) == series_of(str(name.file))]
    parts.sort(key=lambda file: file.name)
    return Choice(parts, parts[0].name)


def _quantisation(name: HubName, found: list[Variant], free_bytes: int) -> Choice:
    wanted = name.quant or DEFAULT_QUANT
    matching = [variant for variant in found if variant.is_called(wanted)]
    if len(matching) > 1:
        names = ", ".join(variant.parts[0].name for variant in matching)
        raise ModelLoadError(f"{name.repo} has several files of {wanted}. Name one: {names}")
    if matching and (name.quant is not None or matching[0].size <= free_bytes):
        return _choice(matching[0])
    if name.quant is not None:
        raise ModelLoadError(
            f"{name.repo} has no quantisation {name.quant}. It has {', '.join(map(str, found))}"
        )
    fitting = [variant for variant in found if variant.size <= free_bytes]
    if not fitting:
        raise ModelLoadError(
            f"No file of {name.repo} fits into the {shown_size(free_bytes)} of free memory; the smallest is "
            f"{found[0]}. To load one all the same, name it: {name.repo}:{found[0].label}"
        )
    why = f"{DEFAULT_QUANT} does not fit into memory" if matching else f"there is no {DEFAULT_QUANT}"
    rest = "" if len(found) == 1 else f", the largest of {len(found)} that fits into memory"
    note = f"{why}; {fitting[-1]} is taken{rest}. To choose: {name.repo}:QUANT"
    return _choice(fitting[-1], note)


def _choice(variant: Variant, note: str = "") -> Choice:
    return Choice(variant.parts, variant.parts[0].name, note)


def _label(name: str) -> str:
    """Returns the label of a file's quantisation; without one, the file's name less the ending that all names
    share."""
    stem = PART.sub(r"\3", name.rpartition("/")[2])
    labels = LABEL.findall(stem)
    return labels[-1].upper() if labels else stem.removesuffix(".gguf")


def _is_weights(name: str, allow_pickle: bool) -> bool:
    if "/" in name or name.startswith("adapter"):
        return False
    return name.endswith(".safetensors") or (allow_pickle and name.endswith(".bin") and "pytorch" in name)


def _what(files: Sequence[RepoFile]) -> str:
    """Lists the contents of a repository, GGUF files by quantisation."""
    found = variants(files)
    if found:
        return f"It has {', '.join(map(str, found))}"
    names = [file.name for file in files]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"It has {shown}" if names else "It is empty"

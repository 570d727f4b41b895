"""Lists the models in the hub's cache on this machine, and removes them."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.hub.names import HubName, hub_name
from truedraft.engine.hub.repository import RepoFile, choose, variants

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, CachedRevisionInfo, HFCacheInfo


@dataclass(frozen=True)
class Stored:
    """Is one model of the cache: a checkpoint, or one quantisation of a repository with GGUF files."""

    name: str  # loads it
    path: str  # folder or GGUF file
    size: int  # bytes
    last_used: float  # seconds since 1970

    @property
    def kind(self) -> str:
        return "GGUF" if self.path.endswith(".gguf") else "safetensors"


def stored_models() -> list[Stored]:
    """Returns the models of the cache, the last used ones first."""
    return sorted(_stored(), key=lambda model: -model.last_used)


def _stored() -> Iterator[Stored]:
    for repository in _repositories():
        for revision in repository.revisions:
            files = _files(revision)
            at = "" if "main" in revision.refs else f"@{next(iter(revision.refs), revision.commit_hash)}"
            listed = [RepoFile(name, file.size_on_disk) for name, file in files.items()]
            for variant in variants(listed):
                parts = [files[part.name] for part in variant.parts]
                name = f"{repository.repo_id}{at}:{variant.label}"
                used = max(part.blob_last_accessed for part in parts)
                yield Stored(name, str(parts[0].file_path), variant.size, used)
            if any(name.endswith((".safetensors", ".bin")) and "/" not in name for name in files):
                size = sum(file.size for file in listed if not file.name.endswith(".gguf"))
                used = max(file.blob_last_accessed for file in files.values())
                yield Stored(f"{repository.repo_id}{at}", str(revision.snapshot_path), size, used)


def remove(name: str) -> int:
    """Removes a model from the cache and returns the bytes that this frees.

    Raises ``ModelLoadError``, which lists the models of the cache, where the name fits nothing.

    A name with a quantisation or a file removes only that; any other name removes the whole repository.
    """
    wanted = hub_name(name)
    if wanted is None:
        raise ModelLoadError(
            f"{name} is a path: remove it with rm. This command removes what pull has fetched"
        )
    repository = _repository(wanted)
    if wanted.quant is None and wanted.file is None:
        strategy = _cache().delete_revisions(*(each.commit_hash for each in repository.revisions))
        strategy.execute()
        return int(strategy.expected_freed_size)
    held = [_files(revision) for revision in repository.revisions]
    everything = {name: RepoFile(name, file.size_on_disk) for files in held for name, file in files.items()}
    chosen = choose(wanted, list(everything.values()), 0)
    for files, part in product(held, chosen.files):
        if part.name in files:
            files[part.name].file_path.unlink()
            files[part.name].blob_path.unlink(missing_ok=True)
    return chosen.size


def _cache() -> "HFCacheInfo":
    from huggingface_hub import constants, scan_cache_dir

    return scan_cache_dir(constants.HF_HUB_CACHE)


def _repositories() -> list["CachedRepoInfo"]:
    from huggingface_hub.errors import CacheNotFound

    try:
        return [repository for repository in _cache().repos if repository.repo_type == "model"]
    except CacheNotFound:
        return []


def _repository(wanted: HubName) -> "CachedRepoInfo":
    found = _repositories()
    for repository in found:
        if repository.repo_id == wanted.repo:
            return repository
    names = ", ".join(sorted(repository.repo_id for repository in found))
    raise ModelLoadError(
        f"{wanted.repo} is not in the cache. " + (f"It has {names}" if names else "The cache is empty")
    )


def _files(revision: "CachedRevisionInfo") -> dict[str, "CachedFileInfo"]:
    """Returns the files of a revision by their paths inside the repository."""
    return {file.file_path.relative_to(revision.snapshot_path).as_posix(): file for file in revision.files}


def shown_age(last_used: float) -> str:
    """Returns how long ago something was, in one unit."""
    seconds = max(0.0, time.time() - last_used)
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"

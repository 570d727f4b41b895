"""Connects an engine's caches with the folder of the setting ``prefix_cache_dir``."""

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import transformers

from truedraft.engine.config import EngineConfig
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.restoring import Restoring
from truedraft.engine.core.window_blocks import WindowedPool
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.memory.cache_files import Background, CacheFiles
from truedraft.engine.memory.prefix_files import VERSION, PrefixFolder
from truedraft.engine.memory.recurrent_state import CHUNK, NUM_RECORDS
from truedraft.engine.models.identity import WHOLE_BYTES, fingerprint, weight_files
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.native.library import load_library

# Publications, ends of texts and snapshots that may wait for the writer. What comes meanwhile is not kept.
MOST_WAITING = 1024
# Seconds that the end of an engine waits for the writer.
CLOSING_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Cached:
    """Is the cache of one model, whose blocks ``pool`` hands out. ``path`` is where its weights are."""

    pool: BlockPool
    runner: ModelRunner
    path: str


def keep_prefixes(config: EngineConfig, core: EngineCore, caches: Sequence[Cached]) -> None:
    """Lets files keep what the caches publish, and the scheduler find it again. The first one is the
    target's; what others hold may depend on the target, too."""
    assert config.prefix_cache_dir is not None
    if core.target.device.type != "cpu" or config.device_map is not None:
        raise ModelLoadError("prefix_cache_dir keeps caches of a CPU alone: leave it out on other devices")
    if core.admission.encoder_decoder is not None:
        raise ModelLoadError(
            "prefix_cache_dir is for models that are a decoder alone: what an encoder makes of a prompt's "
            "beginning depends on its end; leave it out"
        )
    of_target = _identity(config, caches[0])
    root = hashlib.sha256(of_target.encode()).digest()
    folder = PrefixFolder(config.prefix_cache_dir, root, int(config.prefix_cache_disk))
    writer, reader = Background("prefix writer", MOST_WAITING), Background("prefix reader")
    looker = Background("prefix looker")
    for one in caches:
        identity = of_target if one is caches[0] else f"{of_target}\n{_identity(config, one)}"
        kinds = (False, True) if isinstance(one.pool, WindowedPool) else (False,)
        one.pool.keep_in(*(CacheFiles(one.runner.cache, identity, folder, writer, kind) for kind in kinds))
    core.scheduler.restoring = Restoring(reader, looker)
    writer.submit(folder.tidy)
    weakref.finalize(core, _close, writer, reader, looker)


def _close(writer: Background, *others: Background) -> None:
    writer.close(CLOSING_SECONDS)
    for each in others:
        each.close(0)


def _identity(config: EngineConfig, cached: Cached) -> str:
    """Returns what a cache's bytes depend on, besides the texts. It is more than a model's fingerprint says:
    what is written today may be read after a change of any library."""
    config = config.model_copy(update={"target": cached.path})
    files = weight_files(cached.path, config.allow_pickle)
    if not files:
        raise ModelLoadError(
            f"prefix_cache_dir cannot be used: the files of {cached.path}'s weights are not known"
        )
    if config.trust_remote_code:
        files += sorted(Path(cached.path).expanduser().glob("*.py"))
    seen = [(file, file.stat()) for file in files]
    pool = cached.pool
    named = [
        fingerprint(cached.runner.model, config),
        # The fingerprint reads samples of large files.
        *(f"{file.name} {each.st_mtime_ns}" for file, each in seen if each.st_size > WHOLE_BYTES),
        *(hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.suffix == ".py"),
        _versions(),
        *map(repr, cached.runner.model.caches),
        f"{VERSION} {type(pool).__name__} {pool.block_size} {pool.lookahead} {CHUNK} {NUM_RECORDS}",
    ]
    return "\n".join(named)


@cache
def _versions() -> str:
    """Names what computes, down to the bytes of the C kernels."""
    try:
        own = version("truedraft")
    except PackageNotFoundError:
        own = "unknown"
    library = load_library()
    kernels = "none"
    if library is not None:
        try:
            kernels = hashlib.sha256(Path(library._name).read_bytes()).hexdigest()
        except OSError:  # compiled for this process alone
            kernels = library._name
    return f"{own} {torch.__version__} {transformers.__version__} {kernels}"

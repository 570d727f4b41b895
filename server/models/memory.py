"""This module estimates what a model takes in memory, before it is loaded.

Weights are as large as their files, a cache may grow to what the settings allow it. Memory of a GPU is not
known here, only the machine's.
"""

import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from truedraft.engine.config import EngineConfig
from truedraft.engine.formats.gguf_file import is_gguf
from truedraft.engine.hub.folders import WEIGHTS
from truedraft.engine.hub.located import is_a_model
from truedraft.engine.machine.limits import total_memory

# What a worker takes in addition to weights and caches: the interpreter, torch, and what they work in.
WORKER_BYTES = 500 << 20
# What the front end needs for itself and for the requests that are open.
FRONT_END_BYTES = 500 << 20
CPU_CACHE_SHARE = 0.25  # unless the settings say otherwise
SPLIT_FILE = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)


def estimate(configs: Sequence[EngineConfig]) -> int:
    """Returns the bytes that a model may take, with a worker for each of ``configs``. These have paths."""
    return sum(_of_worker(config) for config in configs)


def _of_worker(config: EngineConfig) -> int:
    models = [config.target, config.draft]
    weights = sum(weight_bytes(model) for model in models if model is not None and is_a_model(model))
    return WORKER_BYTES + weights + (_cache_bytes(config) if _is_on_cpu(config) else 0)


def weight_bytes(path: str) -> int:
    """Returns the size of a checkpoint's files with weights; 0 where there are none."""
    place = Path(path).expanduser()
    if is_gguf(path) and not place.is_dir():
        parts = place.parent.glob(SPLIT_FILE.sub("-*-of-*", place.name))
        return sum(part.stat().st_size for part in parts if part.is_file())
    for pattern in WEIGHTS:  # a folder with both kinds is read as safetensors
        if size := sum(file.stat().st_size for file in place.glob(pattern)):
            return size
    return 0


def _cache_bytes(config: EngineConfig) -> int:
    if config.cache_memory is not None:
        return int(config.cache_memory)
    return int((config.cache_memory_share or CPU_CACHE_SHARE) * total_memory())


def _is_on_cpu(config: EngineConfig) -> bool:
    return config.device == "cpu" or (config.device == "auto" and version("torch").endswith("+cpu"))

"""How much memory the caches may take: what the configuration says, or a share of what is free.

Asked once both models are loaded, so that what they take is gone already.
"""

from contextlib import suppress
from pathlib import Path

import torch

from truedraft.engine.config import EngineConfig

# Share of free memory by default. A GPU is ours; on a CPU the rest of the machine needs its memory too.
GPU_SHARE, CPU_SHARE = 0.9, 0.25
MEMORY_FILE = Path("/proc/meminfo")
# A container's limit and use, by version of control groups.
CONTAINER_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def cache_budget(config: EngineConfig, devices: set[torch.device], reserved: int = 0) -> int:
    """Bytes for all caches together. With several ``devices``, as many on each as the fullest has free.

    ``reserved`` bytes are left free for CUDA graphs, unless the configuration names the caches' size.
    """
    if config.cache_memory is not None:
        return config.cache_memory
    free = max(0, min(free_memory(device) for device in devices) * len(devices) - reserved)
    on_cpu = all(device.type == "cpu" for device in devices)
    share = config.cache_memory_share or (CPU_SHARE if on_cpu else GPU_SHARE)
    return int(share * free)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What the allocator holds without using it is free for us.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limits = [limit for limit in (_free_in_machine(), _free_in_container()) if limit is not None]
    return min(limits, default=4 << 30)


def total_memory(device: torch.device) -> int | None:
    """Bytes that ``device`` has, or the container may use of it; None if that cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limits = [_in_machine("MemTotal:")]
    for limit, _ in CONTAINER_FILES:
        with suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(Path(limit).read_text()))
    return min((limit for limit in limits if limit is not None), default=None)


def _free_in_machine() -> int | None:
    """Linux: what can be had without swapping, file caches included."""
    return _in_machine("MemAvailable:")


def _in_machine(name: str) -> int | None:
    if not MEMORY_FILE.exists():
        return None
    for line in MEMORY_FILE.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None


def _free_in_container() -> int | None:
    for limit, used in CONTAINER_FILES:
        try:
            return max(0, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return None

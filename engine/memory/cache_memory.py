"""Decides how much memory caches take: what the configuration says, or a share of the memory that there is.

This happens once both models are loaded. On a GPU, which serves this process alone, the share is of the
memory that is free then. On a CPU it is of the machine's or the container's memory, less what this process
uses: the use by other processes at that minute does not change it.
"""

from typing import NamedTuple

import torch

from truedraft.engine.config import EngineConfig
from truedraft.engine.machine import limits as machine

# These are the default shares. On a CPU the rest of the machine needs its memory, too.
GPU_SHARE, CPU_SHARE = 0.9, 0.25
# Caches on a CPU get at least this much, as far as their share of all memory allows: a model may leave
# nothing.
FLOOR = 256 << 20
# The process's own memory is rounded up to a multiple of this, so that caches are equally large after each
# start.
STEP = 64 << 20
# A cache has one snapshot of states for this many tokens. In addition each sequence of the batch has up to
# this many snapshots, one for every such number of tokens: for the ends of a prompt and of an answer.
TOKENS_PER_SNAPSHOT, ENDS = 1024, 2


class CacheSizes(NamedTuple):
    """Says how many blocks each pool has, and how many slots for states where a model has some."""

    num_blocks: int
    num_state_slots: int


def cache_sizes(
    budget: int, block_bytes: int, state_bytes: int, block_size: int, num_sequences: int, max_blocks: int
) -> CacheSizes:
    """Divides ``budget`` bytes: at most half of it goes to the states of up to ``num_sequences`` that run
    together, and the rest to blocks, ``max_blocks`` at most, and to snapshots for their texts."""
    if not state_bytes:
        return CacheSizes(min(budget // block_bytes, max_blocks) if block_bytes else max_blocks, 0)
    running = min(num_sequences, max(1, budget // 2 // state_bytes))
    rest = budget - running * state_bytes
    if rest < 0:
        return CacheSizes(0, 0)
    # A model of recurrent layers alone stores nothing for single tokens.
    tokens_bytes = TOKENS_PER_SNAPSHOT * block_bytes // block_size
    snapshots = rest // (state_bytes + tokens_bytes)
    num_blocks = (
        min((rest - snapshots * state_bytes) // block_bytes, max_blocks) if block_bytes else max_blocks
    )
    most = ENDS * num_sequences + num_blocks * block_size // TOKENS_PER_SNAPSHOT
    return CacheSizes(num_blocks, running + min(snapshots, most))


def cache_budget(config: EngineConfig, devices: set[torch.device], reserved: int = 0) -> int:
    """Returns the bytes for all caches together, or for those of a rank. With several ``devices`` each gets
    as many as the fullest has free.

    ``reserved`` bytes of a GPU are left free for CUDA graphs and prompts, unless the configuration names the
    caches' size.
    """
    if config.cache_memory is not None:
        return config.cache_memory // config.tensor_parallel_size
    if all(device.type == "cpu" for device in devices):
        return _cpu_budget(config.cache_memory_share or CPU_SHARE) // config.tensor_parallel_size
    free = max(0, min(free_memory(device) for device in devices) * len(devices) - reserved)
    return int((config.cache_memory_share or GPU_SHARE) * free)


def _cpu_budget(share: float) -> int:
    total, own = machine.total_memory(), -(-machine.own_memory() // STEP) * STEP
    return int(max(share * (total - own), min(FLOOR, share * total)))


def free_memory(device: torch.device) -> int:
    """Returns the bytes that can still be allocated on ``device``."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that the allocator holds without using it counts as free.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return machine.free_memory()


def total_memory(device: torch.device) -> int:
    """Returns the bytes that ``device`` has, or that the container may use."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return machine.total_memory()

"""Decides how many threads compute: torch's operations and the kernels have pools of their own."""

import os

import torch

from truedraft.engine.config import EngineConfig
from truedraft.engine.machine import limits as machine
from truedraft.engine.machine.openmp import THREADS_VARIABLE
from truedraft.engine.native.library import load_library


def usual_num_threads() -> int:
    """Returns torch's own choice, which is ``OMP_NUM_THREADS`` if that is set. Without it no more threads
    than cores are returned: where some threads wait for a core, or have slower ones, all wait for them."""
    num_threads = torch.get_num_threads()
    return num_threads if THREADS_VARIABLE in os.environ else min(num_threads, machine.num_cores())


def thread_limit(config: EngineConfig) -> str:
    """Says why threads are fewer than the machine has processors, if nobody has asked for their number."""
    return "" if config.num_threads or THREADS_VARIABLE in os.environ else machine.cpu_limit()


def set_num_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    library = load_library()
    if library is not None:
        library.set_num_threads(num_threads)

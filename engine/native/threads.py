"""How many threads compute: torch's operations and the kernels have pools of their own."""

import torch

from truedraft.engine.native.library import load_library


def set_num_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    library = load_library()
    if library is not None:
        library.set_num_threads(num_threads)

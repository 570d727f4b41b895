"""Says how much of a device there is, and how much one program of it does."""

from functools import lru_cache

import torch

# Numbers of a norm for each warp of a program, up to 8 warps.
NORMED_BY_A_WARP = 256


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns the device's number; a CPU, where only Triton's interpreter runs, counts as a large GPU."""
    return 100 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count

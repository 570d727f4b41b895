"""Says how many multiprocessors a device has, and how many warps a program gets."""

from functools import lru_cache

import torch

# Each warp of a program takes this many numbers of a norm, with up to 8 warps.
NORMED_BY_A_WARP = 256


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns the device's number of multiprocessors; a CPU, on which only Triton's interpreter runs, counts
    as a large GPU."""
    return 100 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count

"""Collects what ``truedraft --version`` says of the engine: torch, the device of ``auto``, the kernels for a
CPU.
"""

import platform

import torch

from truedraft.engine.native.library import kernels_in_words
from truedraft.engine.native.threads import usual_num_threads


def about() -> str:
    """Returns one line for each fact, as name and value."""
    if torch.cuda.is_available():
        device = f"cuda, {torch.cuda.get_device_name()}"
    else:
        device = f"cpu, {platform.machine()}, {usual_num_threads()} threads"
    lines = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
        "kernels": kernels_in_words(),
    }
    return "\n".join(f"{name:11}{value}" for name, value in lines.items())

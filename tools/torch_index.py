"""Print the index of torch's CPU build where this machine should take it from there; otherwise nothing.

python -m tools.torch_index

The default torch for Linux brings several GB of CUDA packages along. A machine without an NVIDIA driver does
without them, if it can reach torch's own index within a few seconds. Needs nothing but Python.
"""

import re
import shutil
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

DOCKERFILE = Path(__file__).parent.parent / "Dockerfile"
# Each tells of a driver: its own file, that of a container with the device, that of Linux on Windows.
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
TIMEOUT_SECONDS = 3


def torch_index() -> str:
    """Returns the address that the Dockerfile has."""
    (address,) = re.findall(r"^ARG TORCH_INDEX=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    return str(address)


def is_reachable(index: str) -> bool:
    """Tells whether it answers for torch in time."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=TIMEOUT_SECONDS):
            return True
    except (OSError, ValueError):
        return False


def has_nvidia_driver(files: Sequence[Path] = DRIVER_FILES) -> bool:
    """Tells whether a GPU could be used here."""
    return any(path.exists() for path in files) or shutil.which("nvidia-smi") is not None


def index_for_this_machine() -> str:
    """Returns the CPU build's index, or nothing where pip should look where it always does."""
    wanted = sys.platform == "linux" and not has_nvidia_driver()
    return torch_index() if wanted and is_reachable(torch_index()) else ""


if __name__ == "__main__":
    print(index_for_this_machine())

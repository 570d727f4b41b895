"""Puts prebuilt kernels into a wheel; called by hatchling while it builds one.

``tools/build_wheels.py`` makes the kernels and names them and the wheel's platform in the environment.
Without that, as in ``pip install .``, the wheel is pure Python, and a compiler makes the kernels at the first
start.
"""

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrebuiltKernels(BuildHookInterface[Any]):
    """Adds the libraries of the folder WHEEL_KERNELS to a wheel for the platform WHEEL_PLATFORM."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = os.environ.get("WHEEL_KERNELS")
        if not folder or version == "editable":
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{os.environ['WHEEL_PLATFORM']}"
        for library in Path(folder).glob("kernels-*.so"):
            build_data["force_include"][str(library)] = f"truedraft/engine/native/{library.name}"

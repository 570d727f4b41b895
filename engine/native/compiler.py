"""Compiles the C files of this folder into one shared library, wherever that is kept."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

from truedraft.engine.native.headers import FOLDER, HEADERS

SOURCES = sorted(FOLDER.glob("*.c"))
# These are the options of -ffast-math, except those that break NaN and infinity, or change how the process
# rounds.
FAST_MATH = ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"]
FAST_MATH += ["-fassociative-math", "-freciprocal-math"]
FLAGS = ["-std=gnu11", "-O3", *FAST_MATH, "-pthread", "-shared", "-fPIC"]
NATIVE = ["-march=native"]
TIMEOUT_SECONDS = 120


def source_text() -> str:
    """Returns everything that is compiled: libraries are named after it."""
    return "\n".join(path.read_text() for path in (*HEADERS, *SOURCES))


def find_compiler() -> str:
    """Returns the C compiler's command; raises ``FileNotFoundError`` where there is none."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc, gcc or clang) is installed")
    return compiler


def recipe(compiler: str) -> str:
    """Returns everything that determines a library, except the processor."""
    version = subprocess.run(
        [*compiler.split(), "--version"], check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    return "\n".join([source_text(), compiler, *FLAGS, version.stdout])


def compile_library(compiler: str, processor: Sequence[str], library: Path) -> None:
    """Compiles each file in a process of its own: they take seconds, and there are several processors."""
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [Path(work) / f"{source.stem}.o" for source in SOURCES]
        list(pool.map(compile_file, repeat(compiler), repeat(processor), SOURCES, objects))
        _run(compiler, processor, *objects, "-o", library, "-lm")


def compile_file(compiler: str, processor: Sequence[str], source: Path, to: Path) -> None:
    _run(compiler, processor, "-c", source, "-o", to)


def _run(compiler: str, processor: Sequence[str], *arguments: str | Path) -> None:
    command = [*compiler.split(), *FLAGS, *processor, f"-I{FOLDER}", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)

"""Compiles the C files of this folder for this processor, once, and loads them.

C files and the machine's compiler instead of a binary: the loops are then made for the vector
instructions that are there. It takes some seconds; the result is kept in the user's cache folder, under a
name that changes with the source, the compiler and the processor. The name has a checksum as well: a file
that was cut off or damaged would end the process when it is loaded, so it is made anew. A folder that others
can write to is not used.

Where compiling fails, the library that ``python -m truedraft.engine.native.library`` has made for any
processor with AVX2 is taken, if there is one: container images have it. Without either the engine runs
through torch's operations.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import repeat
from pathlib import Path

from truedraft.engine.native.headers import FOLDER, HEADERS, declare_functions, fields_of

SOURCES = sorted(FOLDER.glob("*.c"))
# What -ffast-math would allow, but for what breaks NaN and infinity, or changes how the process rounds.
FAST_MATH = ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"]
FAST_MATH += ["-fassociative-math", "-freciprocal-math"]
FLAGS = ["-std=gnu11", "-O3", *FAST_MATH, "-pthread", "-shared", "-fPIC"]
TIMEOUT_SECONDS = 120


def _source() -> str:
    return "\n".join(path.read_text() for path in (*HEADERS, *SOURCES))


# Made when an image is built, on a machine that may have other instructions than the one that serves. Named
# after the source: what was made from another one has other structures.
BASELINE = "x86-64-v3"
BASELINE_FEATURES = {"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
BASELINE_LIBRARY = FOLDER / f"kernels-{BASELINE}-{hashlib.sha256(_source().encode()).hexdigest()[:8]}.so"

logger = logging.getLogger(__name__)

# Structures as the headers declare and explain them.


class Spans(ctypes.Structure):
    _fields_ = fields_of("Spans")


class Layer(ctypes.Structure):
    _fields_ = fields_of("Layer")


class QuantisedPanel(ctypes.Structure):
    _fields_ = fields_of("QuantisedPanel")


class Linear(ctypes.Structure):
    _fields_ = fields_of("Linear")


class DecoderLayer(ctypes.Structure):
    _fields_ = fields_of("DecoderLayer")


class Decoder(ctypes.Structure):
    _fields_ = fields_of("Decoder")


class NewTokens(ctypes.Structure):
    _fields_ = fields_of("NewTokens")


class Processors(ctypes.Structure):
    _fields_ = fields_of("Processors")


class Row(ctypes.Structure):
    _fields_ = fields_of("Row")


class Rounds(ctypes.Structure):
    _fields_ = fields_of("Rounds")


@cache
def load_library() -> ctypes.CDLL | None:
    """The compiled kernels; None, with a line in the log, where that cannot be done."""
    try:
        library = _load_compiled()
    except (OSError, subprocess.SubprocessError) as error:
        if not baseline_runs_here():
            logger.warning("No native kernels, the slower way is taken: %s", _reason(error))
            return None
        logger.warning("Native kernels for %s, not for this very processor: %s", BASELINE, _reason(error))
        library = ctypes.CDLL(str(BASELINE_LIBRARY))
    declare_functions(library)
    return library


def kernels_in_words() -> str:
    """Which of them ``load_library`` finds. Compiles them if that has not been done yet."""
    library = load_library()
    if library is None:
        return "none: install a C compiler for passes in C, which are several times faster"
    if library._name == str(BASELINE_LIBRARY):
        return f"C, prebuilt for {BASELINE}: faster if a C compiler can write to the cache folder"
    return "C, compiled for this processor"


def _load_compiled() -> ctypes.CDLL:
    """Returns the shared library, made now if it is not there; raises ``OSError`` or ``SubprocessError``."""
    compiler, folder = _compiler(), cache_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if (reason := _distrust(folder)) is not None:
        logger.warning("Kernels are not kept in %s, but compiled at every start: %s", folder, reason)
        with tempfile.TemporaryDirectory() as work:
            new = Path(work) / "kernels.so"
            _compile(compiler, "native", new)
            return ctypes.CDLL(str(new))
    return ctypes.CDLL(str(_compiled(compiler, folder)))


def _compiled(compiler: str, folder: Path) -> Path:
    """Returns where the library is in the cache folder, made now if it is not there."""
    key = _key(compiler)
    for made in sorted(folder.glob(f"kernels-{key}-*.so")):
        if made.name == _name(key, made):
            return made
        logger.warning("%s is damaged and compiled anew", made)
        made.unlink(missing_ok=True)
    # Another worker may be doing the same: the last one replaces what is equal.
    with tempfile.TemporaryDirectory(dir=folder) as work:
        new = Path(work) / "kernels.so"
        _compile(compiler, "native", new)
        made = folder / _name(key, new)
        _write_through(new)
        new.replace(made)
        _write_through(folder)
    return made


def _name(key: str, library: Path) -> str:
    """Returns a library's name in the cache, which says for whom it was made, and the checksum of it."""
    return f"kernels-{key}-{hashlib.sha256(library.read_bytes()).hexdigest()[:16]}.so"


def _write_through(path: Path) -> None:
    """Waits until it is on the disk: a new name must not outlive a power cut that its content does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _distrust(folder: Path) -> str | None:
    """Says why what lies in it may come from somebody else, whose code this process would run."""
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to the user with the number {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write to it (chmod go-w)"
    return None


def _compiler() -> str:
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc, gcc or clang) is installed")
    return compiler


def _compile(compiler: str, processor: str, library: Path) -> None:
    """Each file by a compiler of its own: they take seconds, and there are several processors."""
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [Path(work) / f"{source.stem}.o" for source in SOURCES]
        list(pool.map(_compile_file, repeat(compiler), repeat(processor), SOURCES, objects))
        _run(compiler, processor, *objects, "-o", library, "-lm")


def _compile_file(compiler: str, processor: str, source: Path, to: Path) -> None:
    _run(compiler, processor, "-c", source, "-o", to)


def _run(compiler: str, processor: str, *arguments: str | Path) -> None:
    command = [*compiler.split(), *FLAGS, f"-march={processor}", f"-I{FOLDER}", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)


def compile_baseline() -> None:
    """Make the library of ``BASELINE`` beside the sources."""
    _compile(_compiler(), BASELINE, BASELINE_LIBRARY)


def baseline_runs_here() -> bool:
    features = {
        word for line in _processor().splitlines() if line.startswith("flags") for word in line.split()
    }
    return BASELINE_LIBRARY.exists() and features >= BASELINE_FEATURES


def cache_folder() -> Path:
    """By the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "truedraft"


def _key(compiler: str) -> str:
    version = subprocess.run(
        [*compiler.split(), "--version"], check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    parts = [_source(), compiler, *FLAGS, version.stdout, _processor()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What -march=native looks at. A cache folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError) and error.stderr:
        return str(error.stderr.strip().splitlines()[-1])
    return str(error)


if __name__ == "__main__":
    if platform.machine() == "x86_64":
        compile_baseline()
        print(f"Wrote {BASELINE_LIBRARY}")
    else:
        print(f"No baseline library for {platform.machine()}")

"""Loads the C kernels: those compiled for this very processor, once, or else the best ones that are prebuilt.

C files and the machine's compiler instead of a binary: the loops are then made for the vector instructions
that are there. It takes some seconds; the result is kept in the user's cache folder, under a name that
changes with the source, the compiler and the processor. The name has a checksum as well: a file that was cut
off or damaged would end the process when it is loaded, so it is made anew. A folder that others can write to
is not used.

Where compiling fails, a library that wheels and container images bring along is taken ("prebuilt.py").
Without either the engine runs through torch's operations.
"""

import ctypes
import hashlib
import logging
import os
import platform
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from truedraft.engine.native.compiler import NATIVE, compile_library, find_compiler, recipe
from truedraft.engine.native.headers import declare_functions, fields_of
from truedraft.engine.native.prebuilt import best_variant, file_of

logger = logging.getLogger(__name__)

# The headers declare and explain these structures.


class Spans(ctypes.Structure):
    _fields_ = fields_of("Spans")


class Heads(ctypes.Structure):
    _fields_ = fields_of("Heads")


class AdaptedRows(ctypes.Structure):
    _fields_ = fields_of("AdaptedRows")


class LowRank(ctypes.Structure):
    _fields_ = fields_of("LowRank")


class Adapter(ctypes.Structure):
    _fields_ = fields_of("Adapter")


class QuantisedPanel(ctypes.Structure):
    _fields_ = fields_of("QuantisedPanel")


class Linear(ctypes.Structure):
    _fields_ = fields_of("Linear")


class Convolution(ctypes.Structure):
    _fields_ = fields_of("Convolution")


class Recurrence(ctypes.Structure):
    _fields_ = fields_of("Recurrence")


class TokenBranch(ctypes.Structure):
    _fields_ = fields_of("TokenBranch")


class LayerInputs(ctypes.Structure):
    _fields_ = fields_of("LayerInputs")


class DenseAndExperts(ctypes.Structure):
    _fields_ = fields_of("DenseAndExperts")


class Part(ctypes.Structure):
    _fields_ = fields_of("Part")


class Attention(ctypes.Structure):
    _fields_ = fields_of("Attention")


class LatentAttention(ctypes.Structure):
    _fields_ = fields_of("LatentAttention")


class Recurrent(ctypes.Structure):
    _fields_ = fields_of("Recurrent")


class Parallel(ctypes.Structure):
    _fields_ = fields_of("Parallel", Part)


class GatedMlp(ctypes.Structure):
    _fields_ = fields_of("GatedMlp")


class Experts(ctypes.Structure):
    _fields_ = fields_of("Experts")


class DecoderLayer(ctypes.Structure):
    _fields_ = fields_of("DecoderLayer", Part)


class Taps(ctypes.Structure):
    _fields_ = fields_of("Taps")


class Decoder(ctypes.Structure):
    _fields_ = fields_of("Decoder")


class NewTokens(ctypes.Structure):
    _fields_ = fields_of("NewTokens")


class Fusion(ctypes.Structure):
    _fields_ = fields_of("Fusion")


class Row(ctypes.Structure):
    _fields_ = fields_of("Row")


class Rounds(ctypes.Structure):
    _fields_ = fields_of("Rounds")


@cache
def load_library() -> ctypes.CDLL | None:
    """Returns the compiled kernels; None, with a line in the log, where they cannot be had."""
    try:
        library = _load_compiled()
    except (OSError, subprocess.SubprocessError) as error:
        variant = best_variant(_features())
        if variant is None:
            logger.warning(
                "No native kernels, so torch computes the layers, which is slower: %s", _reason(error)
            )
            return None
        logger.info("Native kernels prebuilt for %s: %s", variant.name, _reason(error))
        library = ctypes.CDLL(str(file_of(variant)))
    declare_functions(library)
    return library


def kernels_in_words() -> str:
    """Returns words for the kernels that ``load_library`` finds. Compiles them if that has not been done
    yet."""
    library = load_library()
    if library is None:
        return "none: install a C compiler for passes in C, which are several times faster"
    variant = best_variant(_features())
    if variant is not None and library._name == str(file_of(variant)):
        return f"C, prebuilt for {variant.name}"
    return "C, compiled for this processor"


def _load_compiled() -> ctypes.CDLL:
    """Returns the shared library, made now if it is not there; raises ``OSError`` or ``SubprocessError``."""
    compiler, folder = find_compiler(), cache_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if (reason := _distrust(folder)) is not None:
        logger.warning(
            "The native kernels are compiled at every start, as they are not kept in %s: %s", folder, reason
        )
        with tempfile.TemporaryDirectory() as work:
            new = Path(work) / "kernels.so"
            compile_library(compiler, NATIVE, new)
            return ctypes.CDLL(str(new))
    return ctypes.CDLL(str(_compiled(compiler, folder)))


def _compiled(compiler: str, folder: Path) -> Path:
    """Returns the path of the library in the cache folder, made now if it is not there."""
    key = _key(compiler)
    for made in sorted(folder.glob(f"kernels-{key}-*.so")):
        if made.name == _name(key, made):
            return made
        logger.warning("%s is damaged and compiled anew", made)
        made.unlink(missing_ok=True)
    # Another worker may be doing the same: the last one replaces an equal file.
    with tempfile.TemporaryDirectory(dir=folder) as work:
        new = Path(work) / "kernels.so"
        compile_library(compiler, NATIVE, new)
        made = folder / _name(key, new)
        _write_through(new)
        new.replace(made)
        _write_through(folder)
    return made


def _name(key: str, library: Path) -> str:
    """Returns a library's name in the cache, made of its recipe, its processor and its checksum."""
    return f"kernels-{key}-{hashlib.sha256(library.read_bytes()).hexdigest()[:16]}.so"


def _write_through(path: Path) -> None:
    """Waits until a file is on the disk: a new name must not outlive a power cut that its content does
    not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _distrust(folder: Path) -> str | None:
    """Says why files in the folder may come from somebody else, whose code this process would run."""
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to the user with the number {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write to it (chmod go-w)"
    return None


def cache_folder() -> Path:
    """Returns the folder of the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "truedraft"


def _key(compiler: str) -> str:
    return hashlib.sha256(f"{recipe(compiler)}\n{_processor()}".encode()).hexdigest()[:16]


def _processor() -> str:
    """Returns what -march=native looks at. A cache folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _features() -> frozenset[str]:
    """Returns the features that Linux lists for this processor."""
    lines = (line.partition(":") for line in _processor().splitlines())
    return frozenset(
        word for name, _, words in lines if name.strip() in ("flags", "Features") for word in words.split()
    )


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError) and error.stderr:
        return str(error.stderr.strip().splitlines()[-1])
    return str(error)

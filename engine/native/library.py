"""Compiles the C files of this folder for this processor, once, and loads them.

C files and the machine's compiler instead of a binary: the loops are then made for the vector
instructions that are there. It takes a second; the result is kept in the user's cache folder, under a name
that changes with the source, the compiler and the processor. Where that fails, the library that
``python -m engine.native.library`` has made for any processor with AVX2 is taken, if there is one: container
images have it. Without either the engine runs through torch's operations.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
HEADERS = [FOLDER / name for name in ("arena.h", "blocks.h", "kernels.h", "rounds.h", "vectors.h")]
SOURCES = sorted(FOLDER.glob("*.c"))
# What -ffast-math would allow, but for what breaks NaN and infinity, or changes how the process rounds.
FAST_MATH = ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"]
FAST_MATH += ["-fassociative-math", "-freciprocal-math"]
FLAGS = ["-std=gnu11", "-O3", *FAST_MATH, "-fopenmp", "-shared", "-fPIC"]
TIMEOUT_SECONDS = 120

# Made when an image is built, on a machine that may have other instructions than the one that serves.
BASELINE = "x86-64-v3"
BASELINE_FEATURES = {"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
BASELINE_LIBRARY = FOLDER / f"kernels-{BASELINE}.so"

logger = logging.getLogger(__name__)

Pointer = ctypes.c_void_p
Integer = ctypes.c_int64
Float = ctypes.c_float
Double = ctypes.c_double
Constrain = ctypes.CFUNCTYPE(Integer)


class Spans(ctypes.Structure):
    """As in ``kernels.h``, where the fields of all of these are explained."""

    _fields_ = (
        *((name, Integer) for name in ("num_spans", "num_tokens", "block_size", "max_queries")),
        *((name, Pointer) for name in ("slots", "first_token", "num_stored", "first_block", "blocks")),
        *((name, Pointer) for name in ("angle", "cos", "sin")),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Integer) for name in ("num_heads", "num_kv_heads", "head_size", "window")),
        *((name, Float) for name in ("scaling", "norm_eps")),
        *((name, Pointer) for name in ("norm_weight", "keys", "values")),
    )


class QuantisedPanel(ctypes.Structure):
    _fields_ = (("data", Pointer), ("type", Integer))


class Linear(ctypes.Structure):
    _fields_ = (
        *((name, Integer) for name in ("in_features", "out_features", "is_half", "is_quantised")),
        ("weights", Pointer),
        ("scale", Float),
        ("bias", Pointer),
    )


class DecoderLayer(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("qkv", "output", "gate_up", "down", "attention")),
        *((name, Pointer) for name in ("input_norm", "mlp_norm")),
        *((name, Float) for name in ("input_eps", "mlp_eps")),
    )


class Decoder(ctypes.Structure):
    _fields_ = (
        *((name, Integer) for name in ("num_layers", "hidden_size", "block_size", "embedding_type")),
        *((name, Pointer) for name in ("layers", "embeddings", "norm", "head", "cos", "sin")),
        ("norm_eps", Float),
    )


class NewTokens(ctypes.Structure):
    _fields_ = (
        ("num_spans", Integer),
        *((name, Pointer) for name in ("num_tokens", "num_stored", "num_logits", "first_block")),
        *((name, Pointer) for name in ("token_ids", "blocks")),
    )


class Processors(ctypes.Structure):
    _fields_ = tuple((name, Pointer) for name in ("temperature", "top_k", "top_p", "min_p"))


class Row(ctypes.Structure):
    """As in ``rounds.h``, as is the next one."""

    _fields_ = (
        *((name, Integer) for name in ("num_tokens", "num_draft_computed", "num_distinct", "num_counted")),
        ("num_draft_tokens", Integer),
        ("draft_ids", Pointer),
        *((name, Integer) for name in ("num_blocks", "num_draft_blocks")),
        *((name, Pointer) for name in ("blocks", "draft_blocks")),
        *((name, Integer) for name in ("num_masked", "mask_words")),
        *((name, Pointer) for name in ("mask", "logits", "token_ids")),
        *((name, Integer) for name in ("max_num_tokens", "min_num_tokens", "num_stops")),
        ("stop_ids", Pointer),
        *((name, Integer) for name in ("rule", "seed", "top_k")),
        *((name, Float) for name in ("temperature", "top_p", "min_p")),
        *((name, Float) for name in ("repetition", "frequency", "presence")),
        *((name, Pointer) for name in ("distinct_ids", "counts")),
        ("num_biases", Integer),
        *((name, Pointer) for name in ("bias_ids", "biases")),
    )


class Rounds(ctypes.Structure):
    _fields_ = (
        *((name, Integer) for name in ("num_rows", "num_rounds", "max_drafts", "max_draft_len")),
        ("num_threads", Integer),
        ("seconds", Double),
        ("rows", Pointer),
        ("constrain", Constrain),
        *((name, Pointer) for name in ("num_drafted", "num_accepted", "phase_seconds")),
    )


# In the order of sizes.c.
STRUCTS = (Spans, Layer, QuantisedPanel, Linear, DecoderLayer, Decoder, NewTokens, Processors, Row, Rounds)


@cache
def load_library() -> ctypes.CDLL | None:
    """The compiled kernels; None, with a line in the log, where that cannot be done."""
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        if not baseline_runs_here():
            logger.warning("No native kernels, the slower way is taken: %s", _reason(error))
            return None
        logger.warning("Native kernels for %s, not for this very processor: %s", BASELINE, _reason(error))
        library = ctypes.CDLL(str(BASELINE_LIBRARY))
    if not _same_sizes(library):
        logger.warning("No native kernels, the slower way is taken: their structures differ from library.py")
        return None
    library.rms_norm.argtypes = [Pointer, Pointer, Pointer, Integer, Integer, Float]
    library.gated_silu.argtypes = [Pointer, Pointer, Integer, Integer]
    library.attend.argtypes = [ctypes.POINTER(Spans), ctypes.POINTER(Layer), Pointer, Pointer]
    library.multiply.argtypes = [ctypes.POINTER(Linear), Pointer, Pointer, Pointer, Integer]
    library.packed_bytes.argtypes = [Integer, Integer]
    library.pack_panels.argtypes = [Integer, Pointer, Pointer, Pointer, Integer, Integer]
    library.dequantise_rows.argtypes = [Integer, Pointer, Pointer, Pointer, Integer, Integer]
    library.decode.argtypes = [ctypes.POINTER(Decoder), ctypes.POINTER(NewTokens), Pointer]
    library.run_rounds.argtypes = [Pointer, Pointer, ctypes.POINTER(Rounds)]
    library.process.argtypes = [Pointer, Pointer, ctypes.POINTER(Processors), Pointer, *[Integer] * 4]
    library.gumbel_argmax.argtypes = [Pointer, Pointer, Pointer, Pointer, *[Integer] * 5]
    library.noise_uniforms.argtypes = [Pointer, Integer, Integer, Integer]
    library.uniform.argtypes = [Pointer, Pointer, Pointer, Integer, Integer]
    library.inverse_cdf.argtypes = [Pointer, Pointer, Pointer, *[Integer] * 3]
    library.draw_next.argtypes = [*[Pointer] * 7, *[Integer] * 4]
    of_layers = library.rms_norm, library.gated_silu, library.attend, library.multiply
    of_blocks = library.pack_panels, library.dequantise_rows
    of_draws = library.process, library.gumbel_argmax, library.noise_uniforms, library.uniform
    of_choices = library.inverse_cdf, library.draw_next
    for function in (*of_layers, *of_blocks, *of_draws, *of_choices):
        function.restype = None
    library.argmax.argtypes = [Pointer, Integer]
    for function in (
        library.panel_size,
        library.packed_bytes,
        library.decode,
        library.run_rounds,
        library.argmax,
    ):
        function.restype = Integer
    return library


def kernels_in_words() -> str:
    """Which of them ``load_library`` finds. Compiles them if that has not been done yet."""
    library = load_library()
    if library is None:
        return "none: install a C compiler for passes in C, which are several times faster"
    if library._name == str(BASELINE_LIBRARY):
        return f"C, prebuilt for {BASELINE}: faster if a C compiler can write to the cache folder"
    return "C, compiled for this processor"


def _same_sizes(library: ctypes.CDLL) -> bool:
    library.struct_size.restype = Integer
    library.struct_size.argtypes = [Integer]
    return all(library.struct_size(index) == ctypes.sizeof(struct) for index, struct in enumerate(STRUCTS))


def _compiled() -> Path:
    """The shared library, made now if it is not there. ``OSError`` or ``SubprocessError``."""
    compiler = _compiler()
    made = cache_folder() / f"kernels-{_key(compiler)}.so"
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    # Another worker may be doing the same: the last one replaces what is equal.
    with tempfile.TemporaryDirectory(dir=made.parent) as work:
        new = Path(work) / made.name
        _compile(compiler, "native", new)
        new.replace(made)
    return made


def _compiler() -> str:
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc, gcc or clang) is installed")
    return compiler


def _compile(compiler: str, processor: str, library: Path) -> None:
    sources = map(str, SOURCES)
    flags = [*FLAGS, f"-march={processor}", f"-I{FOLDER}"]
    command = [*compiler.split(), *flags, *sources, "-o", str(library), "-lm"]
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
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken"


def _key(compiler: str) -> str:
    version = subprocess.run(
        [*compiler.split(), "--version"], check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    code = [path.read_text() for path in (*HEADERS, *SOURCES)]
    parts = [*code, compiler, *FLAGS, version.stdout, _processor()]
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

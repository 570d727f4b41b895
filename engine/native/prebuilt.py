"""Names the libraries that wheels and container images contain, one for each kind of processor.

They are for machines without a C compiler; ``best_variant`` finds the best one for this processor.

    python -m truedraft.engine.native.prebuilt [FOLDER [MACHINE]]

makes those of a machine (this one: x86_64 or aarch64) in a folder (this one). For another machine than this
one it takes Debian's cross compiler.
"""

import hashlib
import platform
import sys
from pathlib import Path
from typing import NamedTuple

from truedraft.engine.native.compiler import compile_library, find_compiler, source_text
from truedraft.engine.native.headers import FOLDER


class Variant(NamedTuple):
    """Describes a kind of processor: its name for compilers, and the features that Linux lists in
    /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]


V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
V3 = V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
V4 = V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
ARMV8 = frozenset({"asimd", "fp"})

# The best comes first.
VARIANTS = {
    "x86_64": [
        Variant(
            "x86-64-v4-vnni-bf16",
            ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
            V4 | {"avx512_vnni", "avx512_bf16"},
        ),
        Variant("x86-64-v4", ("-march=x86-64-v4",), V4),
        Variant("x86-64-v3", ("-march=x86-64-v3",), V3),
        Variant("x86-64-v2", ("-march=x86-64-v2",), V2),
    ],
    "aarch64": [
        Variant(
            "armv8.2-dotprod",
            ("-march=armv8.2-a+dotprod",),
            ARMV8 | {"asimddp", "asimdrdm", "atomics", "crc32"},
        ),
        Variant("armv8", ("-march=armv8-a",), ARMV8),
    ],
}


def file_of(variant: Variant, folder: Path = FOLDER) -> Path:
    """Returns its library's path, named after the source: another source has other structures."""
    source = hashlib.sha256(source_text().encode()).hexdigest()[:8]
    return folder / f"kernels-{variant.name}-{source}.so"


def best_variant(features: frozenset[str], folder: Path = FOLDER) -> Variant | None:
    """Returns the first variant that exists and that a processor with these features can execute."""
    variants = VARIANTS.get(platform.machine(), [])
    return next((one for one in variants if one.features <= features and file_of(one, folder).exists()), None)


def compiler_for(machine: str) -> str:
    """Returns the command that compiles for the machine here."""
    return find_compiler() if machine == platform.machine() else f"{machine}-linux-gnu-gcc"


def compile_variants(folder: Path, machine: str) -> list[Path]:
    """Makes all libraries of a machine; raises ``OSError`` or ``SubprocessError`` where it cannot."""
    libraries = []
    for variant in VARIANTS[machine]:
        libraries.append(file_of(variant, folder))
        compile_library(compiler_for(machine), variant.flags, libraries[-1])
    return libraries


if __name__ == "__main__":
    machine = sys.argv[2] if len(sys.argv) > 2 else platform.machine()
    if machine in VARIANTS:
        for made in compile_variants(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, machine):
            print(f"Wrote {made}")
    else:
        print(f"No kernels are prebuilt for {machine}")

"""Build the sdist and one wheel per machine with the C kernels inside.

python -m tools.build_wheels [--outdir dist]      (in an environment with build: make wheels)

Kernels are compiled for each kind of processor in "engine/native/prebuilt.py": by this machine's compiler,
and by Debian's cross compiler for the other machine, which is left out where that is not installed. A wheel
is named after the oldest C library that has all functions of the kernels; they need no other library, so the
platform is "manylinux". Without any compiler one wheel is built for all machines, in pure Python.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from truedraft.engine.native import compiler
from truedraft.engine.native.prebuilt import VARIANTS, compile_variants, compiler_for

ROOT = Path(__file__).parent.parent
compiler.TIMEOUT_SECONDS = 3600  # an engine would go on without its kernels, a wheel would not


def platform_tag(libraries: Iterable[Path], machine: str) -> str:
    """Returns manylinux's name for the newest version of glibc that one of them asks for."""
    versions = {
        int(minor)
        for library in libraries
        for minor in re.findall(rb"\0GLIBC_2\.(\d+)(?=[.\d]*\0)", library.read_bytes())
    }
    return f"manylinux_2_{max(versions)}_{machine}"


def has_compiler(machine: str) -> bool:
    """Tells whether kernels for it can be compiled here."""
    try:
        return shutil.which(compiler_for(machine).split()[0]) is not None
    except FileNotFoundError:
        return False


def build(outdir: Path, kind: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "build", kind, "--outdir", str(outdir), str(ROOT)]
    subprocess.run(command, check=True, env=os.environ | environment, stdout=subprocess.DEVNULL)


def build_all(outdir: Path) -> None:
    """Makes the sdist and the wheels, and says what was left out."""
    build(outdir, "--sdist", {})
    machines = [machine for machine in VARIANTS if has_compiler(machine)]
    for machine in machines:
        with tempfile.TemporaryDirectory() as kernels:
            tag = platform_tag(compile_variants(Path(kernels), machine), machine)
            build(outdir, "--wheel", {"WHEEL_KERNELS": kernels, "WHEEL_PLATFORM": tag})
    for machine in VARIANTS.keys() - machines:
        print(f"No wheel with kernels for {machine}: {machine}-linux-gnu-gcc is not installed")
    if not machines:
        build(outdir, "--wheel", {})
    for package in sorted(outdir.iterdir()):
        print(f"{package.name}: {package.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist")
    build_all(parser.parse_args().outdir)

"""Products with quantised weights on 64-bit Arm, emulated: the dot-product instructions give plain C's bits.

Needs Debian's gcc-aarch64-linux-gnu and qemu-user. An emulator proves numbers, not speed.
"""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.gguf_blocks import dequantised, random_blocks, rounded_inputs
from truedraft.engine.native.headers import FOLDER
from truedraft.engine.native.library import FLAGS
from truedraft.engine.native.quantised import TYPES

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
MISSING = [program for program in (COMPILER, EMULATOR) if shutil.which(program) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

IN_FEATURES, OUT_FEATURES, ROWS = 512, 40, 9
PROCESSORS = {"plain C": "armv8-a", "dot product": "armv8.2-a+dotprod"}
PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include "kernels.h"

/* Type, outputs, inputs, most rows; standard input has blocks, then x. Writes products of 1, 2, ... rows. */
int main(int argc, char **argv) {
    if (argc != 5) return 1;
    const int64_t type = atoi(argv[1]), width = atoi(argv[2]), in = atoi(argv[3]), most = atoi(argv[4]);
    const int64_t bytes = packed_bytes(type, in), panels = (width + 31) / 32;
    uint8_t *blocks = malloc(width * row_bytes(type, in)), *packed = calloc(panels, bytes);
    float *x = malloc(most * in * sizeof(float)), *out = malloc(most * width * sizeof(float));
    int64_t *order = malloc(width * sizeof(int64_t));
    QuantisedPanel *panel = malloc(panels * sizeof(QuantisedPanel));
    if (fread(blocks, row_bytes(type, in), width, stdin) != (size_t)width) return 1;
    if (fread(x, in * sizeof(float), most, stdin) != (size_t)most) return 1;
    for (int64_t i = 0; i < width; i++) order[i] = i;
    pack_panels(type, packed, blocks, order, width, in);
    for (int64_t i = 0; i < panels; i++) panel[i] = (QuantisedPanel){packed + i * bytes, type};
    const Linear linear = {.in_features = in, .out_features = width, .type = QUANTISED, .weights = panel};
    for (int64_t rows = 1; rows <= most; rows++) {
        multiply_quantised(&linear, out, x, NULL, rows);
        fwrite(out, width * sizeof(float), rows, stdout);
    }
#ifdef __ARM_FEATURE_DOTPROD
    fputs("dot product", stderr);
#else
    fputs("plain C", stderr);
#endif
}
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("arm")
    (folder / "main.c").write_text(PROGRAM)
    sources = [str(FOLDER / "quantised.c"), str(FOLDER / "blocks.c"), str(folder / "main.c")]
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    made = {}
    for name, processor in PROCESSORS.items():
        made[name] = folder / processor
        command = [COMPILER, *flags, f"-march={processor}", f"-I{FOLDER}", "-static", *sources]
        subprocess.run([*command, "-o", str(made[name]), "-lm"], check=True, capture_output=True)
    return made


def products(program: Path, name: str, kind: str, content: bytes) -> list[npt.NDArray[np.float32]]:
    """Returns the products of 1, 2, ... rows."""
    command = [EMULATOR, str(program), *map(str, (TYPES[name], OUT_FEATURES, IN_FEATURES, ROWS))]
    done = subprocess.run(command, input=content, capture_output=True, check=True)
    assert done.stderr.decode() == kind
    numbers = np.frombuffer(done.stdout, np.float32).reshape(-1, OUT_FEATURES)
    ends = np.cumsum(range(1, ROWS + 1))
    return np.split(numbers, ends[:-1])


@pytest.mark.parametrize("name", TYPES)
def test_dot_products_are_plain_cs_to_the_bit(name: str, programs: dict[str, Path]) -> None:
    blocks = random_blocks(name, OUT_FEATURES, IN_FEATURES, seed=1)
    x = torch.randn(ROWS, IN_FEATURES, generator=torch.Generator().manual_seed(3)).numpy()
    x *= np.logspace(-3, 2, IN_FEATURES, dtype=np.float32)
    content = blocks.data.tobytes() + x.tobytes()
    plain, dots = (products(program, name, kind, content) for kind, program in programs.items())
    for rows, (one, other) in enumerate(zip(plain, dots, strict=True), 1):
        assert np.array_equal(one, other)
        assert np.array_equal(one, plain[-1][:rows])  # however many rows there are
    weights, rounded = dequantised(blocks).astype(np.float64), rounded_inputs(x)
    assert np.all(np.abs(plain[-1] - rounded @ weights.T) <= 1e-6 * np.abs(rounded) @ np.abs(weights).T)

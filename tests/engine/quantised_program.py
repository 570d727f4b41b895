"""Products with quantised weights by a program of their own, for processors other than this one."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tests.gguf_blocks import dequantised, random_blocks, rounded_inputs
from truedraft.engine.layers.quantised_blocks import TYPES
from truedraft.engine.native.compiler import FLAGS
from truedraft.engine.native.headers import FOLDER

IN_FEATURES, OUT_FEATURES, ROWS = 512, 40, 9
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
    const Linear linear = {
        .in_features = in, .out_features = width, .type = QUANTISED, .weights = panel, .scale = 1};
    for (int64_t rows = 1; rows <= most; rows++) {
        multiply_quantised(&linear, out, x, NULL, rows);
        fwrite(out, width * sizeof(float), rows, stdout);
    }
#if defined(__ARM_FEATURE_DOTPROD) || defined(__AVX512VNNI__)
    fputs("dot product", stderr);
#else
    fputs("none", stderr);
#endif
}
"""


class Program(NamedTuple):
    """What executes it, and whether it was compiled for a processor with dot-product instructions."""

    command: tuple[str, ...]
    has_dot_products: bool


def compile_program(compiler: str, processor: Sequence[str], has_dot_products: bool, made: Path) -> Program:
    """Compiles it for a processor; ``made`` is where it goes."""
    main = made.with_name(f"{made.name}.c")
    main.write_text(PROGRAM)
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    sources = [
        *(str(FOLDER / name) for name in ("quantised.c", "quantised_blocks.c", "threads.c")),
        str(main),
    ]
    command = [
        *compiler.split(),
        *flags,
        *processor,
        f"-I{FOLDER}",
        "-static",
        *sources,
        "-o",
        str(made),
        "-lm",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return Program((str(made),), has_dot_products)


def products(program: Program, name: str, content: bytes) -> list[npt.NDArray[np.float32]]:
    """Returns those of 1, 2, ... rows."""
    command = [*program.command, *map(str, (TYPES[name], OUT_FEATURES, IN_FEATURES, ROWS))]
    done = subprocess.run(command, input=content, capture_output=True, check=True)
    assert done.stderr.decode() == ("dot product" if program.has_dot_products else "none")
    numbers = np.frombuffer(done.stdout, np.float32).reshape(-1, OUT_FEATURES)
    return np.split(numbers, np.cumsum(range(1, ROWS + 1))[:-1])


def all_products_are_equal_to_the_bit(name: str, programs: Sequence[Program]) -> None:
    """Fails where two programs differ, where rows depend on each other, and where products are wrong."""
    blocks = random_blocks(name, OUT_FEATURES, IN_FEATURES, seed=1)
    x = torch.randn(ROWS, IN_FEATURES, generator=torch.Generator().manual_seed(3)).numpy()
    x *= np.logspace(-3, 2, IN_FEATURES, dtype=np.float32)
    content = blocks.data.tobytes() + x.tobytes()
    plain, *others = (products(program, name, content) for program in programs)
    for other in others:
        for rows, (one, two) in enumerate(zip(plain, other, strict=True), 1):
            assert np.array_equal(one, two)
            assert np.array_equal(one, plain[-1][:rows])
    weights, rounded = dequantised(blocks).astype(np.float64), rounded_inputs(x)
    assert np.all(np.abs(plain[-1] - rounded @ weights.T) <= 1e-6 * np.abs(rounded) @ np.abs(weights).T)

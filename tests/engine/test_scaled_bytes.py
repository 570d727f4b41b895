"""Linear layers in C of bytes with scales: the bits of the same weights in float32."""

import shutil
import subprocess
from ctypes import CDLL
from pathlib import Path

import pytest
import torch

from truedraft.engine.layers.weight import FP8, ScaledBytes, Weight
from truedraft.engine.memory.pointers import PointerError
from truedraft.engine.native import library
from truedraft.engine.native.compiler import FLAGS
from truedraft.engine.native.headers import FOLDER
from truedraft.engine.native.linear import NativeLinear
from truedraft.engine.native.linears import NativeLinears
from truedraft.engine.native.prebuilt import VARIANTS, Variant
from truedraft.engine.native.scaled_bytes import BytesLinear

ROWS = (1, 2, 5, 11, 12, 13, 30)
# Writes LANES numbers at a time, of all bytes in either type.
PROGRAM = r"""
#include <stdio.h>
#include "vectors.h"

int main(void) {
    uint8_t bytes[256];
    for (int i = 0; i < 256; i++) bytes[i] = (uint8_t)i;
    for (int is_whole = 0; is_whole < 2; is_whole++)
        for (int i = 0; i < 256; i += LANES) {
            const vec wide = widen_eight(bytes + i, is_whole);
            fwrite(&wide, sizeof(float), LANES, stdout);
        }
}
"""


@pytest.fixture(scope="module")
def kernels() -> CDLL:
    found = library.load_library()
    if found is None:
        pytest.skip("no C compiler")
    return found


def drawn(kind: torch.dtype, rows: int, columns: int, group: int, seed: int = 1) -> ScaledBytes:
    """Returns a matrix with all numbers that there are, if it is large enough."""
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    if kind == FP8:
        stored[stored & 0x7F == 0x7F] = 1  # which are no numbers
    scales = (torch.rand(rows, -(-columns // group), generator=generator) - 0.3) * 1e-2
    return ScaledBytes(stored.view(kind), scales, group)


@pytest.mark.parametrize("kind", [FP8, torch.int8])
@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(70, 130, 128), (45, 37, 10), (33, 48, 48), (3, 5, 1)]
)
def test_bits_are_those_of_float32_weights(
    kind: torch.dtype, rows: int, columns: int, group: int, kernels: CDLL
) -> None:
    """Other layers are stacked on it, and rows are computed alone, together and by two threads."""
    parts = [drawn(kind, rows, columns, group), drawn(kind, 20, columns, group, seed=2)]
    bias = torch.randn(rows + 20, generator=torch.Generator().manual_seed(3))
    scaled = BytesLinear(kernels, parts, bias, 1.5)
    exact = NativeLinear(kernels, [part.dense() for part in parts], bias, None, multiplier=1.5)
    x = torch.randn(ROWS[-1], columns, generator=torch.Generator().manual_seed(4))
    residual = bias.expand(len(x), -1) * 3
    before = kernels.get_num_threads()
    try:
        for threads in (1, 2):
            kernels.set_num_threads(threads)
            for number in ROWS:
                assert torch.equal(scaled(x[:number]), exact(x[:number]))
                found = scaled.add_to(residual[:number], x[:number])
                assert torch.equal(found, exact.add_to(residual[:number], x[:number]))
    finally:
        kernels.set_num_threads(before)


def test_what_kernels_cannot_take_becomes_float32(kernels: CDLL) -> None:
    whole, half = drawn(FP8, 32, 64, 64), drawn(FP8, 32, 64, 32)
    no_number = ScaledBytes(torch.full((32, 64), torch.nan).to(FP8), whole.scales, 64)
    assert not no_number.is_finite
    assert not ScaledBytes(whole.values, whole.scales * 1e38, 64).is_finite
    for parts in ([whole, half], [no_number], [ScaledBytes(whole.values, whole.scales, 32)]):
        with pytest.raises(PointerError):
            BytesLinear(kernels, parts, None)
    weights = [Weight("drawn", (32, 64), part.dense, scaled_bytes=part) for part in (whole, half)]
    assert type(NativeLinears(kernels, compact=True).make(weights[:1], None)) is BytesLinear
    assert type(NativeLinears(kernels, compact=True, bf16=True).make(weights[:1], None)) is NativeLinear
    joined = NativeLinears(kernels, compact=True).make(weights, None)
    assert joined.dtype == torch.float32
    x = torch.ones(2, 64)
    expected = torch.cat([x @ part.dense().T for part in (whole, half)], dim=1)
    torch.testing.assert_close(joined(x), expected)


def test_scales_of_other_inputs_are_noticed(kernels: CDLL) -> None:
    part = drawn(FP8, 40, 64, 16)
    exact = NativeLinear(kernels, [part.dense()], None, None)
    wrong = BytesLinear(kernels, [ScaledBytes(part.values, part.scales.roll(1, 1), 16)], None)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(4))
    assert not torch.allclose(wrong(x), exact(x), rtol=1e-2)


@pytest.mark.parametrize(
    "variant", [*VARIANTS["x86_64"][1:], VARIANTS["aarch64"][-1]], ids=lambda each: each.name
)
def test_every_byte_has_its_value_on_other_processors(variant: Variant, tmp_path: Path) -> None:
    is_arm = variant in VARIANTS["aarch64"]
    compiler, emulator = ("aarch64-linux-gnu-gcc", ["qemu-aarch64"]) if is_arm else ("gcc", [])
    if not all(map(shutil.which, (compiler, *emulator))):
        pytest.skip("not installed")
    source, made = tmp_path / "bytes.c", tmp_path / "bytes"
    source.write_text(PROGRAM)
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    command = [
        compiler,
        *flags,
        *variant.flags,
        f"-I{FOLDER}",
        "-static",
        str(source),
        "-o",
        str(made),
        "-lm",
    ]
    subprocess.run(command, check=True, capture_output=True)
    run = subprocess.run([*emulator, str(made)], capture_output=True, check=False)
    if run.returncode < 0:
        pytest.skip("this processor lacks its instructions")
    found = torch.frombuffer(bytearray(run.stdout), dtype=torch.float32).view(2, 256)
    stored = torch.arange(256, dtype=torch.uint8)
    floats = stored.view(FP8).float() / 256
    assert torch.equal(found[0][floats.isfinite()], floats[floats.isfinite()])
    assert torch.equal(found[1], stored.view(torch.int8).float())

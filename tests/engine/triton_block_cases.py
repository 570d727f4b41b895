"""Products with quantised weights in Triton's interpreter. ``test_blocks_on_a_device`` runs it in a process
of its own: TRITON_INTERPRET must be set before triton is imported.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from tests.engine import block_gates
from tests.engine.triton_bugs import planted_in
from truedraft.engine.cuda import quantised_kernels as kernels
from truedraft.engine.cuda.blocks import KINDS
from truedraft.engine.cuda.quantised import is_right
from truedraft.engine.layers.quantised_blocks import TYPES
from truedraft.engine.layers.weight import ScaledRows

assert os.environ["TRITON_INTERPRET"] == "1"

CPU = torch.device("cpu")
SERVED = [name for name, number in TYPES.items() if number in KINDS]
# Each is looked for in a type that comes to its line of the kernel.
BUGS = {
    "the second block of a byte is the first": ("block % LOW * LOW_BITS", "0", "Q4_0"),
    "high bits are those of the next block": ("block % HIGH * HIGH_BITS", "(block + 1) % HIGH", "Q5_0"),
    "all tiles have the first one's scales": (
        "(tile * num_blocks + block) * FIELDS",
        "block * FIELDS",
        "Q4_1",
    ),
    "what eight blocks share belongs to four": (
        "block // BLOCKS_OF_SUPER",
        "block // 4 % num_supers",
        "Q4_K",
    ),
    "scales have no sign": ("one = scale * first.to(tl.int8, bitcast=True)", "one = scale * first", "Q6_K"),
    "levels are those of the other half": ("codes < 8", "codes >= 8", "IQ4_NL"),
    "one scale has no sign": ("(scale * first.to(tl.int8, bitcast=True)", "(scale * first", "IQ4_XS"),
    "minima are scales": ("(both >> 4)", "(both & 15)", "Q2_K"),
    "a power is twice as large": ("(power - 1) << 23", "power << 23", "MXFP4"),
    "the last inputs are left out": ("num_units = tl.cdiv(num_blocks,", "num_units = (num_blocks //", "Q8_0"),
    "shares overlap": ("(share + 1) * units, num_units", "(share + 1) * units + 1, num_units", "Q4_K"),
    "one share is missing": ("for _ in range(num_shares)", "for _ in range(num_shares - 1)", "Q4_K"),
    "parts of a layer lie over each other": ("(first_output + output)[:, None]", "output[:, None]", "Q4_0"),
    "a bias is not multiplied": (
        "total *= multiplier",
        "total = total * multiplier + tl.load(bias + number, mask=is_number, other=0.0) * (1 - multiplier)",
        "Q4_0",
    ),
}


@pytest.fixture(autouse=True)
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums each number of a product in one order whatever the shape, as devices do, and numpy does not."""

    def dot(self: Any, a: Any, b: Any, c: Any, *_: Any) -> Any:
        terms = a.data[:, :, None].astype(np.float32) * b.data[None].astype(np.float32)
        return interpreter.TensorHandle(c.data + terms.sum(1), c.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.mark.parametrize("name", SERVED)
def test_weights_and_products(name: str) -> None:
    block_gates.same_weights(kernels, name)
    block_gates.same_products(kernels, name, torch.float32, rows=3)


@pytest.mark.parametrize(("name", "rows"), [("Q4_0", 65), ("Q6_K", 17)])
def test_products_in_16_bits(name: str, rows: int) -> None:
    block_gates.same_products(kernels, name, torch.float16, rows)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, (1, 17)), (torch.float16, (1, 33, 70))])
def test_rows_by_themselves(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    block_gates.rows_by_themselves(kernels, "Q4_0", dtype, rows)


def test_rows_become_fp8() -> None:
    """The interpreter is wrong about numbers just below a power of two; the others are right."""
    x = torch.randn(3, 272, generator=torch.Generator().manual_seed(1))
    (values, scales), expected = kernels.round_rows(x), ScaledRows.of(x)
    assert torch.allclose(scales, expected.scales, rtol=1e-6)
    assert float((values.float() == expected.values.float()).float().mean()) > 0.95


def test_the_check_at_load_finds_it_right() -> None:
    assert is_right(kernels, TYPES["Q5_1"], torch.float16, CPU)


def test_shares_by_shape() -> None:
    """They depend on the layer alone, not on rows: 400 programs of a device of 100 multiprocessors."""
    assert kernels.shares_of(4096, 4096, CPU) == 6
    assert kernels.shares_of(1024, 14336, CPU) == 16
    assert kernels.shares_of(1024, 512, CPU) == 4
    assert kernels.shares_of(128256, 4096, CPU) == 1


@pytest.mark.parametrize("bug", BUGS)
def test_gates_catch(bug: str, tmp_path: Path) -> None:
    correct, wrong, name = BUGS[bug]
    planted: Any = planted_in(kernels, correct, wrong, tmp_path)
    with pytest.raises(AssertionError):
        block_gates.same_products(planted, name, torch.float32, rows=1)


def test_the_gate_of_rows_catches_shares_that_depend_on_them(tmp_path: Path) -> None:
    correct = "shares_of(out_features, x.shape[1], x.device)"
    planted: Any = planted_in(kernels, correct, f"max(1, {correct} // num_rows)", tmp_path)
    with pytest.raises(AssertionError):
        block_gates.rows_by_themselves(planted, "Q4_0", torch.float32, (1, 3))

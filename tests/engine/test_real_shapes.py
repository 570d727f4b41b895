"""What Triton's compiler makes of the kernels, for GPUs that are not here."""

import os
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.test_triton_attention import needs_triton, run


@needs_triton
def test_no_program_of_a_real_model_spills_or_stands_alone() -> None:
    chosen = () if os.environ.get("ALL_TESTS") else ("--chosen",)
    run("-m", "tests.engine.triton_real_shapes", *chosen, TRITON_INTERPRET="0")


@needs_triton
@pytest.mark.parametrize(
    ("fault", "more"),
    [
        ("a stack of 2920 bytes", {"stack": 2920}),
        ("shared memory", {"shared": 240 << 10}),
        ("1 programs", {"registers": 255, "warps": 8}),
    ],
)
def test_faults_are_seen(fault: str, more: dict[str, Any]) -> None:
    from tests.engine.triton_real_shapes import Made

    good = Made("recur_head", 90, warps=4, registers=163, stack=0, shared=2048)
    assert good.programs == 3
    assert not good.faults
    assert fault in " ".join(replace(good, **more).faults)

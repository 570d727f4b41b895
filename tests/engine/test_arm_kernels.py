"""Products with quantised weights on 64-bit Arm, emulated: the dot-product instructions give plain C's bits.

Needs Debian's gcc-aarch64-linux-gnu and qemu-user. An emulator proves numbers, not speed.
"""

import shutil

import pytest

from tests.engine.quantised_program import Program, all_products_are_equal_to_the_bit, compile_program
from truedraft.engine.layers.quantised_blocks import TYPES
from truedraft.engine.native.prebuilt import VARIANTS

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
MISSING = [program for program in (COMPILER, EMULATOR) if shutil.which(program) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[Program]:
    folder = tmp_path_factory.mktemp("arm")
    made = []
    for variant in VARIANTS["aarch64"]:
        has_dot_products = "asimddp" in variant.features
        program = compile_program(COMPILER, variant.flags, has_dot_products, folder / f"for-{len(made)}")
        made.append(program._replace(command=(EMULATOR, *program.command)))
    assert {program.has_dot_products for program in made} == {True, False}
    return made


@pytest.mark.parametrize("name", TYPES)
def test_dot_products_are_plain_cs_to_the_bit(name: str, programs: list[Program]) -> None:
    all_products_are_equal_to_the_bit(name, programs)

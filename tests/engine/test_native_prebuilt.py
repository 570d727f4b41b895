"""Prebuilt kernels: used where nothing compiles, and the best that a processor can run."""

import ctypes
import logging
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.quantised_program import Program, all_products_are_equal_to_the_bit, compile_program
from truedraft.engine.layers.quantised_blocks import TYPES
from truedraft.engine.native import library, prebuilt
from truedraft.engine.native.prebuilt import VARIANTS, best_variant, file_of

pytestmark = pytest.mark.skipif(
    platform.machine() not in VARIANTS or library.load_library() is None, reason="needs a C compiler"
)

HERE = [
    variant for variant in VARIANTS.get(platform.machine(), []) if variant.features <= library._features()
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has the package's prebuilt kernels from now on, none of them so far; there is no compiler."""
    found = prebuilt.file_of
    library.load_library()  # compiled, for all tests to come
    monkeypatch.setattr(library, "best_variant", lambda features: best_variant(features, tmp_path))
    monkeypatch.setattr(library, "file_of", lambda variant: found(variant, tmp_path))
    monkeypatch.setenv("CC", "false")
    return tmp_path


def test_the_best_takes_over_where_nothing_compiles(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = library.load_library()
    assert compiled is not None
    for variant in VARIANTS[platform.machine()]:
        shutil.copy(compiled._name, file_of(variant, folder))
    with caplog.at_level(logging.INFO):
        loaded = library.load_library.__wrapped__()
    assert loaded is not None
    assert loaded._name == str(file_of(HERE[0], folder))
    assert f"Native kernels prebuilt for {HERE[0].name}" in caplog.text
    monkeypatch.setattr(library, "load_library", lambda: loaded)
    assert library.kernels_in_words() == f"C, prebuilt for {HERE[0].name}"


def test_without_one_there_are_no_kernels(folder: Path) -> None:
    assert library.load_library.__wrapped__() is None
    assert file_of(HERE[0], folder).parent == folder


def test_none_is_loaded_by_a_processor_without_its_instructions(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variant in VARIANTS[platform.machine()]:
        file_of(variant, folder).write_bytes(b"never read")
    monkeypatch.setattr(library, "_processor", lambda: "flags\t\t: fpu sse2 avx\nFeatures\t: fp")
    assert library.load_library.__wrapped__() is None


def test_each_needs_more_than_the_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, variants in VARIANTS.items():
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        for variant in variants:
            file_of(variant, folder).touch()
        for variant in variants:
            assert best_variant(variant.features, folder) == variant
            file_of(variant, folder).unlink()
        assert best_variant(variants[0].features, folder) is None


def test_one_made_from_another_source_is_not_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_of(HERE[0], folder).touch()
    assert best_variant(library._features(), folder) == HERE[0]
    monkeypatch.setattr(prebuilt, "source_text", lambda: "another")
    assert best_variant(library._features(), folder) is None


def test_one_that_is_made_has_every_function(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC")
    monkeypatch.setitem(VARIANTS, platform.machine(), HERE[-1:])
    (made,) = prebuilt.compile_variants(folder, platform.machine())
    library.declare_functions(ctypes.CDLL(str(made)))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[Program]:
    """The two best that this processor can execute: with 512 bits, one without dot products."""
    made = tmp_path_factory.mktemp("processors")
    with ThreadPoolExecutor() as pool:
        return list(
            pool.map(
                lambda variant: compile_program(
                    "cc", variant.flags, "avx512_vnni" in variant.features, made / variant.name
                ),
                HERE[:2],
            )
        )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Arm's are in test_arm_kernels.py")
@pytest.mark.parametrize("name", TYPES)
def test_products_of_quantised_weights_are_equal_to_the_bit(name: str, programs: list[Program]) -> None:
    all_products_are_equal_to_the_bit(name, programs)

"""The kernels that images bring along: used where nothing compiles, on processors with their instructions."""

import logging
import platform
from pathlib import Path

import pytest

from truedraft.engine.native import library

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or library.load_library() is None, reason="needs x86-64 and a C compiler"
)


@pytest.fixture
def baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "kernels.so"
    monkeypatch.setattr(library, "BASELINE_LIBRARY", made)
    return made


def test_it_takes_over_where_nothing_compiles(
    baseline: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library.compile_baseline()
    monkeypatch.setenv("CC", "false")
    if not library.baseline_runs_here():
        pytest.skip("the processor lacks AVX2")
    with caplog.at_level(logging.WARNING):
        loaded = library.load_library.__wrapped__()
    assert loaded is not None
    assert loaded._name == str(baseline)
    assert "x86-64-v3" in caplog.text


def test_without_it_there_are_no_kernels(baseline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    assert library.load_library.__wrapped__() is None


def test_it_is_not_loaded_by_a_processor_without_its_instructions(
    baseline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline.write_bytes(b"never read")
    monkeypatch.setenv("CC", "false")
    monkeypatch.setattr(library, "_processor", lambda: "flags\t\t: fpu sse2 avx")
    assert library.load_library.__wrapped__() is None

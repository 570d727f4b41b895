"""``benchmarks.gpu_minutes`` on a CPU: its stages, limits and dry run."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_minutes
from benchmarks.gpu_minutes import STAGES, run_apart, run_here
from benchmarks.gpu_stages import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench("cpu", torch.float32, is_dry=True)


def test_correctness_comes_first() -> None:
    names = [stage.partition(":")[0] for stage in STAGES]
    assert names[:3] == ["facts", "kernels", "mix"]
    assert sum(list(STAGES.values())[:3]) <= 500
    assert all(hasattr(Bench, name) for name in names)


@pytest.mark.parametrize(
    ("stage", "shown"),
    [
        ("facts", "VERDICT a dependent node of a graph, us"),
        ("kernels", "rejection          5   5"),
        ("mix:tiny", "VERDICT a prompt of 24 among rows, 2 drafts: a step, to the longer of both"),
        ("products", "gate, up"),
        ("engine:tiny", "VERDICT greedy, 1 rows, 0 drafts: weights to copy"),
        ("profile:tiny", "aten::"),
    ],
)
def test_stages(stage: str, shown: str, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(stage, bench) == 0
    assert shown in capsys.readouterr().out


def test_a_stage_that_fails_shows_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Bench, pair: str) -> None:
        try:
            raise ValueError("the cause")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(Bench, "products", fail)
    assert run_here("products", bench) == 1
    assert "ValueError: the cause" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("measured", "bound", "verdict"),
    [
        (1.0, {"at_most": 2}, "at most 2: as predicted"),
        (3.0, {"at_most": 2}, "at most 2: NOT AS PREDICTED"),
        (0, {"at_most": 0}, "at most 0: as predicted"),
        (3.0, {"at_least": 2}, "at least 2: as predicted"),
        (1.0, {"at_least": 2}, "at least 2: NOT AS PREDICTED"),
    ],
)
def test_verdicts(
    measured: float, bound: dict[str, float], verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Bench("cpu", torch.float32, is_dry=False).judge("this", measured, **bound)
    assert capsys.readouterr().out == f"VERDICT this: {measured:.3g}, predicted {verdict}\n"


def test_failed_tests_fail_their_stage(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = iter([1, 0])
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, next(codes))
    )
    assert run_here("tests", bench) == 1
    assert "pytest ended with [1, 0]" in capsys.readouterr().out


def test_a_stage_ends_with_its_time() -> None:
    assert run_apart("facts", 0.05, ["--device", "cpu", "--dry-run"], io.StringIO())[0] == "stopped after 0 s"


def test_what_needs_a_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(
        sys, "argv", ["gpu_minutes", "attention", "tests", "--device", "cpu", "--log", str(log)]
    )
    with pytest.raises(SystemExit) as ended:
        gpu_minutes.main()
    assert not ended.value.code
    assert capsys.readouterr().out.count("needs a GPU") == 2
    assert log.read_text().count("needs a GPU") == 2
    monkeypatch.setattr(sys, "argv", ["gpu_minutes", "enigne:8b"])
    with pytest.raises(SystemExit):
        gpu_minutes.main()

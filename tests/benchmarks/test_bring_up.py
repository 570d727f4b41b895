"""``benchmarks.bring_up`` on a CPU: its stages, limits and dry run."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bring_up
from benchmarks.bring_up import STAGES, Bench, run_apart, run_here


@pytest.fixture
def bench() -> Bench:
    return Bench("cpu", torch.float32, is_dry=True)


def test_correctness_comes_first() -> None:
    names = [stage.partition(":")[0] for stage in STAGES]
    assert names[:4] == ["facts", "kernels", "identity", "tests"]
    assert all(hasattr(Bench, "engine_stage" if name == "engine" else name) for name in names)


@pytest.mark.parametrize(
    ("stage", "shown"),
    [
        ("facts", "dependent node of a graph, us"),
        ("gemm", "gate, up"),
        ("identity:tiny", "rejection          5   5"),
        ("engine:tiny", "weights to copy"),
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

    monkeypatch.setattr(Bench, "gemm", fail)
    assert run_here("gemm", bench) == 1
    assert "ValueError: the cause" in capsys.readouterr().out


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
    assert run_apart("facts", 0.05, ["--device", "cpu", "--dry-run"], io.StringIO()) == "stopped after 0 s"


def test_what_needs_a_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(sys, "argv", ["bring_up", "kernels", "tests", "--device", "cpu", "--log", str(log)])
    with pytest.raises(SystemExit) as ended:
        bring_up.main()
    assert not ended.value.code
    assert capsys.readouterr().out.count("needs a GPU") == 2
    assert log.read_text().count("needs a GPU") == 2
    monkeypatch.setattr(sys, "argv", ["bring_up", "enigne:8b"])
    with pytest.raises(SystemExit):
        bring_up.main()

"""``benchmarks.gpu_minutes`` on a CPU: its stages, limits and dry run."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_minutes
from benchmarks.gpu_kinds import Bench
from benchmarks.gpu_minutes import LIMIT, ON_REQUEST, STAGES, run_apart, run_here


@pytest.fixture
def bench() -> Bench:
    return Bench("cpu", torch.float32, is_dry=True)


def test_correctness_comes_first_and_all_fits_a_command() -> None:
    names = [stage.partition(":")[0] for stage in STAGES]
    assert names[:3] == ["facts", "identity", "engine"]
    assert sum(STAGES.values()) <= LIMIT == 540
    assert ON_REQUEST["http:8b"] == 200
    assert all(hasattr(Bench, stage.partition(":")[0]) for stage in STAGES | ON_REQUEST)


@pytest.mark.parametrize(
    ("stage", "shown"),
    [
        ("facts", "VERDICT a dependent node of a graph, us"),
        (
            "identity",
            "VERDICT latents in float32: captured rounds say what phases say: 1, predicted at least 1",
        ),
        ("recur", "VERDICT a recurrence of one row, us"),
        ("experts", "VERDICT experts, torch.float32, 1 tokens: share of a copy's reads"),
        ("head", "VERDICT a head's two drafts, 1 rows: speed-up"),
        ("mix:tiny", "VERDICT a prompt of 24 among rows, 2 drafts: a step, to the longer of both"),
        ("products", "gate, up"),
        ("engine:tiny", "VERDICT greedy, 1 rows, 0 drafts: weights to copy"),
        ("profile:tiny", "aten::"),
        ("http:tiny", "VERDICT 1 clients: tokens/s"),
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
        (1.0, {"at_most": 2}, "at most 2: AS PREDICTED"),
        (3.0, {"at_most": 2}, "at most 2: NOT AS PREDICTED"),
        (0, {"at_most": 0}, "at most 0: AS PREDICTED"),
        (3.0, {"at_least": 2}, "at least 2: AS PREDICTED"),
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
    given = ["gpu_minutes", "attention", "tests", "--device", "cpu", "--out", str(tmp_path / "of")]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as ended:
        gpu_minutes.main()
    assert not ended.value.code
    assert capsys.readouterr().out.count("needs a GPU") == 2
    assert (tmp_path / "of" / "minutes.log").read_text().count("needs a GPU") == 2
    monkeypatch.setattr(sys, "argv", ["gpu_minutes", "enigne:8b"])
    with pytest.raises(SystemExit):
        gpu_minutes.main()


def test_a_stage_that_crashes_or_hangs_costs_itself_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has ended stands in the folder before the next stage begins; nothing begins after the limit."""
    seen: list[int] = []
    stages = ["facts", "recur", "experts"]
    ends = {
        "facts": ("FAILED (-11)", []),
        "recur": ("stopped after 30 s", ["this: 3, predicted at most 2: NOT"]),
    }

    def run(stage: str, seconds: float, *others: object) -> tuple[str, list[str]]:
        if num_before := len(seen) % len(stages):
            assert len(json.loads((tmp_path / "minutes.json").read_text())) == num_before
        seen.append(round(seconds))
        return ends.get(stage, ("done", ["that: 1, predicted at least 1: AS PREDICTED"]))

    monkeypatch.setattr(gpu_minutes, "run_apart", run)
    monkeypatch.setattr(sys, "argv", ["gpu_minutes", *stages, "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        gpu_minutes.main()
    assert ended.value.code
    assert seen == [STAGES[stage] for stage in stages]
    said = json.loads((tmp_path / "minutes.json").read_text())
    assert [each["end"] for each in said] == ["FAILED (-11)", "stopped after 30 s", "done"]
    assert said[1]["verdicts"] == [{"what": "this", "numbers": "3, predicted at most 2", "verdict": "NOT"}]
    assert "that: 1, predicted at least 1: AS PREDICTED" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--limit", "20"])
    with pytest.raises(SystemExit):
        gpu_minutes.main()
    assert seen[3:] == [20, 20, 20]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--limit", "2"])
    with pytest.raises(SystemExit):
        gpu_minutes.main()
    assert len(seen) == 6

"""The examples run, print what they promise, and are as short as their page says."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
# What each is started with, and what it must print.
CASES = {
    "numpy_sampler": (["--letters", "40", "--samples", "1500"], "letters per call"),
    "when_to_speculate": (["--tokens", "24", "--svg", "plot.svg"], "The plot is in plot.svg"),
    "memory_argument": ([], "of one token"),
    "translation_loop": (["--tokens", "24"], "the same tokens: yes"),
    "drafter_and_scorer": (["--tokens", "24"], "the same tokens as the engine's: yes"),
}


Run = Callable[..., str]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Starts one in an empty folder, in this process: most of their time is spent on imports."""
    monkeypatch.chdir(tmp_path)

    def started(name: str, *arguments: str) -> str:
        path = str(EXAMPLES / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return started


def test_all_examples_are_here_and_on_their_page() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert names == CASES.keys() | {"dynamo_backend"}  # which tests/test_dynamo_backend.py runs
    assert all(f"({name}.py)" in page for name in names)
    for name in CASES:
        assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 120


@pytest.mark.parametrize("name", CASES)
def test_an_example_runs(name: str, run: Run) -> None:
    arguments, words = CASES[name]
    out = run(name, *arguments)
    assert words in out
    assert "NO" not in out


def test_the_numpy_sampler_changes_no_distribution(run: Run) -> None:
    lines = run("numpy_sampler", "--letters", "10", "--samples", "3000").splitlines()[-3:]
    plain, speculative, draft = (float(line.split(":")[1].split()[0]) for line in lines)
    assert abs(plain - speculative) < 0.03 < 0.3 < draft

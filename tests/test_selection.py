"""``make test-fast`` leaves out slow tests; where all are needed, most reasons to skip one are failures."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import (
    HOUSE,
    MISSING_HARDWARE,
    NIGHTLY,
    PLANTED_SHARE,
    SLOW,
    TESTS,
    is_house,
    is_slow,
    left_out,
    turn,
)

ROOT = TESTS.parent
HOOKS = "from tests.conftest import pytest_make_collect_report, pytest_runtest_makereport\n"
MODULE_SKIPPED = 'import pytest\n\npytest.importorskip("no_such_module")\n'


def run(folder: Path, source: str, required: bool) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(HOOKS)
    (folder / "test_it.py").write_text(source)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "REQUIRE_ALL_TESTS": "1" if required else ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(folder)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def skipped(reason: str) -> str:
    return f"import pytest\n\n\ndef test_it():\n    pytest.skip({reason!r})\n"


@pytest.mark.parametrize("source", [skipped("no Chromium"), MODULE_SKIPPED], ids=["test", "module"])
def test_what_can_be_installed_is_required(source: str, tmp_path: Path) -> None:
    assert run(tmp_path, source, required=False).returncode in (0, 5)  # 5: no tests
    done = run(tmp_path, source, required=True)
    assert done.returncode in (1, 2)
    assert "Skipped, while REQUIRE_ALL_TESTS is set" in done.stdout


def test_hardware_and_expected_failures_may_be_missing(tmp_path: Path) -> None:
    xfail = "\n\n@pytest.mark.xfail\ndef test_other():\n    raise AssertionError\n"
    assert run(tmp_path, skipped(MISSING_HARDWARE[0]) + xfail, required=True).returncode == 0


def test_what_is_slow_is_there() -> None:
    assert [name for name in SLOW if not (TESTS / name).exists()] == []
    assert is_slow(TESTS / "faults" / "test_soak.py")
    assert not is_slow(TESTS / "engine" / "test_verify.py")


class Item:
    """Stands for a collected test."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.nodeid = f"{path}::{name}"
        if "[" in name:
            self.callspec = None


def names_left_out(items: list[Item], *arguments: str) -> set[str]:
    config = SimpleNamespace(args=list(arguments))
    return {item.name for item in left_out(items, config)}  # type: ignore[arg-type]


def test_what_each_commit_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The house's rules are left to ``make check``; of planted bugs, every one has its turn."""
    monkeypatch.delenv("ALL_TESTS", raising=False)
    bugs = [f"test_bugs_are_noticed[{number}]" for number in range(25)]
    items = [Item(TESTS / "engine" / "test_native.py", name) for name in (*bugs, "test_one_is_caught")]
    items += [Item(TESTS / name, "test_rule") for name in HOUSE]
    items += [Item(TESTS / "faults" / "test_several_soak.py", name) for name in NIGHTLY]
    run = []
    for number in range(PLANTED_SHARE):
        monkeypatch.setattr("tests.conftest.turn", lambda number=number: number)
        out = names_left_out(items, "tests")
        assert {"test_rule", *NIGHTLY} <= out
        assert "test_one_is_caught" not in out
        run += [name for name in bugs if name not in out]
    assert sorted(run) == sorted(bugs)
    assert not {*bugs} & names_left_out(items, "tests/engine/test_native.py")
    assert "test_rule" in names_left_out(items, "tests/engine/test_native.py")
    assert not {*NIGHTLY} & names_left_out(items, "tests/faults/test_several_soak.py")
    monkeypatch.setenv("ALL_TESTS", "1")
    assert names_left_out(items, "tests") == set()


def test_the_turn_follows_from_the_commit() -> None:
    assert 0 <= turn() < PLANTED_SHARE
    assert all(is_house(TESTS / name) and (TESTS / name).exists() for name in HOUSE)

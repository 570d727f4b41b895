"""``make test-fast`` leaves out slow tests; where all are needed, most reasons to skip one are failures."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MISSING_HARDWARE, SLOW, TESTS, is_slow

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

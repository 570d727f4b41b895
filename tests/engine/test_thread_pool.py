"""The pool of threads in C under gcc's thread sanitizer, with more threads than any machine here has
cores."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from truedraft.engine.native import compiler

HERE = Path(__file__).parent
SOURCE = compiler.FOLDER / "threads.c"
NUMBERS = ("3", "8", "17", "32")

Build = Callable[[str, str], Path]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Compiles the pool with something in it replaced; skips where the sanitizer is not installed."""

    def built(right: str, wrong: str) -> Path:
        text = SOURCE.read_text()
        assert not right or text.count(right) == 1
        (tmp_path / "threads.c").write_text(text.replace(right, wrong) if right else text)
        program = tmp_path / "pool"
        command = [
            "gcc",
            "-std=gnu11",
            "-O1",
            "-g",
            "-fsanitize=thread",
            f"-I{SOURCE.parent}",
            "-o",
            str(program),
        ]
        sources = [str(tmp_path / "threads.c"), str(HERE / "thread_pool.c"), "-lpthread"]
        done = subprocess.run([*command, *sources], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return program

    (tmp_path / "empty.c").write_text("int main(void) { return 0; }")
    command = ["gcc", "-fsanitize=thread", str(tmp_path / "empty.c"), "-o", str(tmp_path / "empty")]
    if shutil.which("gcc") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("gcc's thread sanitizer is not installed")
    return built


def run(program: Path, rounds: int, *numbers: str) -> subprocess.CompletedProcess[str]:
    # Where memory is laid out at random the sanitizer may find no place for its own.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    options = os.environ | {"TSAN_OPTIONS": "exitcode=66 halt_on_error=1"}
    command = [*fixed, str(program), str(rounds), *numbers]
    return subprocess.run(command, capture_output=True, text=True, env=options, timeout=120)


def test_many_threads_share_without_a_race(build: Build) -> None:
    done = run(build("", ""), 20, *NUMBERS)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (
            "if (atomic_compare_exchange_weak(&shares[owner].num_left, &left, left - 1))",
            "if (atomic_store(&shares[owner].num_left, left - 1), 1)",
        ),
        ("wait_until(&shares[0], is_finished, SPINS_OF_CALLER);", ""),
    ],
    ids=["two threads take a chunk", "the caller goes on before all is done"],
)
def test_planted_bugs_are_caught(build: Build, right: str, wrong: str) -> None:
    assert run(build(right, wrong), 200, "3", "8").returncode != 0

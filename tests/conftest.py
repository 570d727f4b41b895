"""Settings of every test run: no network, no threads left behind by the tokenizers, none of torch's that
spin, examples that stay; which tests are slow, and which may be skipped where all are required."""

import gc
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from truedraft.engine.machine.limits import num_cpus
from truedraft.engine.machine.openmp import spin_settings

# Modules and tests stay. To look through them for garbage, again and again, would be a fifth of the time that
# it takes to collect them.
gc.disable()

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.update(spin_settings(os.environ))  # before torch is loaded

# A shell has what it starts in the background ignore Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example's time only tells how busy the machine is. Examples follow from the test alone, so that a
# failure comes again; ``--hypothesis-profile default`` looks for others.
settings.register_profile(
    "reproducible", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("reproducible")

# What ``make test-fast`` leaves out: real processes, long samples, planted bugs, and what compiles.
SLOW = {
    "benchmarks",
    "engine/test_arm_kernels.py",
    "engine/test_checkpoint_mutations.py",
    "engine/test_encoder_decoder.py",
    "engine/test_encoder_decoder_mutants.py",
    "engine/test_families.py",
    "engine/test_gguf_mutations.py",
    "engine/test_gguf_real.py",
    "engine/test_greedy_identity.py",
    "engine/test_long_runs.py",
    "engine/test_mutants.py",
    "engine/test_native.py",
    "engine/test_native_bfloat16.py",
    "engine/test_native_cache.py",
    "engine/test_native_prebuilt.py",
    "engine/test_native_rounds.py",
    "engine/test_parameter_grid.py",
    "engine/test_positions.py",
    "engine/test_prefix_files.py",
    "engine/test_random_runs.py",
    "engine/test_real_shapes.py",
    "engine/test_round_graphs.py",
    "engine/test_translated_draft.py",
    "engine/test_triton_attention.py",
    "faults",
    "integration",
    "server/test_chat_templates.py",
    "server/test_hostile.py",
    "server/test_launch.py",
    "server/test_lifecycle.py",
    "server/test_monitoring.py",
    "server/test_page.py",
    "server/test_parser_mutants.py",
    "server/test_request_heads.py",
    "server/test_serve.py",
    "server/test_worker_process.py",
    "test_family_table.py",
    "test_public_api.py",
    "test_support_matrix.py",
}
# Rules of the house, which look at files and run next to nothing: ``make check`` runs them once.
HOUSE = ("test_architecture.py", "test_documentation.py", "test_words.py")
# Tests of several minutes run nightly, with ALL_TESTS, and where their file is named.
NIGHTLY = ("test_a_short_soak_of_several_models",)
# Names of tests that plant bugs, each with a list of them.
PLANTED = re.compile("noticed|caught")
# A commit runs every one of so many planted bugs, in turns; nightly, with ALL_TESTS, all of them run.
PLANTED_SHARE = 10
TESTS = Path(__file__).parent
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

# With REQUIRE_ALL_TESTS, any other reason fails the run: something that tests need is not installed.
MISSING_HARDWARE = ("there is no CUDA device", "Ray is not installed", "ai-dynamo is not installed")


@cache
def is_slow(path: Path) -> bool:
    return any(path.is_relative_to(TESTS / name) for name in SLOW)


def is_house(path: Path) -> bool:
    return path.parent == TESTS and path.name in HOUSE


@cache
def turn() -> int:
    """Returns whose turn it is among the planted bugs: it follows from the commit."""
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False).stdout.strip()
    return int(commit or "0", 16) % PLANTED_SHARE


def left_out(items: list[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """Returns the tests that a run of the whole suite leaves to ``make check`` or to the night. Files that
    are named run whole."""
    if os.environ.get("ALL_TESTS"):
        return []
    named = {Path(argument.split("::")[0]).name for argument in config.args}
    counts: Counter[str] = Counter()
    found = []
    for item in items:
        if item.path.name in named:
            continue
        if is_house(item.path) or item.name in NIGHTLY:
            found.append(item)
        elif hasattr(item, "callspec") and PLANTED.search(item.name.partition("[")[0]):
            place = item.nodeid.partition("[")[0]
            counts[place] += 1
            if (counts[place] + turn()) % PLANTED_SHARE:
                found.append(item)
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Returns one more than there are processors: tests also wait, for other processes, timers and files."""
    return num_cpus() + 1


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if out := set(left_out(items, config)):
        config.hook.pytest_deselected(items=[*out])
        items[:] = [item for item in items if item not in out]
    # Files that lie here come first: some take long, and at the end one processor would wait for the other.
    items.sort(key=lambda item: item.path.parent != TESTS)
    for item in items:
        if is_slow(item.path):
            item.add_marker("slow")


def refuse_skip(report: Report) -> Report:
    """Makes a failure of a report that says that something was skipped for want of what can be installed."""
    is_skip = report.skipped and isinstance(report.longrepr, tuple)
    if is_skip and os.environ.get("REQUIRE_ALL_TESTS") and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(MISSING_HARDWARE):
            report.outcome = "failed"
            report.longrepr = f"Skipped, while REQUIRE_ALL_TESTS is set: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return refuse_skip((yield))

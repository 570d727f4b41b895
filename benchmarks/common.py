"""What the benchmarks share: interleaved runs, medians, ratios.

A ratio is taken between two variants of the same repeat, then the median over the repeats: a machine that
slows down for a while slows both. Knows nothing of engines or HTTP.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import psutil

from truedraft.loadtest.machine import BUSY_SHARE, CpuWatch, is_busy, machine, processor_name
from truedraft.loadtest.prompts import STORY_OPENINGS, read_prompts
from truedraft.loadtest.report import format_cell, note, print_facts, print_table, save, write_json

__all__ = [
    "STORY_OPENINGS",
    "CpuWatch",
    "OfflineRun",
    "Run",
    "Runs",
    "StepTimes",
    "Times",
    "acceptance",
    "format_cell",
    "interleave",
    "machine",
    "median_ratio",
    "median_seconds",
    "note",
    "print_facts",
    "print_table",
    "processor_name",
    "read_prompts",
    "save",
    "summary",
    "timed",
    "total_ratio",
    "warn_if_busy",
    "warn_of_others",
    "write_json",
]


class OfflineRun(NamedTuple):
    """What ``benchmarks.measured_worker`` is asked for: prompts, ``concurrency`` of them at a time."""

    prompts: list[str]
    max_tokens: int
    temperature: float
    concurrency: int


class StepTimes(NamedTuple):
    """Seconds and counts of the rounds of an engine's full steps: all rows decoding, no prompt among them."""

    num_rounds: int
    num_rows: int
    num_tokens: int
    num_draft_tokens: int
    seconds: float
    draft: float
    score: float
    verify: float

    @property
    def host(self) -> float:
        """All that is neither of the models nor verification, bookkeeping between the steps included."""
        return self.seconds - self.draft - self.score - self.verify

    @property
    def tokens_per_round(self) -> float:
        return self.num_tokens / max(1, self.num_rounds * self.num_rows)


class Run(NamedTuple):
    """Holds one run of a variant: how much it made, how long it took, what it made."""

    num_tokens: int
    seconds: float
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    token_ids: Sequence[Sequence[int]] = ()
    steps: StepTimes | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


class Times(NamedTuple):
    """Holds seconds by the clock, and of the processors for some processes."""

    wall: float
    processor: float

    @classmethod
    def now(cls, processes: Sequence[psutil.Process]) -> Self:
        used = [process.cpu_times() for process in processes]
        return cls(time.perf_counter(), sum(one.user + one.system for one in used))

    def since(self, earlier: "Times") -> "Times":
        return Times(self.wall - earlier.wall, self.processor - earlier.processor)


Runs = Mapping[str, Sequence[Run]]


def interleave(variants: Mapping[str, Callable[[], Run]], repeats: int) -> Runs:
    """Run A, B, C, A, B, C, ...: every variant meets the same moods of the machine."""
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    for repeat in range(repeats):
        for name, variant in variants.items():
            runs[name].append(variant())
            note(f"  {repeat + 1}/{repeats} {name}: {runs[name][-1].tokens_per_second:.1f} tokens/s")
    return runs


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median_ratio(runs: Sequence[Run], baseline: Sequence[Run]) -> float:
    pairs = zip(runs, baseline, strict=True)
    return statistics.median(run.tokens_per_second / base.tokens_per_second for run, base in pairs)


def total_ratio(runs: Sequence[Run], baseline: Sequence[Run]) -> float:
    """Compares all tokens in all the time: many short runs have texts that differ more than the machine."""
    speed, base = (
        sum(run.num_tokens for run in some) / sum(run.seconds for run in some) for some in (runs, baseline)
    )
    return speed / base


def median_seconds(work: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Times each piece of work, taken in turns; the first turn warms up and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats + 1):
        for name, run in work.items():
            seconds[name].append(timed(run))
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}


def acceptance(runs: Sequence[Run]) -> tuple[float, float] | None:
    """Acceptance rate (accepted / drafted) and acceptance length (1 + accepted / rounds)."""
    drafted = sum(run.num_draft_tokens for run in runs)
    accepted = sum(run.num_accepted_tokens for run in runs)
    rounds = sum(run.num_rounds for run in runs)
    return (accepted / drafted, 1 + accepted / rounds) if drafted and rounds else None


def summary(runs: Runs, baselines: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """Returns a row for each variant: median, spread, acceptance, its ratio to a variant per baseline column.

    ``baselines[column][variant]`` names what the variant is compared with in that column.
    """
    rows = []
    for name, repeats in runs.items():
        speeds = [run.tokens_per_second for run in repeats]
        row: dict[str, Any] = {
            "variant": name,
            "tokens/s": statistics.median(speeds),
            "lowest": min(speeds),
            "highest": max(speeds),
        }
        for column, base_of in baselines.items():
            row[column] = median_ratio(repeats, runs[base_of[name]])
        row["acceptance_rate"], row["acceptance_length"] = acceptance(repeats) or (None, None)
        rows.append(row)
    return rows


def warn_if_busy() -> bool:
    """Another busy process slows many-row products more than one-row ones, so ratios suffer too."""
    busy = is_busy()
    if busy:
        load = os.getloadavg()[0]
        note(f"WARNING: the machine is busy (load average {load:.2f}); read ratios with care, no absolutes")
    return busy


def warn_of_others(watch: CpuWatch) -> float | None:
    """The share of the cores that others used while the measurements ran; printed if it matters."""
    share = watch.others_share()
    if share is not None and share > BUSY_SHARE:
        note(f"WARNING: other processes used {share:.0%} of the processors during the measurement")
    return share

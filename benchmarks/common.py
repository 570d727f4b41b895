"""What both benchmarks share: prompts, interleaved runs, medians, the machine's description, the table.

A ratio is taken between two variants of the same repeat, then the median over the repeats: a machine that
slows down for a while slows both. Knows nothing of engines or HTTP.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

STORY_OPENINGS = [
    "Once upon a time, there was a little girl who lived near the sea.",
    "One morning, Tom found a small blue box under his bed.",
    "The old tortoise walked slowly down to the river.",
    "Sara and her brother wanted to build a kite.",
    "It was raining, and the children had to stay inside.",
    "A farmer had a donkey that did not like to work.",
    "Ben was afraid of the dark, but he did not tell anyone.",
    "In a forest far away, a fox met a hungry lion.",
    "Mother baked a big cake for the whole village.",
    "The smallest bird in the nest could not fly yet.",
    "Every day after school, Amina fed the chickens.",
    "Two friends found a map in an old book.",
    "Grandfather had a secret, and only the cat knew it.",
    "There was a tree with golden leaves on the top of the hill.",
    "Lily lost her red shoe on the way to the market.",
    "The moon looked down and saw a boy who could not sleep.",
]


class Run(NamedTuple):
    """One variant, once: how much it made, how long it took, what it made."""

    num_tokens: int
    seconds: float
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    token_ids: Sequence[Sequence[int]] = ()

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


Runs = Mapping[str, Sequence[Run]]


def interleave(variants: Mapping[str, Callable[[], Run]], repeats: int) -> Runs:
    """Run A, B, C, A, B, C, ...: every variant meets the same moods of the machine."""
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    for repeat in range(repeats):
        for name, variant in variants.items():
            runs[name].append(variant())
            note(f"  {repeat + 1}/{repeats} {name}: {runs[name][-1].tokens_per_second:.1f} tokens/s")
    return runs


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median_ratio(runs: Sequence[Run], baseline: Sequence[Run]) -> float:
    pairs = zip(runs, baseline, strict=True)
    return statistics.median(run.tokens_per_second / base.tokens_per_second for run, base in pairs)


def acceptance(runs: Sequence[Run]) -> tuple[float, float] | None:
    """Acceptance rate (accepted / drafted) and acceptance length (1 + accepted / rounds)."""
    drafted = sum(run.num_draft_tokens for run in runs)
    accepted = sum(run.num_accepted_tokens for run in runs)
    rounds = sum(run.num_rounds for run in runs)
    return (accepted / drafted, 1 + accepted / rounds) if drafted else None


def summary(runs: Runs, baselines: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """One row for each variant: median, spread, acceptance, and its ratio to a variant per baseline column.

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


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def read_prompts(path: Path | None) -> list[str]:
    """One prompt a line, plain or JSON with a ``prompt`` or ``text`` key; without a file, story openings."""
    if path is None:
        return STORY_OPENINGS
    prompts = []
    for line in path.read_text().splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            line = record.get("prompt") or record["text"]
        if line.strip():
            prompts.append(line)
    return prompts


def machine() -> dict[str, Any]:
    """Where the numbers come from. A figure without this is worth nothing."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def warn_if_busy() -> bool:
    """Another busy process slows many-row products more than one-row ones, so ratios suffer too."""
    load = os.getloadavg()[0]
    busy = load > 0.3 * (os.cpu_count() or 1)
    if busy:
        note(f"WARNING: the machine is busy (load average {load:.2f}); read ratios with care, no absolutes")
    return busy


def note(text: str) -> None:
    """Progress goes to stderr; stdout has the tables only."""
    print(text, file=sys.stderr, flush=True)


def print_table(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Columns from the first row's keys; None is shown as -."""
    print(f"\n{title}")
    cells = [[key.replace("_", " ") for key in rows[0]]]
    cells += [[format_cell(value) for value in row.values()] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *rest]).rstrip())


def format_cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def write_json(path: Path | None, document: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n")
        note(f"Wrote {path}")

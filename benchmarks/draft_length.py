"""The draft length ``auto`` against every fixed one: python -m benchmarks.draft_length

For each pair and number of concurrent sequences: one engine, the same prompts with each fixed length and
with the policy's choice, interleaved; medians of the repeats, ratios within a repeat. Pairs: the bundled one,
synthetic ones whose acceptance is dialled, a model that drafts for itself, a draft that is never right.
Prints a table, writes JSON and PNG with ``--save``. ``--target`` and ``--draft`` take any pair instead.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import synthetic_pair as synthetic
from benchmarks.common import (
    Run,
    Runs,
    interleave,
    machine,
    median_ratio,
    note,
    print_facts,
    print_table,
    save,
    warn_if_busy,
)
from benchmarks.engine_runs import decode_params, run_engine
from benchmarks.pairs import BUNDLED, Pair, prompt_ids
from benchmarks.plots import panels
from engine.build import build_engine
from engine.config import BUNDLED_PAIR, EngineConfig
from engine.core import EngineCore

SYNTHETIC = {f"synthetic {share:g}": share for share in (0.1, 0.5, 0.8, 0.95)}
SELF, NEVER = "self-draft", "never right"
PAIRS = [BUNDLED, *SYNTHETIC, SELF, NEVER]
PROMPT_LENGTH = 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", choices=PAIRS, nargs="+", default=PAIRS)
    parser.add_argument("--shape", choices=synthetic.PAIRS, default="30m", help="of synthetic pairs")
    parser.add_argument("--target", help="checkpoint folders instead of --pairs")
    parser.add_argument("--draft")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 4, 8], help="0 is always there")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=384, help="of all sequences of a run together")
    parser.add_argument("--repeats", type=int, default=5, help="5 or more for numbers worth reporting")
    parser.add_argument("--threads", type=int, default=0, help="default: as the engine chooses")
    parser.add_argument("--save", type=Path, help="write PATH.json and PATH.png")
    return parser.parse_args()


def folders(name: str, shape: str, work: Path) -> Pair:
    """A synthetic pair is written below ``work``."""
    if name == BUNDLED:
        return Pair(name, str(BUNDLED_PAIR / "target"), str(BUNDLED_PAIR / "draft"))
    folder = work / name.replace(" ", "-")
    if not folder.exists():
        acceptance = SYNTHETIC.get(name, 0.0)
        synthetic.save_pair(folder, acceptance, synthetic.PAIRS[shape])
    target = str(folder / "target")
    return Pair(shape, target, target if name == SELF else str(folder / "draft"))


def measure(
    core: EngineCore, prompts: Sequence[list[int]], concurrency: int, arguments: argparse.Namespace
) -> Runs:
    # No sequence is so short that its prompt is most of its time.
    max_tokens = max(48, arguments.max_tokens // concurrency)
    batch = [prompts[i % len(prompts)] for i in range(concurrency)]

    def run(length: int | None) -> Run:
        params = decode_params(max_tokens, arguments.temperature, length)
        return run_engine(core, batch, params, concurrency)

    lengths: dict[str, int | None] = {str(k): k for k in sorted({0, *arguments.lengths})}
    for length in (*lengths.values(), None, None):
        run(length)  # the policy gets to know the text, as a server would have; everybody else warms up
    lengths["auto"] = None
    return interleave({name: lambda k=length: run(k) for name, length in lengths.items()}, arguments.repeats)


def summarise(name: str, concurrency: int, runs: Runs) -> dict[str, Any]:
    """Speeds are multiples of plain decoding."""
    to_plain = {length: median_ratio(repeats, runs["0"]) for length, repeats in runs.items()}
    best = max((length for length in runs if length != "auto"), key=lambda length: to_plain[length])
    drafted = sum(run.num_draft_tokens for run in runs["auto"])
    return {
        "pair": name,
        "at a time": concurrency,
        "plain, tokens/s": round(statistics.median(run.tokens_per_second for run in runs["0"]), 1),
        **{f"k={length}" if length != "auto" else "auto": value for length, value in to_plain.items()},
        "auto drafts a token": round(drafted / sum(run.num_tokens for run in runs["auto"]), 2),
        "best k": best,
        "auto to best": median_ratio(runs["auto"], runs[best]),
    }


def main() -> None:
    arguments = parse_arguments()
    busy = warn_if_busy()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        names = ["named"] if arguments.target else arguments.pairs
        for name in names:
            if arguments.target:
                pair = Pair("named", arguments.target, arguments.draft)
            else:
                pair = folders(name, arguments.shape, Path(work))
            core = build_engine(
                EngineConfig(
                    target=pair.target,
                    draft=pair.draft,
                    method="draft_model",
                    num_speculative_tokens="auto",
                    num_threads=arguments.threads,
                    prefix_caching=False,
                )
            )
            prompts = prompt_ids(pair, max(arguments.concurrency), PROMPT_LENGTH)
            for concurrency in arguments.concurrency:
                note(f"{name}, {concurrency} at a time")
                rows.append(summarise(name, concurrency, measure(core, prompts, concurrency, arguments)))
                note(str(rows[-1]))
    facts = {**machine(), "busy": busy, "temperature": arguments.temperature, "repeats": arguments.repeats}
    print_facts(facts)
    print_table(rows, f"multiples of plain decoding, temperature {arguments.temperature:g}")
    print(f"lowest of auto to best: {min(row['auto to best'] for row in rows):.3f}")
    print(f"lowest of auto to plain: {min(row['auto'] for row in rows):.3f}")
    save(arguments.save, {"facts": facts, "rows": rows}, lambda figure: draw(figure, rows))


def draw(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """A panel for each pair: speed by concurrency, a line for each length."""
    by_pair: dict[str, dict[str, dict[float, float]]] = {}
    for row in rows:
        series = by_pair.setdefault(row["pair"], {})
        for column, value in row.items():
            if column.startswith("k=") or column == "auto":
                series.setdefault(column, {})[row["at a time"]] = value
    panels(figure, by_pair, "at a time", "multiple of plain decoding", highlight="auto")


if __name__ == "__main__":
    main()

"""The draft length ``auto`` against every fixed one: python -m benchmarks.draft_length

For each pair an engine without speculation, one for each fixed length and one that chooses. All run the same
prompts, so many at a time, in turns: in each cycle every engine makes as many tokens as plain decoding makes
in a fraction of a second, so that a mood of the machine meets all of them; ratios of the tokens per second
of all cycles. Pairs: the bundled one, synthetic ones whose acceptance is dialled, a model that drafts for
itself, a draft that is never right. Prints a table, writes JSON and PNG with ``--save``. ``--target`` and
``--draft`` take any pair instead.
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from benchmarks import synthetic_pair as synthetic
from benchmarks.common import (
    Run,
    Runs,
    machine,
    note,
    print_facts,
    print_table,
    save,
    total_ratio,
    warn_if_busy,
)
from benchmarks.engine_runs import EndlessRun, decode_params
from benchmarks.pairs import BUNDLED, Pair, prompt_ids
from benchmarks.plots import panels
from engine.build import build_engine
from engine.config import BUNDLED_PAIR, EngineConfig
from engine.core import EngineCore

SYNTHETIC = {f"synthetic {share:g}": share for share in (0.1, 0.5, 0.8, 0.95)}
SELF, NEVER = "self-draft", "never right"
PAIRS = [BUNDLED, *SYNTHETIC, SELF, NEVER]
PROMPT_LENGTH = 16
PLAIN, AUTO = "0", "auto"
CACHE_BYTES = 256 << 20  # for 16 sequences and more
SOME_TOKENS = 32


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
    parser.add_argument("--max-tokens", type=int, default=256, help="of each sequence")
    parser.add_argument("--cycles", type=int, default=20, help="of each time the engines are built")
    parser.add_argument(
        "--builds",
        type=int,
        default=3,
        help="build the engines so often: where weights and caches lie in memory makes some 2 %% of speed",
    )
    parser.add_argument("--warm-up", type=int, default=5, help="cycles that are not counted")
    parser.add_argument("--seconds", type=float, default=0.2, help="of plain decoding, in a cycle")
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


def build_engines(
    pair: Pair, lengths: Sequence[int], num_threads: int, seed: int = 0
) -> dict[str, EngineCore]:
    """By variant: none of them does more than it has to. ``seed`` shuffles their order: of two equal engines
    the one that was built first has been slower by 8 %."""

    def build(**speculation: Any) -> EngineCore:
        return build_engine(
            EngineConfig(
                target=pair.target,
                draft=pair.draft,
                num_threads=num_threads,
                prefix_caching=False,
                cache_memory=ByteSize(CACHE_BYTES),
                **speculation,
            )
        )

    variants: dict[str, dict[str, Any]] = {PLAIN: {"method": "none"}}
    for length in sorted(set(lengths) - {0}):
        variants[str(length)] = {"method": "draft_model", "num_speculative_tokens": length}
    variants[AUTO] = {"method": "draft_model", "num_speculative_tokens": "auto"}
    order = random.Random(seed).sample(list(variants), len(variants))
    built = {name: build(**variants[name]) for name in order}
    return {name: built[name] for name in variants}


def measure(
    engines: Mapping[str, EngineCore],
    prompts: Sequence[list[int]],
    concurrency: int,
    arguments: argparse.Namespace,
) -> Runs:
    params = decode_params(arguments.max_tokens, arguments.temperature)
    endless = {name: EndlessRun(core, prompts, params, concurrency) for name, core in engines.items()}
    # Everybody warms up, and the policy gets to know the text, as a server's would have.
    speed = max(endless[PLAIN].advance(SOME_TOKENS * concurrency).tokens_per_second for _ in range(2))
    num_tokens = max(1, int(arguments.seconds * speed))
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for cycle in range(arguments.warm_up + arguments.cycles):
        for name in random.Random(cycle).sample(list(endless), len(endless)):
            made = endless[name].advance(num_tokens)
            if cycle >= arguments.warm_up:
                runs[name].append(made)
    for run in endless.values():
        run.stop()
    return runs


def summarise(name: str, concurrency: int, runs: Runs) -> dict[str, Any]:
    """Speeds are multiples of plain decoding."""
    to_plain = {length: total_ratio(repeats, runs[PLAIN]) for length, repeats in runs.items()}
    best = max((length for length in runs if length != AUTO), key=lambda length: to_plain[length])
    drafted = sum(run.num_draft_tokens for run in runs[AUTO])
    return {
        "pair": name,
        "at a time": concurrency,
        "plain, tokens/s": round(statistics.median(run.tokens_per_second for run in runs[PLAIN])),
        **{f"k={length}" if length != AUTO else AUTO: value for length, value in to_plain.items()},
        "auto drafts a token": round(drafted / sum(run.num_tokens for run in runs[AUTO]), 2),
        "best k": best,
        "auto to best": total_ratio(runs[AUTO], runs[best]),
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
            prompts = prompt_ids(pair, max(arguments.concurrency), PROMPT_LENGTH)
            runs: dict[int, dict[str, list[Run]]] = {}
            for build in range(arguments.builds):
                engines = build_engines(pair, arguments.lengths, arguments.threads, seed=build)
                for concurrency in arguments.concurrency:
                    note(f"{name}, {concurrency} at a time, {build + 1}/{arguments.builds}")
                    measured = measure(engines, prompts, concurrency, arguments)
                    for length, some in measured.items():
                        runs.setdefault(concurrency, {}).setdefault(length, []).extend(some)
            rows += [summarise(name, concurrency, by_length) for concurrency, by_length in runs.items()]
    settings = {name: getattr(arguments, name) for name in ("temperature", "builds", "cycles", "seconds")}
    facts = {**machine(), "busy": busy, **settings}
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

"""The draft length ``auto`` against every fixed one: python -m benchmarks.draft_length

For each pair one variant without speculation, one for each fixed length and one that chooses. They share one
loaded pair and its caches, so that where those lie in memory makes no difference. All run the same prompts,
so many at a time, in turns: in each cycle every variant makes as many tokens as plain decoding makes in a
fraction of a second, so that a mood of the machine meets all of them; ratios of the tokens per second of all
cycles. Pairs: the bundled one, synthetic ones whose acceptance is dialled, a model that drafts for itself, a
draft that is never right. Prints a table, writes JSON and a PNG with ``--save``. ``--target`` and ``--draft``
take any pair instead. ``--control`` measures plain decoding twice, as two variants: what they differ by is
noise.
"""

import argparse
import copy
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.draft_length.policy import DraftLengthPolicy
from engine.draft_length.sources import AUTO_LIMITS, CalibratedCosts, FollowedCosts, SourceChooser
from engine.draft_planner import DraftPlanner
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
from engine.core.block_pool import BlockPool
from engine.core.engine import EngineCore
from engine.core.scheduler import Scheduler
from engine.worker import keep_loaded

SYNTHETIC = {f"synthetic {share:g}": share for share in (0.1, 0.5, 0.8, 0.95)}
SELF, NEVER = "self-draft", "never right"
PAIRS = [BUNDLED, *SYNTHETIC, SELF, NEVER]
PROMPT_LENGTH = 16
PLAIN, CONTROL, AUTO = "0", "0 again", "auto"
CACHE_BYTES = 16 << 30  # more than is needed, which is what is taken
SOME_TOKENS = 32
PARTS = 20


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
    parser.add_argument("--cycles", type=int, default=400, help="of each time the pair is loaded")
    parser.add_argument("--builds", type=int, default=1, help="load the pair and measure costs so often")
    parser.add_argument("--warm-up", type=int, default=80, help="cycles that are not counted")
    parser.add_argument("--seconds", type=float, default=0.02, help="of plain decoding, in a cycle")
    parser.add_argument("--control", action="store_true", help="plain decoding twice: how much is noise")
    parser.add_argument("--threads", type=int, default=0, help="default: as the engine chooses")
    parser.add_argument("--save", type=Path, help="write JSON to this file, and a PNG beside it")
    arguments = parser.parse_args()
    if arguments.cycles < PARTS:
        parser.error(f"--cycles: at least {PARTS}; who made more in one round sits some of them out")
    return arguments


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


def load(pair: Pair, longest: int, num_sequences: int, num_threads: int) -> EngineCore:
    """With room in the caches for ``num_sequences`` of up to ``longest`` tokens, and what they may draft."""
    config = EngineConfig(
        target=pair.target,
        draft=pair.draft,
        method="draft_model",
        num_speculative_tokens="auto",
        num_threads=num_threads,
        prefix_caching=False,
        max_model_len=longest + max(AUTO_LIMITS.values()),
        max_num_sequences=num_sequences,
        cache_memory=ByteSize(CACHE_BYTES),
    )
    return build_engine(config)


def variants(loaded: EngineCore, lengths: Sequence[int], control: bool) -> dict[str, EngineCore]:
    """Engines around the models and caches of ``loaded``, which must be idle and stay so; each does no more
    than one built for its length alone. ``auto`` starts with the costs measured at start, every time."""
    planner, policy = loaded.scheduler.planner, loaded.scheduler.planner.policy
    assert isinstance(policy, DraftLengthPolicy)
    pools = [
        None if pool is None else BlockPool(pool.num_blocks, pool.block_size)
        for pool in (loaded.scheduler.target_pool, loaded.scheduler.draft_pool)
    ]
    target_pool, draft_pool = pools
    assert target_pool is not None

    def core(length: int | None) -> EngineCore:
        policy_of_it = None if length is not None else DraftLengthPolicy(copy.deepcopy(policy.costs))
        costs = FollowedCosts() if policy_of_it is None else CalibratedCosts(policy_of_it.costs)
        scheduler = Scheduler(
            target_pool=target_pool,
            draft_pool=draft_pool,
            max_num_sequences=loaded.scheduler.max_num_sequences,
            max_num_batched_tokens=loaded.scheduler.max_num_batched_tokens,
            planner=DraftPlanner(
                max_draft_len=planner.max_draft_len,
                policy=policy_of_it,
                chooser=SourceChooser(costs),
                offers=planner.offers,
                follows=planner.follows,
            ),
            prefix_caching=False,
        )
        admission = replace(loaded.admission, num_speculative_tokens=length)
        step_seconds = EngineConfig().step_seconds
        return EngineCore(
            loaded.target, loaded.proposer, scheduler, admission, loaded.make_draws, step_seconds
        )

    cores = {PLAIN: core(0)}
    if control:
        cores[CONTROL] = core(0)
    cores |= {str(length): core(length) for length in sorted(set(lengths) - {0})}
    return {**cores, AUTO: core(None)}


def measure(
    engines: Mapping[str, EngineCore],
    prompts: Sequence[list[int]],
    concurrency: int,
    arguments: argparse.Namespace,
) -> Runs:
    params = decode_params(arguments.max_tokens, arguments.temperature)
    endless = {name: EndlessRun(core, prompts, params, concurrency) for name, core in engines.items()}
    # Everybody warms up, and the policy gets to know the text, as a server's would have.
    for _ in range(2):
        speeds = {
            name: run.advance(SOME_TOKENS * concurrency).tokens_per_second for name, run in endless.items()
        }
    keep_loaded()
    num_tokens = max(concurrency, int(arguments.seconds * speeds[PLAIN]))
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for cycle in range(arguments.warm_up + arguments.cycles):
        for name in random.Random(cycle).sample(list(endless), len(endless)):
            made = endless[name].advance(num_tokens)
            if cycle >= arguments.warm_up:
                runs[name].append(made)
    for run in endless.values():
        run.stop()
    return runs


def measure_pair(name: str, pair: Pair, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    most = max(arguments.concurrency)
    prompts = prompt_ids(pair, most, PROMPT_LENGTH)
    longest = max(map(len, prompts)) + arguments.max_tokens
    num_variants = len(set(arguments.lengths) - {0}) + 2 + arguments.control
    runs: dict[int, dict[str, list[Run]]] = {concurrency: {} for concurrency in arguments.concurrency}
    for build in range(arguments.builds):
        loaded = load(pair, longest, num_variants * most, arguments.threads)
        for concurrency in arguments.concurrency:
            note(f"{name}, {concurrency} at a time, {build + 1}/{arguments.builds}")
            engines = variants(loaded, arguments.lengths, arguments.control)
            for variant, some in measure(engines, prompts, concurrency, arguments).items():
                runs[concurrency].setdefault(variant, []).extend(some)
    return [summarise(name, concurrency, by_variant) for concurrency, by_variant in runs.items()]


def summarise(name: str, concurrency: int, runs: Runs) -> dict[str, Any]:
    """Speeds are multiples of plain decoding."""
    to_plain = {length: total_ratio(repeats, runs[PLAIN]) for length, repeats in runs.items()}
    best = max((length for length in runs if length not in (AUTO, CONTROL)), key=to_plain.__getitem__)
    drafted = sum(run.num_draft_tokens for run in runs[AUTO])
    num_tokens = sum(run.num_tokens for run in runs[PLAIN])
    return {
        "pair": name,
        "at a time": concurrency,
        "plain, tokens/s": round(num_tokens / sum(run.seconds for run in runs[PLAIN])),
        **{f"k={length}" if length != AUTO else AUTO: value for length, value in to_plain.items()},
        "auto drafts a token": round(drafted / sum(run.num_tokens for run in runs[AUTO]), 2),
        "best k": best,
        "auto to best": total_ratio(runs[AUTO], runs[best]),
        "error": ratio_error(runs[AUTO], runs[best]),
    }


def ratio_error(runs: Sequence[Run], baseline: Sequence[Run]) -> float:
    """Standard error of their ratio, by leaving out every part of the cycles in turn (jackknife)."""
    ratios = []
    for part in range(PARTS):
        kept = [i for i in range(len(runs)) if i * PARTS // len(runs) != part]
        ratios.append(total_ratio([runs[i] for i in kept], [baseline[i] for i in kept]))
    return (PARTS - 1) ** 0.5 * statistics.pstdev(ratios)


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
            rows += measure_pair(name, pair, arguments)
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

"""Engine against itself and against transformers: python -m benchmarks.offline

For each pair and temperature, in one process and interleaved: our engine without and with speculation at
several numbers of concurrent sequences, and transformers' ``generate`` without and with ``assistant_model``
one prompt at a time, with the same constant draft length. Every variant makes exactly ``--max-tokens`` tokens
for each prompt (end-of-sequence is ignored). Greedy outputs are compared with the first variant's. A second
table says where the time of our rounds goes: drafting, scoring, verifying, and the host's share.
"""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import formula, identity
from benchmarks.common import (
    CpuWatch,
    Runs,
    interleave,
    machine,
    note,
    print_facts,
    print_table,
    save,
    summary,
    warn_if_busy,
    warn_of_others,
)
from benchmarks.contestants.transformers_generate import GENERATE, TransformersGenerate
from benchmarks.engine_runs import Variants, decode_params, run_engine
from benchmarks.pairs import Pair, add_pair_options, prompt_ids, resolve_pair
from benchmarks.plots import stacked
from benchmarks.result_file import Figure, record
from truedraft.engine.build import build_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.process.worker import keep_loaded


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_pair_options(parser, "bundled", several=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: as the engine chooses")
    parser.add_argument(
        "--num-speculative-tokens", default="4", help="a number, or auto, which has no peer in transformers"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--num-prompts", type=int, default=8, help="prompts of one run of one variant, at least its streams"
    )
    parser.add_argument("--prompts", type=Path, help="file of prompts; default: story openings")
    parser.add_argument("--repeats", type=int, default=5, help="5 or more for numbers worth reporting")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--save", type=Path, help="write JSON to this file, and a PNG next to it")
    parser.add_argument("--result", metavar="NAME", help="write benchmarks/results/NAME.json; one pair")
    arguments = parser.parse_args()
    if arguments.num_speculative_tokens != "auto":
        arguments.num_speculative_tokens = int(arguments.num_speculative_tokens)
    elif not arguments.no_transformers:
        parser.error("--num-speculative-tokens auto needs --no-transformers")
    return arguments


def variant_name(kind: str, concurrency: int) -> str:
    return f"{kind}, {concurrency} at a time"


def our_variants(
    core: EngineCore, prompts: list[list[int]], arguments: argparse.Namespace, temperature: float
) -> Variants:
    variants: Variants = {}
    for concurrency in arguments.concurrency:
        number = max(arguments.num_prompts, concurrency)
        for name, k in (("plain", 0), ("speculative", None)):
            params = decode_params(arguments.max_tokens, temperature, k)
            variants[variant_name(name, concurrency)] = partial(
                run_engine, core, prompts[:number], params, concurrency
            )
    return variants


def baselines(variants: Variants, concurrency: Sequence[int]) -> dict[str, dict[str, str]]:
    """Ours is compared with plain decoding at the same concurrency, all with the peer's plain decoding."""
    to_plain = {name: next(iter(variants)) for name in variants}
    for number in concurrency:
        to_plain[variant_name("speculative", number)] = variant_name("plain", number)
        to_plain[variant_name("plain", number)] = variant_name("plain", number)
    columns = {"to_plain": to_plain}
    if GENERATE in variants:
        columns["to_generate"] = dict.fromkeys(variants, GENERATE)
    return columns


def same_as_first(runs: Runs) -> dict[str, str]:
    """Counts the greedy outputs that are the first variant's. Variants may have more prompts than others."""
    shortest = min(len(repeats[0].token_ids) for repeats in runs.values())
    outputs = {name: repeats[0].token_ids[:shortest] for name, repeats in runs.items()}
    return identity.same_text(outputs, next(iter(runs)))


def phase_rows(runs: Runs, concurrency: Sequence[int]) -> list[dict[str, Any]]:
    """Our variants' rounds by phase; on speculative rows, the formula's speed-up and the achieved one."""
    rows = []
    for number in concurrency:
        plain, speculative = (runs[variant_name(kind, number)] for kind in ("plain", "speculative"))
        theory = formula.speedup(plain, speculative) or {}
        shown = ("draft_cost_c", "score_cost_v", "predicted", "achieved", "achieved_to_predicted")
        for kind, repeats in (("plain", plain), ("speculative", speculative)):
            numbers = {key: theory.get(key) if kind == "speculative" else None for key in shown}
            rows.append({"variant": variant_name(kind, number), **formula.phases(repeats), **numbers})
    return rows


def measure_pair(arguments: argparse.Namespace, pair: Pair) -> list[dict[str, Any]]:
    """Returns one result per temperature."""
    config = EngineConfig(
        target=pair.target,
        draft=pair.draft or "none",
        device=arguments.device,
        dtype=arguments.dtype,
        num_threads=arguments.threads,
        num_speculative_tokens=arguments.num_speculative_tokens,
        # Repeats see the same prompts: what an earlier one computed must not help.
        prefix_caching=False,
    )
    core = build_engine(config)
    keep_loaded()
    number = max(arguments.num_prompts, *arguments.concurrency)
    prompts = prompt_ids(pair, number, arguments.prompt_length, arguments.prompts)
    peer = None
    if not arguments.no_transformers:
        peer = TransformersGenerate.from_folders(
            pair.target,
            pair.draft,
            arguments.num_speculative_tokens,
            str(core.target.device),
            core.target.model.dtype,
        )
    results = []
    for temperature in arguments.temperature:
        variants = our_variants(core, prompts, arguments, temperature)
        if peer is not None:
            variants |= peer.variants(prompts[: arguments.num_prompts], arguments.max_tokens, temperature)
        note(f"{pair.name} pair, temperature {temperature:g}: one run of each to warm up")
        interleave(variants, 1)
        note("Measuring")
        watch = CpuWatch()
        runs = interleave(variants, arguments.repeats)
        others = warn_of_others(watch)
        rows = summary(runs, baselines(variants, arguments.concurrency))
        if temperature == 0:
            for row, same in zip(rows, same_as_first(runs).values(), strict=True):
                row["same_text"] = same
        results.append(
            {
                "pair": pair.name,
                "temperature": temperature,
                "dtype": str(core.target.model.dtype),
                "device": str(core.target.device),
                "threads": torch.get_num_threads(),
                "others": others,
                "rows": rows,
                "phases": phase_rows(runs, arguments.concurrency),
            }
        )
    return results


def figures(results: Sequence[dict[str, Any]]) -> list[Figure]:
    """Returns the time of a round by phase in every variant, and the speed-up next to the formula's."""
    columns = {
        "draft_ms": "draft, ms",
        "score_ms": "score, ms",
        "verify_ms": "verify, ms",
        "host_ms": "host, ms",
        "tokens_a_round": "tokens a round",
        "achieved": "speed-up",
        "predicted": "formula",
    }
    several = len({result["temperature"] for result in results}) > 1
    return [
        Figure(
            row["variant"] + (f", temperature {result['temperature']:g}" if several else ""),
            title,
            float(f"{row[name]:.4g}"),
        )
        for result in results
        for row in result["phases"]
        for name, title in columns.items()
        if row[name] is not None
    ]


def show(document: dict[str, Any], arguments: argparse.Namespace) -> None:
    print_facts(document["machine"])
    print(
        f"k = {arguments.num_speculative_tokens}, {arguments.num_prompts} prompts x {arguments.max_tokens} "
        f"tokens a run, medians of {arguments.repeats} interleaved runs; ratios are taken within a repeat: "
        f"to plain decoding at the same concurrency (transformers: at the first), to {GENERATE}"
    )
    for result in document["results"]:
        facts = ", ".join(f"{key} {result[key]}" for key in ("temperature", "dtype", "device", "threads"))
        print_table(result["rows"], f"{result['pair']} pair: {facts}")
        print_table(result["phases"], "Rounds by phase, and speed-up: tokens a round / (drafts x c + v)")


def main() -> None:
    arguments = parse_arguments()
    busy = warn_if_busy()
    document: dict[str, Any] = {
        "machine": machine() | {"torch": str(torch.__version__), "busy": busy},
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "results": [],
    }
    with ExitStack() as stack:
        work = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in arguments.pair:
            document["results"] += measure_pair(arguments, resolve_pair(arguments, name, work))
    show(document, arguments)
    rows = [
        row | {"variant": f"{result['pair']}, {row['variant']}"}
        for result in document["results"]
        if result["temperature"] == arguments.temperature[0]
        for row in result["phases"]
    ]
    parts = ("draft", "score", "verify", "host")
    save(arguments.save, document, lambda figure: stacked(figure, rows, parts, "Where a round's time goes"))
    first = document["results"][0]
    record(
        arguments.result,
        what=f"Rounds of the engine, {arguments.num_speculative_tokens} draft tokens a round",
        rows="decoding",
        model=f"{first['pair']} pair, {first['threads']} thread{'s' * (first['threads'] > 1)}",
        dtype="the file's own weights" if arguments.dtype == "auto" else arguments.dtype,
        num_repeats=arguments.repeats,
        machine=document["machine"] | {"others": first["others"]},
        figures=figures(document["results"]),
    )


if __name__ == "__main__":
    main()

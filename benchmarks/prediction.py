"""Predicted outputs against none: python -m benchmarks.prediction [--prompts edits.jsonl]

One process, interleaved: a scripted target (``benchmarks.scripted_target``: a random model's cost, the
expected text's tokens) makes the edits of ``benchmarks.edits`` with and without the client's prediction, and
with n-grams of the text alone. Greedy and seeded at temperature 1; the tokens must be the same every time.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import (
    CpuWatch,
    Run,
    interleave,
    machine,
    median_ratio,
    print_table,
    warn_if_busy,
    warn_of_others,
    write_json,
)
from benchmarks.edits import Edit, read_edits
from benchmarks.result_file import Figure, record
from benchmarks.scripted_target import ScriptedEngine, total
from benchmarks.synthetic_pair import Shape
from truedraft.engine.messages import SamplingParams

# What each variant says about speculation, and whether the prediction is sent.
VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "none": ({"method": "none"}, False),
    "ngram": ({"method": "ngram"}, False),
    "prediction": ({"method": "prediction"}, True),
    "prediction, 8 a round": ({"method": "prediction", "num_speculative_tokens": 8}, True),
    "auto with prediction": ({}, True),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, help="JSON lines; default: made-up programs")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5, help="5 or more for numbers worth reporting")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write everything here too")
    parser.add_argument("--result", metavar="NAME", help="write benchmarks/results/NAME.json")
    return parser.parse_args()


def pass_over(engine: ScriptedEngine, edits: list[Edit], params: SamplingParams, predicts: bool) -> Run:
    """Makes every edit once, one after the other."""
    runs = []
    for edit in edits:
        output = engine.encode(edit.expected)
        runs.append(
            engine.run(
                engine.encode(edit.instruction + edit.input),
                output,
                engine.encode(edit.prediction) if predicts else None,
                msgspec.structs.replace(params, max_tokens=len(output)),
            )
        )
    return total(runs)


def main() -> None:
    args = parse_arguments()
    busy = warn_if_busy()
    heads = max(4, args.hidden // 64)
    shape = Shape(args.hidden, args.layers, heads, heads // 2, args.hidden * 21 // 8)
    engine = ScriptedEngine(shape, num_speculative_tokens="auto")
    edits = read_edits(args.prompts, args.num_prompts)
    rows, figures = [], []
    watch = CpuWatch()
    for temperature in (0.0, 1.0):
        base = SamplingParams(max_tokens=1, temperature=temperature, seed=1, ignore_eos=True)
        variants: dict[str, Callable[[], Run]] = {
            name: partial(pass_over, engine, edits, msgspec.structs.replace(base, **speculation), predicts)
            for name, (speculation, predicts) in VARIANTS.items()
        }
        runs = interleave(variants, args.repeats)
        expected = runs["none"][0].token_ids
        for name, repeats in runs.items():
            first = repeats[0]
            kind = f"temperature {temperature:g}"
            speeds, plain = ([run.tokens_per_second for run in some] for some in (repeats, runs["none"]))
            figures += [
                Figure.of_ratios(name, f"times plain, {kind}", speeds, plain),
                Figure(name, f"rounds per token, {kind}", round(first.num_rounds / first.num_tokens, 3)),
            ]
            rows.append(
                {
                    "variant": name,
                    "temperature": temperature,
                    "wall_time": 1 / median_ratio(repeats, runs["none"]),
                    "speed-up": median_ratio(repeats, runs["none"]),
                    "rounds_per_token": first.num_rounds / first.num_tokens,
                    "drafted": first.num_draft_tokens,
                    "acceptance": (
                        first.num_accepted_tokens / first.num_draft_tokens if first.num_draft_tokens else None
                    ),
                    "same_tokens": "yes" if all(run.token_ids == expected for run in repeats) else "NO",
                }
            )
    where = machine() | {"hidden": args.hidden, "layers": args.layers, "busy": busy}
    print_table(rows, f"{len(edits)} edits, scripted target, {where}")
    write_json(args.json, {"machine": where, "rows": rows})
    record(
        args.result,
        what=f"{len(edits)} edits of programs by a target that makes exactly these",
        rows="drafts",
        model=f"random weights, hidden size {args.hidden}, {args.layers} layers",
        dtype="float32",
        num_repeats=args.repeats,
        machine=where | {"others": warn_of_others(watch)},
        figures=figures,
    )


if __name__ == "__main__":
    main()

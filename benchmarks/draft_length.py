"""The draft length ``auto`` against every fixed one: python -m benchmarks.draft_length

One engine, one process, interleaved: for each number of concurrent sequences, the same prompts with each
fixed length and with the policy's choice; medians of the repeats, ratios within a repeat. ``--target`` and
``--draft`` take any pair, those of ``benchmarks.synthetic_pair`` too (prompts are then token ids).
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.common import (
    STORY_OPENINGS,
    Run,
    interleave,
    machine,
    median_ratio,
    print_table,
    warn_if_busy,
)
from engine.build import build_engine
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import Generate, SamplingParams, TokenOutput
from engine.pairing import load_tokenizer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="default: the bundled pair")
    parser.add_argument("--draft")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[0, 1, 2, 3, 4, 6, 8])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5, help="5 or more for numbers worth reporting")
    return parser.parse_args()


def prompts_for(core: EngineCore, target: str) -> list[list[int]]:
    tokenizer = load_tokenizer(target)
    if tokenizer is not None:
        return [list(tokenizer.encode(text)) for text in STORY_OPENINGS]
    return [[(37 * i + 11) % core.target.vocab_size] for i in range(len(STORY_OPENINGS))]


def run(core: EngineCore, prompts: Sequence[list[int]], params: SamplingParams) -> Run:
    """All prompts at once; the clock starts when they are there."""
    for i, prompt in enumerate(prompts):
        core.add(Generate(request_id=str(i), prompt_token_ids=prompt, params=params))
    num_tokens = num_rounds = num_drafted = num_accepted = 0
    started = time.perf_counter()
    while core.has_work:
        for output in core.step():
            assert isinstance(output, TokenOutput)
            num_tokens += len(output.token_ids)
            num_rounds += 1
            num_drafted += output.num_draft_tokens
            num_accepted += output.num_accepted_tokens
    return Run(num_tokens, time.perf_counter() - started, num_rounds, num_drafted, num_accepted)


def main() -> None:
    args = parse_arguments()
    busy = warn_if_busy()
    given = {name: getattr(args, name) for name in ("target", "draft") if getattr(args, name)}
    config = EngineConfig(**given, num_speculative_tokens="auto")
    core = build_engine(config)
    prompts = prompts_for(core, str(config.target))
    base = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, ignore_eos=True)
    rows = []
    for concurrency in args.concurrency:
        batch = [prompts[i % len(prompts)] for i in range(concurrency)]
        # Few sequences say little in one run: they go on for longer.
        longer = msgspec.structs.replace(base, max_tokens=args.max_tokens * max(1, 4 // concurrency))
        lengths = {**{str(k): k for k in args.lengths}, "auto": None}
        variants = {
            name: lambda k=k, batch=batch, longer=longer: run(
                core, batch, msgspec.structs.replace(longer, num_speculative_tokens=k)
            )
            for name, k in lengths.items()
        }
        variants["auto"]()  # the policy gets to know the text, as a server would have
        runs = interleave(variants, args.repeats)
        speeds = {name: statistics.median(r.tokens_per_second for r in runs[name]) for name in runs}
        best = max((name for name in runs if name != "auto"), key=lambda name: speeds[name])
        drafted = sum(r.num_draft_tokens for r in runs["auto"]) / sum(r.num_rounds for r in runs["auto"])
        rows.append(
            {
                "at a time": str(concurrency),
                **{name: round(speed, 1) for name, speed in speeds.items()},
                "auto drafts": round(drafted, 2),
                "best": best,
                "auto to best": median_ratio(runs["auto"], runs[best]),
                "auto to plain": median_ratio(runs["auto"], runs["0"]) if "0" in runs else None,
            }
        )
    facts = {
        **machine(),
        "busy": busy,
        "target": Path(str(config.target)).name,
        "dtype": str(core.target.dtype),
    }
    print("  ".join(f"{key}: {value}" for key, value in facts.items()))
    print_table(rows, f"tokens/s by draft length, temperature {args.temperature:g}")


if __name__ == "__main__":
    main()

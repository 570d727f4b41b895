"""Rows of two kinds in one batch: python -m benchmarks.mixed_rows --target SmolLM2-135M-Instruct.Q4_1.gguf

Half of the rows edit a program of their prompt, which n-grams guess well, and the other half answer
questions, where they guess badly; the next prompt takes the place of one that has ended. What counts are
rounds in which all rows decode. In one process and interleaved: the default, no drafts, and fixed lengths,
all with n-grams. Every variant makes exactly ``--max-tokens`` tokens for each row, the same in all if greedy.
"""

import argparse
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from benchmarks.common import (
    CpuWatch,
    Run,
    interleave,
    machine,
    note,
    print_facts,
    print_table,
    summary,
    warn_if_busy,
    warn_of_others,
)
from benchmarks.engine_runs import Variants, decode_params, run_engine
from benchmarks.pairs import NGRAM, Pair, chat_prompt_ids
from benchmarks.result_file import Figure, record
from truedraft.engine.build import build_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import SamplingParams
from truedraft.engine.process.worker import keep_loaded

DEFAULT, NONE = "default", "none"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="a model with a chat template")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1, 2, 4, 8], help="fixed lengths")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: as the engine chooses")
    parser.add_argument("--repeats", type=int, default=5, help="5 or more for numbers worth reporting")
    parser.add_argument("--result", metavar="NAME", help="write benchmarks/results/NAME.json")
    return parser.parse_args()


def run_full(core: EngineCore, prompts: list[list[int]], params: SamplingParams, num_rows: int) -> Run:
    """Runs all prompts; the time and the tokens are those of full rounds."""
    run = run_engine(core, prompts, params, num_rows)
    assert run.steps is not None
    return run._replace(num_tokens=run.steps.num_tokens, seconds=run.steps.seconds)


def main() -> None:
    arguments = parse_arguments()
    busy = warn_if_busy()
    # Repeats see the same prompts: what an earlier one computed must not help.
    core = build_engine(
        EngineConfig(
            target=arguments.target, draft="none", prefix_caching=False, num_threads=arguments.threads
        )
    )
    keep_loaded()
    pair = Pair("named", arguments.target, None)
    kinds = [chat_prompt_ids(pair, arguments.rows, kind) for kind in ("edits", "questions")]
    prompts = [prompt for both in zip(*kinds, strict=True) for prompt in both]
    variants: Variants = {}
    for name, length in {DEFAULT: None, NONE: 0, **{str(k): k for k in arguments.lengths}}.items():
        params = decode_params(arguments.max_tokens, arguments.temperature, length)
        params = replace(params, seed=1, method=NGRAM if length else None)
        variants[name] = partial(run_full, core, prompts, params, arguments.rows)
    interleave(variants, 1)
    note("Measuring")
    watch = CpuWatch()
    runs = interleave(variants, arguments.repeats)
    others = warn_of_others(watch)
    rows = summary(runs, {"to_none": dict.fromkeys(variants, NONE)})
    for row in rows:
        own = runs[row["variant"]]
        row["drafted"] = own[0].num_draft_tokens
        same = all(one.token_ids == runs[NONE][0].token_ids for one in own)
        row["same_text"] = "yes" if same else "NO"
    where = machine() | {"busy": busy, "others": others}
    print_facts(where)
    print_table(rows, f"{arguments.rows} rows, {arguments.max_tokens} tokens each")
    plain = [one.tokens_per_second for one in runs[NONE]]
    record(
        arguments.result,
        what=f"{arguments.rows} rows, half of which edit a program, {arguments.max_tokens} tokens each",
        rows="draft length",
        model=Path(arguments.target).stem,
        dtype="the file's own weights",
        num_repeats=arguments.repeats,
        machine=where,
        figures=[
            Figure.of_ratios(name, "times none", [one.tokens_per_second for one in some], plain)
            for name, some in runs.items()
        ],
    )


if __name__ == "__main__":
    main()

"""What a round costs besides its models: python -m benchmarks.host_cost

Milliseconds of a step by phase, with the models' forward passes apart from what is around them: ``draft
pass`` and ``score pass`` are the passes alone, ``draft`` is drawing and bookkeeping between them, ``verify``
is verification, ``host`` everything else (scheduling, the spans to score, commit, learning from the verdict).
``host share`` is all that is not a pass, ``draft step`` a drafted token's time to that of its pass. Only full
steps are counted: every sequence decodes and none ends. Medians over the repeats, variants interleaved.

Rounds go phase by phase here, as on a GPU or for rows that ask for more than tokens; on a CPU most are one
call of C (``engine/rounds/native_loop.py``), and ``benchmarks.offline`` says what is around those.
``--device null`` measures captured rounds, as on a GPU, over a device that takes no time: microseconds of the
host by part.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from benchmarks import null_device
from benchmarks.common import (
    CpuWatch,
    machine,
    note,
    print_facts,
    print_table,
    warn_if_busy,
    warn_of_others,
    write_json,
)
from benchmarks.engine_runs import decode_params, use_phases
from benchmarks.pairs import BUNDLED, Pair, prompt_ids
from truedraft.engine.build import build_engine
from truedraft.engine.config import BUNDLED_PAIR, EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.models.base import ForwardOutput
from truedraft.engine.models.model_runner import ModelRunner

# Tokens are drawn in these ways. A seed means the coupled rule.
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1, seed": {"temperature": 1.0, "seed": 1},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
}
LENGTHS = {"plain": 0, "k=4": 4, "auto": None}


class PassClock:
    """Adds up the seconds of a model's forward passes, from now on."""

    def __init__(self, model: ModelRunner) -> None:
        self.seconds = 0.0
        self.count = 0
        self._forward = model.forward
        model.forward = self  # type: ignore[assignment, method-assign]

    def __call__(self, *arguments: Any, **named: Any) -> ForwardOutput:
        started = time.perf_counter()
        output = self._forward(*arguments, **named)
        self.seconds += time.perf_counter() - started
        self.count += 1
        return output


class Clocks:
    """All times of an engine so far, in seconds, by name; ``passes`` is the number of draft passes."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.score = PassClock(core.target)
        self.draft = PassClock(core.draft) if core.draft is not None else None

    def read(self) -> dict[str, float]:
        phases = self.core.stats.phase_seconds
        draft_seconds, passes = (self.draft.seconds, self.draft.count) if self.draft else (0.0, 0)
        return {
            "round": time.perf_counter(),
            "draft pass": draft_seconds,
            "draft": phases["draft"] - draft_seconds,
            "score pass": self.score.seconds,
            "verify": phases["verify"],
            "passes": float(passes),
        }


class Cost(NamedTuple):
    """Sums over one run's full steps."""

    num_steps: int
    num_tokens: int
    seconds: dict[str, float]

    def row(self) -> dict[str, float]:
        milliseconds = {name: 1000 * value / self.num_steps for name, value in self.seconds.items()}
        passes = milliseconds.pop("passes") / 1000
        models = milliseconds["draft pass"] + milliseconds["score pass"]
        host = milliseconds["round"] - models - milliseconds["draft"] - milliseconds["verify"]
        return {
            **milliseconds,
            "host": host,
            "host share": 1 - models / milliseconds["round"],
            "draft step": 1 + milliseconds["draft"] / milliseconds["draft pass"] if passes else float("nan"),
            "passes": passes,
            "tokens": self.num_tokens / self.num_steps,
        }


def run(core: EngineCore, clocks: Clocks, prompts: Sequence[list[int]], params: SamplingParams) -> Cost:
    """All prompts at once, to their ends."""
    for number, prompt in enumerate(prompts):
        core.add(Generate(request_id=str(number), prompt_token_ids=prompt, params=params))
    started: set[str] = set()
    num_steps = num_tokens = 0
    seconds = dict.fromkeys(clocks.read(), 0.0)
    while core.has_work:
        decoding = len(started) == len(prompts)
        before = clocks.read()
        outputs = core.step()
        after = clocks.read()
        started.update(output.request_id for output in outputs)
        if not decoding or len(outputs) < len(prompts):
            continue
        num_steps += 1
        num_tokens += sum(len(output.token_ids) for output in outputs)  # type: ignore[union-attr]
        seconds = {name: total + after[name] - before[name] for name, total in seconds.items()}
    if not num_steps:
        raise SystemExit("no step had all sequences decoding: ask for more --max-tokens")
    return Cost(num_steps, num_tokens, seconds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="checkpoint folders; default: the bundled pair")
    parser.add_argument("--draft")
    parser.add_argument("--device", default="auto", help="as in the settings, or null")
    parser.add_argument("--method", default="draft_model", choices=["auto", "draft_model", "ngram"])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; 0: as the engine chooses")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--sampling", choices=list(SAMPLING), nargs="+", default=list(SAMPLING))
    parser.add_argument("--lengths", choices=list(LENGTHS), nargs="+", default=list(LENGTHS))
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5, help="5 or more for numbers worth reporting")
    parser.add_argument("--save", type=Path, help="write JSON to this file")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    busy = warn_if_busy()
    if arguments.device == "null":
        null_rows = null_device.measure(arguments.concurrency, arguments.max_tokens // 3, arguments.repeats)
        print_table(null_rows, "Microseconds of the host in a captured round")
        write_json(arguments.save, {"machine": machine() | {"busy": busy}, "results": null_rows})
        return
    config = EngineConfig(
        target=arguments.target,
        draft=arguments.draft,
        device=arguments.device,
        method=arguments.method,
        num_threads=arguments.threads,
        prefix_caching=False,
    )
    core = build_engine(config)
    use_phases(core)
    clocks = Clocks(core)
    pair = Pair(
        "named" if arguments.target else BUNDLED,
        arguments.target or str(BUNDLED_PAIR / "target"),
        arguments.draft,
    )
    prompts = prompt_ids(pair, max(arguments.concurrency), 16)
    variants = {}
    for number, sampling, length in product(arguments.concurrency, arguments.sampling, arguments.lengths):
        params = msgspec.structs.replace(
            decode_params(arguments.max_tokens, num_speculative_tokens=LENGTHS[length]), **SAMPLING[sampling]
        )
        variants[sampling, length, number] = partial(run, core, clocks, prompts[:number], params)
    watch = CpuWatch()
    costs: dict[Any, list[Cost]] = {name: [] for name in variants}
    for repeat in range(arguments.repeats + 1):
        note(f"  {repeat}/{arguments.repeats}")
        for name, variant in variants.items():
            cost = variant()
            if repeat:  # the first one warms up, and shows the policy the text
                costs[name].append(cost)
    rows = []
    for (sampling, length, number), measured in costs.items():
        each = [cost.row() for cost in measured]
        row = {name: round(statistics.median(one[name] for one in each), 3) for name in each[0]}
        rows.append({"sampling": sampling, "draft length": length, "at a time": number, **row})
    facts = machine() | {
        "busy": busy,
        "others": warn_of_others(watch),
        "threads": torch.get_num_threads(),
        "repeats": arguments.repeats,
    }
    print_facts(facts)
    print_table(rows, "Milliseconds of a step")
    write_json(arguments.save, {"machine": facts, "results": rows})


if __name__ == "__main__":
    main()

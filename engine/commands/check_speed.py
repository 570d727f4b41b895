"""Measures the gain of speculation on this machine: acceptance, costs and the ratio to plain decoding.

Runs with and without speculation alternate, so that a machine that slows down slows both; medians are
reported. One sequence runs at a time. The module knows token ids only; ``check`` uses it.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.engine.commands.check_exactness import outputs
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import Method, SamplingParams

PAYS_FROM = 1.03  # A difference below this is noise.
MIN_TOKENS, MAX_TOKENS = 16, 96


@dataclass(frozen=True)
class Costs:
    """Holds costs in units of one plain target step: of a drafted token, of a round's scoring, of the rest of
    a round."""

    draft: float
    score: float
    rest: float


@dataclass(frozen=True)
class Speed:
    """Holds the speed of a draft length at one temperature. ``speedup`` is relative to plain decoding;
    ``ideal`` is the speed-up if a round took the models' own time and nothing else."""

    temperature: float
    num_speculative_tokens: int
    acceptance_rate: float
    acceptance_length: float
    acceptance_by_position: list[float]
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float
    ideal: float
    costs: Costs


@dataclass(frozen=True)
class _Timed:
    """Holds one run. ``drafted`` and ``accepted`` count tokens by position; ``phase_seconds`` are as in
    ``Stats``."""

    seconds: float
    num_tokens: int
    num_rounds: int
    drafted: list[int]
    accepted: list[int]
    phase_seconds: dict[str, float]

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted)


def measure(
    core: EngineCore,
    prompts: list[list[int]],
    lengths: Sequence[int],
    temperature: float,
    repeats: int,
    seconds: float,
    method: Method | None = None,
) -> list[Speed]:
    """Returns one ``Speed`` for each draft length of ``method``, or of the engine's own choice; the runs are
    so short that all together take about ``seconds``."""
    num_tokens = _num_tokens(core, prompts, temperature, seconds / (repeats * (len(lengths) + 1)))
    runs: dict[int, list[_Timed]] = {length: [] for length in (0, *lengths)}
    for length in runs:
        _timed(core, prompts, temperature, length, MIN_TOKENS, seed=0, method=method)  # This run warms up.
    for seed in range(repeats):
        for length, done in runs.items():
            done.append(_timed(core, prompts, temperature, length, num_tokens, seed, method))
    return [_speed(temperature, length, runs[0], runs[length]) for length in lengths]


def _num_tokens(core: EngineCore, prompts: list[list[int]], temperature: float, seconds: float) -> int:
    """Returns the number of tokens per prompt that plain decoding makes in ``seconds``, within limits."""
    trials = [_timed(core, prompts, temperature, 0, MIN_TOKENS, seed=0) for _ in range(2)]
    affordable = seconds / min(trial.seconds for trial in trials) * MIN_TOKENS
    room = core.admission.room(max(len(prompt) for prompt in prompts))
    return int(min(max(MIN_TOKENS, affordable), MAX_TOKENS, room))


def _timed(
    core: EngineCore,
    prompts: list[list[int]],
    temperature: float,
    length: int,
    num_tokens: int,
    seed: int,
    method: Method | None = None,
) -> _Timed:
    """Runs the prompts one after the other, under the rule for requests without a seed."""
    params = SamplingParams(
        max_tokens=num_tokens,
        temperature=temperature,
        seed=seed,
        verification="rejection",
        ignore_eos=True,
        method=method,
        num_speculative_tokens=length,
    )
    before = core.snapshot()
    num_rounds = 0
    started = time.perf_counter()
    for prompt in prompts:
        # A step has several rounds where they are short.
        num_rounds += sum(output.num_rounds for output in outputs(core, [prompt], params))
    seconds = time.perf_counter() - started
    after = core.snapshot()
    return _Timed(
        seconds,
        num_tokens * len(prompts),
        num_rounds,
        _since(before.draft_tokens_per_position, after.draft_tokens_per_position),
        _since(before.accepted_tokens_per_position, after.accepted_tokens_per_position),
        {name: value - before.phase_seconds[name] for name, value in after.phase_seconds.items()},
    )


def _since(before: list[int], after: list[int]) -> list[int]:
    return [new - old for old, new in zip(before, after, strict=True)]


def _speed(temperature: float, length: int, plain: list[_Timed], speculative: list[_Timed]) -> Speed:
    ratios = [p.seconds / s.seconds for p, s in zip(plain, speculative, strict=True)]
    costs = _costs(plain, speculative)
    num_rounds = sum(run.num_rounds for run in speculative)
    drafted, accepted = (
        [sum(counts) for counts in zip(*columns, strict=True)]
        for columns in ([run.drafted for run in speculative], [run.accepted for run in speculative])
    )
    acceptance_length = sum(run.num_tokens for run in speculative) / num_rounds
    return Speed(
        temperature=temperature,
        num_speculative_tokens=length,
        acceptance_rate=sum(accepted) / max(1, sum(drafted)),
        acceptance_length=acceptance_length,
        acceptance_by_position=[kept / made for made, kept in zip(drafted, accepted, strict=True) if made],
        tokens_per_second=statistics.median(run.num_tokens / run.seconds for run in speculative),
        plain_tokens_per_second=statistics.median(run.num_tokens / run.seconds for run in plain),
        speedup=statistics.median(ratios),
        ideal=acceptance_length / (sum(drafted) / num_rounds * costs.draft + costs.score),
        costs=costs,
    )


def _costs(plain: list[_Timed], speculative: list[_Timed]) -> Costs:
    median = statistics.median
    step = median(run.seconds / run.num_rounds for run in plain)
    draft = median(run.phase_seconds["draft"] / max(1, run.num_drafted) for run in speculative)
    score = median(run.phase_seconds["score"] / run.num_rounds for run in speculative)
    whole = median(run.seconds / run.num_rounds for run in speculative)
    drafted_per_round = sum(run.num_drafted for run in speculative) / sum(
        run.num_rounds for run in speculative
    )
    rest = whole - score - drafted_per_round * draft
    return Costs(draft=draft / step, score=score / step, rest=rest / step)

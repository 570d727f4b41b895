"""Runs Truedraft's engine in this process and times its steps: token ids in, a ``Run`` out."""

import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.common import Run, StepTimes
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import Failed, Generate, SamplingParams, TokenOutput
from truedraft.engine.rounds.round import RoundRunner

PHASES = ("draft", "score", "verify")
Variants = dict[str, Callable[[], Run]]


def use_phases(core: EngineCore) -> None:
    """Runs every round in Python, where each pass can be seen."""
    assert isinstance(core.runner, RoundRunner)
    core.runner.loop = None


def decode_params(
    max_tokens: int, temperature: float = 0.0, num_speculative_tokens: int | None = None
) -> SamplingParams:
    """Exactly ``max_tokens`` tokens. ``num_speculative_tokens``: 0 is plain decoding, None as configured."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=True,
        num_speculative_tokens=num_speculative_tokens,
    )


def run_engine(
    core: EngineCore, prompts: Sequence[list[int]], params: SamplingParams, concurrency: int = 1
) -> Run:
    """All prompts, ``concurrency`` of them at a time: when one ends, the next begins."""
    concurrency = min(concurrency, len(prompts))
    token_ids: list[list[int]] = [[] for _ in prompts]
    clock = _StepClock(concurrency)
    num_started = num_ended = 0
    started = before_step = time.perf_counter()
    while num_ended < len(prompts):
        while num_started < min(num_ended + concurrency, len(prompts)):
            core.add(
                Generate(request_id=str(num_started), prompt_token_ids=prompts[num_started], params=params)
            )
            num_started += 1
        phases_before = dict(core.stats.phase_seconds)
        outputs = core.step()
        first_tokens = False
        for output in outputs:
            if isinstance(output, Failed):
                raise RuntimeError(output.message)
            so_far = token_ids[int(output.request_id)]
            first_tokens |= not so_far
            so_far += output.token_ids
            num_ended += output.finish_reason is not None
        after_step = time.perf_counter()
        clock.count(
            [output for output in outputs if isinstance(output, TokenOutput)],
            first_tokens,
            after_step - before_step,
            phases_before,
            core.stats.phase_seconds,
        )
        before_step = after_step
    return Run(
        num_tokens=sum(map(len, token_ids)),
        seconds=time.perf_counter() - started,
        num_rounds=clock.num_rounds,
        num_draft_tokens=clock.num_draft_tokens,
        num_accepted_tokens=clock.num_accepted_tokens,
        token_ids=token_ids,
        steps=clock.full_steps(),
    )


class _StepClock:
    """Sums over one run. A step is full if every row is there and decodes: no prompt, none finished."""

    def __init__(self, num_rows: int) -> None:
        self.num_rounds = self.num_draft_tokens = self.num_accepted_tokens = 0
        self._num_rows = num_rows
        self._num_full = self._num_tokens = self._num_drafted = 0
        self._seconds = 0.0
        self._phases = dict.fromkeys(PHASES, 0.0)

    def count(
        self,
        outputs: Sequence[TokenOutput],
        first_tokens: bool,
        seconds: float,
        before: Mapping[str, float],
        after: Mapping[str, float],
    ) -> None:
        num_drafted = sum(output.num_draft_tokens for output in outputs)
        self.num_rounds += sum(output.num_rounds for output in outputs if output.num_draft_tokens)
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += sum(output.num_accepted_tokens for output in outputs)
        if first_tokens or len(outputs) < self._num_rows:
            return
        self._num_full += outputs[0].num_rounds
        self._num_tokens += sum(len(output.token_ids) for output in outputs)
        self._num_drafted += num_drafted
        self._seconds += seconds
        for name in PHASES:
            self._phases[name] += after[name] - before[name]

    def full_steps(self) -> StepTimes:
        return StepTimes(
            num_rounds=self._num_full,
            num_rows=self._num_rows,
            num_tokens=self._num_tokens,
            num_draft_tokens=self._num_drafted,
            seconds=self._seconds,
            **self._phases,
        )

"""Tests that greedy text and its log-probabilities are those of plain decoding, token by token.

This module knows token ids only; ``check`` uses it.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from truedraft.engine.core.engine import EngineCore
from truedraft.engine.library.completion import Completion
from truedraft.engine.messages import Failed, Generate, SamplingParams, TokenOutput


class EngineFailedError(Exception):
    """The engine ended a request with an error, which it never does with a sound model."""


class Resolution(NamedTuple):
    """Says how close two logits may be to change places, and how far apart log-probabilities may be. With 0
    nothing is excused, and bits must be the same."""

    ties: float
    gaps: float


@dataclass(frozen=True)
class GreedyResult:
    """Counts differences between greedy texts.

    ``near_ties`` are places where two logits are closer than floating point resolves, which excuses a
    difference; ``differences`` describes those without an excuse; ``largest_gap`` is the largest difference
    of log-probabilities.
    """

    num_tokens: int = 0
    near_ties: int = 0
    differences: list[str] = field(default_factory=list)
    largest_gap: float = 0.0
    name: str = "greedy text"

    @property
    def failure(self) -> str:
        return f"{self.name} differs: {self.differences[0]}" if self.differences else ""

    @property
    def in_words(self) -> str:
        words = "identical to plain decoding" if not self.differences else "DIFFERENT from plain decoding"
        words += f", {self.num_tokens} tokens compared, log-probabilities {in_words(self.largest_gap)}"
        return words + (f"; {self.near_ties} near ties left aside" if self.near_ties else "")


def outputs(
    core: EngineCore, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
) -> Iterator[TokenOutput]:
    """Decodes all prompts together, with their numbers as request ids."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    return answers(core, [Generate(str(i), *one) for i, one in enumerate(zip(prompts, each, strict=True))])


def answers(core: EngineCore, requests: Sequence[Generate]) -> Iterator[TokenOutput]:
    """Decodes the requests together; raises ``EngineFailedError`` if one fails."""
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            if isinstance(output, Failed):
                raise EngineFailedError(output.message)
            yield output


def run(
    core: EngineCore, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Completion]:
    completions = [Completion() for _ in prompts]
    for output in outputs(core, prompts, params):
        completions[int(output.request_id)].add(output)
    return completions


def check_greedy(
    core: EngineCore,
    prompts: list[list[int]],
    lengths: Sequence[int],
    max_tokens: int,
    resolution: Resolution,
    grammar: str | None = None,
) -> GreedyResult:
    """Compares speculative with plain decoding of the same engine, at temperature 0."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0, logprobs=2, num_speculative_tokens=0, grammar=grammar
    )
    plain = run(core, prompts, params)
    result = GreedyResult(name="greedy text" if grammar is None else "greedy text of a grammar")
    for length in lengths:
        speculative = run(core, prompts, msgspec.structs.replace(params, num_speculative_tokens=length))
        result = compared(result, plain, speculative, resolution, f"{length} drafted tokens")
    return result


def compared(
    result: GreedyResult, plain: list[Completion], others: list[Completion], resolution: Resolution, how: str
) -> GreedyResult:
    """Adds to ``result`` the differences of ``others``, answers to the same prompts; ``how`` says how they
    were computed."""
    num_tokens, near_ties, differences = result.num_tokens, result.near_ties, list(result.differences)
    gaps: list[float] = []
    for number, (expected, got) in enumerate(zip(plain, others, strict=True)):
        num_tokens += len(expected.token_ids)
        place = _first_difference(expected.token_ids, got.token_ids)
        for one, other in zip(expected.logprobs[:place], got.logprobs[:place], strict=False):
            gaps.append(abs(one.logprob - other.logprob))
        if place is None:
            continue
        if _margin(expected, place) <= resolution.ties:
            near_ties += 1
        else:
            differences.append(f"prompt {number}, {how}: token {place + 1} differs")
    if is_wide(gaps, resolution.gaps):
        differences.append(f"{how}: log-probabilities differ by up to {max(gaps):.2g}")
    largest = max([result.largest_gap, *gaps])
    return GreedyResult(num_tokens, near_ties, differences, largest, result.name)


def in_words(largest_gap: float) -> str:
    return f"within {largest_gap:.1g}" if largest_gap else "bit for bit"


def is_wide(gaps: Sequence[float], limit: float) -> bool:
    """Tells whether log-probabilities are further apart than floating point explains. Where bits must be the
    same, this holds for all tokens; where they may differ, a rounded number may choose other experts now and
    then."""
    if not gaps:
        return False
    return (statistics.fmean(gaps) if limit else max(gaps)) > limit


def _first_difference(expected: list[int], got: list[int]) -> int | None:
    for place, (ours, theirs) in enumerate(zip(expected, got, strict=False)):
        if ours != theirs:
            return place
    return None if len(expected) == len(got) else min(len(expected), len(got))


def _margin(completion: Completion, place: int) -> float:
    """Returns by how much the best logit exceeded the second."""
    if place >= len(completion.logprobs):
        return float("inf")
    top = completion.logprobs[place].top
    return top[0][1] - top[1][1] if len(top) > 1 else float("inf")

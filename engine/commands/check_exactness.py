"""Tests that a loaded pair is exact: greedy identity, and a chi-square test against the target's own law.

The expected distribution comes from fresh forwards (``models.fresh``), the observed one from the engine with
fixed seeds, so the same pair always gives the same answer. Knows token ids only; used by ``check``.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from truedraft.engine.core.engine import EngineCore
from truedraft.engine.llm import Completion
from truedraft.engine.messages import Failed, Generate, SamplingParams, TokenOutput, Verification
from truedraft.engine.models.hf.fresh import FreshModel, adjusted, processed

# A correct engine fails a test by chance once in a hundred thousand pairs.
SIGNIFICANCE = 1e-5
MIN_EXPECTED = 5.0
# Few enough cells that a few thousand samples fill them.
TESTED = SamplingParams(max_tokens=4, top_k=4, ignore_eos=True)
NUM_TESTED_TOKENS = 3
# The first of these that spreads the samples over enough cells: a test of one likely text proves little.
TEMPERATURES = (1.0, 1.5, 2.25, 3.5, 5.0)
ENOUGH_CELLS = 24
Law = dict[tuple[int, ...], float]


class EngineFailedError(Exception):
    """The engine gave up on a request, which no sound model makes it do."""


@dataclass(frozen=True)
class GreedyResult:
    """``near_ties``: places where two logits are closer than floating point resolves, which excuse a
    difference; ``differences`` are inexcusable ones, in words."""

    num_tokens: int
    near_ties: int
    differences: list[str]


@dataclass(frozen=True)
class ChiSquareResult:
    verification: str
    temperature: float
    num_samples: int
    num_cells: int
    p_value: float
    acceptance_rate: float

    @property
    def passed(self) -> bool:
        return self.p_value > SIGNIFICANCE


def outputs(
    core: EngineCore, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
) -> Iterator[TokenOutput]:
    """Decodes all prompts together, with their numbers as request ids."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    return answers(core, [Generate(str(i), *one) for i, one in enumerate(zip(prompts, each, strict=True))])


def answers(core: EngineCore, requests: Sequence[Generate]) -> Iterator[TokenOutput]:
    """Decodes the requests together; ``EngineFailedError`` if one fails."""
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
    resolution: float,
    grammar: str | None = None,
) -> GreedyResult:
    """Speculative against plain decoding of the same engine, at temperature 0, token by token. Without a
    ``resolution`` nothing is excused, and no log-probabilities are asked for, so that rounds may run in C."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        logprobs=2 if resolution else None,
        num_speculative_tokens=0,
        grammar=grammar,
    )
    plain = run(core, prompts, params)
    result = GreedyResult(0, 0, [])
    for length in lengths:
        speculative = run(core, prompts, msgspec.structs.replace(params, num_speculative_tokens=length))
        result = compared(result, plain, speculative, resolution, f"{length} drafted tokens")
    return result


def compared(
    result: GreedyResult, plain: list[Completion], others: list[Completion], resolution: float, how: str
) -> GreedyResult:
    """Adds to ``result`` what ``others`` of the same prompts show; ``how`` says how they were computed."""
    num_tokens, near_ties, differences = result.num_tokens, result.near_ties, list(result.differences)
    for number, (expected, got) in enumerate(zip(plain, others, strict=True)):
        num_tokens += len(expected.token_ids)
        place = _first_difference(expected.token_ids, got.token_ids)
        if place is None:
            continue
        if _margin(expected, place) <= resolution:
            near_ties += 1
        else:
            differences.append(f"prompt {number}, {how}: token {place + 1} differs")
    return GreedyResult(num_tokens, near_ties, differences)


def _first_difference(expected: list[int], got: list[int]) -> int | None:
    for place, (ours, theirs) in enumerate(zip(expected, got, strict=False)):
        if ours != theirs:
            return place
    return None if len(expected) == len(got) else min(len(expected), len(got))


def _margin(completion: Completion, place: int) -> float:
    """Returns how far the best logit was ahead of the second."""
    if place >= len(completion.logprobs):
        return float("inf")
    top = completion.logprobs[place].top
    return top[0][1] - top[1][1] if len(top) > 1 else float("inf")


def expected_law(target: FreshModel, prompt: list[int], num_samples: int) -> tuple[SamplingParams, Law]:
    """Returns how to sample, and the exact distribution of the first ``NUM_TESTED_TOKENS`` tokens then."""
    logits: dict[tuple[int, ...], torch.Tensor] = {}
    for temperature in TEMPERATURES:
        params = msgspec.structs.replace(TESTED, temperature=temperature)
        law = _law(target, prompt, params, logits)
        common = sum(probability * num_samples >= MIN_EXPECTED for probability in law.values())
        if common >= ENOUGH_CELLS:
            break
    return params, law


def _law(
    target: FreshModel, prompt: list[int], params: SamplingParams, known: dict[tuple[int, ...], torch.Tensor]
) -> Law:
    """``known``: logits after the tokens seen so far, added to."""
    law: Law = {(): 1.0}
    for _ in range(NUM_TESTED_TOKENS):
        longer: Law = {}
        for tokens, probability in law.items():
            history = target.history(params, prompt, list(tokens), frozenset())
            if tokens not in known:
                known[tokens] = target.logits(
                    history.token_ids, target.vocab_size, num_encoder_tokens=history.num_encoder_tokens
                )[-1:]
            row = processed(adjusted(known[tokens], history, []), params)[0]
            for token_id in row.nonzero().flatten().tolist():
                longer[*tokens, token_id] = probability * float(row[token_id])
        law = longer
    return law


def check_law(
    core: EngineCore,
    prompt: list[int],
    tested: SamplingParams,
    law: Law,
    verification: Verification,
    num_samples: int,
) -> ChiSquareResult:
    """``num_samples`` seeds through the engine; the first token is drawn plainly, the others are drafted."""
    params = [
        msgspec.structs.replace(tested, seed=seed, verification=verification) for seed in range(num_samples)
    ]
    completions = run(core, [prompt] * num_samples, params)
    counts = Counter(tuple(completion.token_ids[:NUM_TESTED_TOKENS]) for completion in completions)
    drafted = sum(completion.num_draft_tokens for completion in completions)
    accepted = sum(completion.num_accepted_tokens for completion in completions)
    p_value, num_cells = chi_square(counts, law)
    return ChiSquareResult(
        verification, tested.temperature, num_samples, num_cells, p_value, accepted / max(1, drafted)
    )


def chi_square(counts: Counter[tuple[int, ...]], law: Law) -> tuple[float, int]:
    """Pearson's test: p-value and number of cells. Cells that expect fewer than five are taken together;
    what cannot occur must not occur, except by a hair's breadth at a cut (one in a thousand)."""
    num_samples = sum(counts.values())
    impossible = sum(count for tokens, count in counts.items() if tokens not in law)
    if impossible > num_samples / 1000:
        return 0.0, len(law)
    cells = [(counts[tokens], probability * num_samples) for tokens, probability in law.items()]
    common = [cell for cell in cells if cell[1] >= MIN_EXPECTED]
    rare = [cell for cell in cells if cell[1] < MIN_EXPECTED]
    if rare:
        common.append((sum(count for count, _ in rare), sum(expected for _, expected in rare)))
    if len(common) == 1:
        return 1.0, 1
    statistic = sum((count - expected) ** 2 / expected for count, expected in common)
    degrees = torch.tensor((len(common) - 1) / 2, dtype=torch.float64)
    tail = torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64))
    return float(tail), len(common)

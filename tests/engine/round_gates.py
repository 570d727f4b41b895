"""What must hold of captured rounds, as functions that raise ``AssertionError``: all that is told of every
step is what it is phase by phase, and so are the caches. On tapes and on real graphs."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch

from engine import graph_plan
from engine.core.engine import EngineCore
from engine.core.stats import EngineStats
from engine.messages import Failed, Generate, SamplingParams, TokenOutput
from engine.models import step_buckets
from engine.models.captured_round import CapturedRound
from engine.models.graph_capture import Capture
from engine.models.lean_decoder import LeanDecoder
from engine.sampling.adjust import History
from engine.sampling.captured_draw import DrawKind, DrawTensors, draw_rows
from engine.sampling.captured_verify import captured_verify
from engine.sampling.random import counters
from engine.sampling.sampler import Drafts, Row, Rule, Sampler
from engine.sampling.verify import RowVerdict
from tests.engine.conftest import Models
from tests.models import make_engine
from tests.tape import TapeCapture

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], list(range(16)) * 2, [2, 2]]
BLOCK_SIZE = 4
# A tape holds torch's operations only. All that is planned is captured, however slow the machine is.
SETTINGS: dict[str, Any] = {
    "native_kernels": False,
    "max_num_sequences": 5,
    "num_speculative_tokens": 5,
    "prefix_caching": False,
    "cuda_graph_seconds": 6000,
}
Outputs = list[list[TokenOutput | Failed]]


def each(number: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 15 + 7 * number, "seed": number, **fields})


PARAMS = {
    "greedy": [SamplingParams(max_tokens=40, temperature=0)] * 5,
    "seeded": [SamplingParams(max_tokens=40, temperature=1.1, seed=i) for i in range(5)],
    "of several temperatures": [each(i, temperature=0.4 * i) for i in range(5)],
    "cut": [each(i, temperature=0.9, top_k=3 * (i % 3), top_p=0.7 + 0.1 * (i % 4)) for i in range(5)],
    "cut by min-p": [each(i, temperature=1.5, min_p=0.1 * i) for i in range(5)],
    "of several lengths, 0 among them": [
        each(i, temperature=0.7 * (i % 2), num_speculative_tokens=i) for i in range(5)
    ],
    "without drafts": [each(i, temperature=0.7 * (i % 3), num_speculative_tokens=0) for i in range(5)],
    "ending by stops": [each(i, temperature=0.5 * (i % 2), stop_token_ids=[3 * i, 7]) for i in range(5)],
    "ending by length": [each(i, temperature=0.5 * (i % 2), max_tokens=1 + 3 * i) for i in range(5)],
}


@dataclass
class Twins:
    """Engines with captured rounds and without, alike in all else, chains included."""

    captured: EngineCore
    usual: EngineCore

    def __iter__(self) -> Iterator[EngineCore]:
        yield from (self.captured, self.usual)

    @property
    def rounds(self) -> CapturedRound:
        assert self.captured.target.captured_round is not None
        return self.captured.target.captured_round


def make_twins(
    make: Callable[..., EngineCore],
    capture: Callable[[torch.device], Capture | None],
    target: str,
    draft: str | None,
    **config: Any,
) -> Twins:
    """Others have been in their caches: what they left must not matter."""
    config = {**SETTINGS, **config}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_plan, "make_capture", capture)
        patch.setattr(step_buckets, "QUERIES", (1, 2))
        captured = make(target, draft, **config)
        patch.setattr(graph_plan, "plan_rounds", lambda *_: [])
        usual = make(target, draft, **config)
    assert usual.target.graphs is not None
    assert usual.target.captured_round is None
    for core in (captured, usual):
        for part in stored(core):
            part.fill_(torch.nan)
    return Twins(captured, usual)


def taped_twins(models: Models, draft: str | None = "close_draft", **config: Any) -> Twins:
    path = None if draft is None else getattr(models, draft)
    return make_twins(make_engine, TapeCapture, models.target, path, **config)


def stored(core: EngineCore) -> list[torch.Tensor]:
    """All that the caches hold."""
    proposer = core.proposer.draft_model
    models = [core.target] if proposer is None else [core.target, proposer.model]
    caches = [model.cache for model in models if model.cache is not None]
    return [part for cache in caches for part in (*cache.keys, *cache.values)]


def run(
    core: EngineCore,
    params: Sequence[SamplingParams],
    arrivals: Sequence[int] = (),
    aborts: dict[int, str] | None = None,
    prediction: list[int] | None = None,
) -> Outputs:
    """What is told of each step. Prompt i, by seed i if it has none, comes before step ``arrivals[i]``, 0 if
    nothing is said; before the steps in ``aborts`` their requests are aborted."""
    seeded = [msgspec.structs.replace(p, seed=i if p.seed is None else p.seed) for i, p in enumerate(params)]
    waiting = [
        (arrivals[i] if arrivals else 0, Generate(str(i), PROMPTS[i], own, prediction_token_ids=prediction))
        for i, own in enumerate(seeded)
    ]
    steps: Outputs = []
    while waiting or core.has_work:
        while waiting and (waiting[0][0] <= len(steps) or not core.has_work):
            core.add(waiting.pop(0)[1])
        if aborts and len(steps) in aborts:
            core.abort(aborts[len(steps)])
        steps.append([_without_times(output) for output in core.step()])
    assert core.scheduler.target_pool.usage == 0
    return steps


def _without_times(output: TokenOutput | Failed) -> TokenOutput | Failed:
    return output if isinstance(output, Failed) else msgspec.structs.replace(output, queue_seconds=None)


def same_rounds(twins: Twins, params: Sequence[SamplingParams], **how: Any) -> Outputs:
    before = twins.rounds.num_replays
    for core in twins:
        core.stats = EngineStats()
    (ours, theirs) = (run(core, params, **how) for core in twins)
    assert ours == theirs
    one, other = (core.stats for core in twins)
    assert one.drafts == other.drafts
    assert one.draft_tokens_per_position == other.draft_tokens_per_position
    assert one.accepted_tokens_per_position == other.accepted_tokens_per_position
    assert twins.rounds.num_replays > before
    for mine, its in zip(stored(twins.captured), stored(twins.usual), strict=True):
        assert torch.allclose(
            mine[:-BLOCK_SIZE].float(), its[:-BLOCK_SIZE].float(), rtol=1e-3, atol=1e-4, equal_nan=True
        )
    return ours


@contextmanager
def nothing_follows(twins: Twins, token_id: int) -> Iterator[None]:
    """To the targets: what they compute behind this token is NaN. A draft may still go on."""
    weights = []
    for core in twins:
        assert isinstance(core.target.short_forward, LeanDecoder)
        weights.append(core.target.short_forward.embeddings)
    kept = [weight[token_id].clone() for weight in weights]
    with torch.inference_mode():
        for weight in weights:
            weight[token_id] = torch.nan
        yield
        for weight, row in zip(weights, kept, strict=True):
            weight[token_id] = row


def broken_rows_fail_alike(twins: Twins, params: Sequence[SamplingParams]) -> None:
    """Where the target has no distribution its row fails, in the same step as phase by phase."""
    outputs: list[TokenOutput | Failed] = []
    for token_id in range(0, 16, 3):
        with nothing_follows(twins, token_id):
            outputs += [output for step in same_rounds(twins, params) for output in step]
    assert any(isinstance(output, Failed) for output in outputs)
    assert any(isinstance(output, TokenOutput) and output.finish_reason for output in outputs)


# The verdict alone.

VERDICT_ROWS = [
    SamplingParams(max_tokens=1, temperature=0),
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=1, temperature=0.6, top_k=5),
    SamplingParams(max_tokens=1, temperature=1.4, top_p=0.8),
    SamplingParams(max_tokens=1, temperature=1.1, min_p=0.1),
    SamplingParams(max_tokens=1, temperature=0.9, top_k=9, top_p=0.9, min_p=0.02),
    SamplingParams(max_tokens=1, temperature=0, top_k=3),
    SamplingParams(max_tokens=1, temperature=1e-3),
]
Verify = Callable[..., Any]


def verdicts_are_the_samplers(
    device: torch.device, verify: Verify = captured_verify, num_rounds: int = 40, vocab_size: int = 50
) -> None:
    """Of random logits, some of them broken, and drafts that stand up to anywhere, of any length; behind
    their ends lie the tokens that would have stood."""
    choose = random.Random(1)
    generator = torch.Generator().manual_seed(1)
    num_failed = 0
    for number in range(num_rounds):
        kind = DrawKind(number % 3)
        rows = [row for row in VERDICT_ROWS if _kind(row) <= kind]
        k = choose.choice([0, 1, 3, 5])
        logits = torch.randn(len(rows), k + 1, vocab_size, generator=generator).to(device) * 3
        sampler = Sampler([_row(choose, row) for row in rows], vocab_size, device)
        own = _own_tokens(sampler, logits)
        drafted = own[:, :-1].clone()
        for row in range(len(rows)):
            for _ in range(choose.randint(0, 1) if k else 0):
                drafted[row, choose.randrange(k)] = choose.randrange(vocab_size)
            for _ in range(choose.randint(0, 1)):
                at = choose.randrange(k + 1)
                logits[row, at] = choose.choice([torch.nan, torch.inf, -torch.inf])
        lengths = [choose.choice([k, choose.randint(0, k)]) for _ in rows]
        expected = _judged(sampler, logits, drafted, lengths)
        numbers = draw_rows(sampler)
        assert numbers is not None
        found = verify(
            kind,
            logits,
            DrawTensors(*(torch.tensor(column, device=device) for column in zip(*numbers, strict=True))),
            sampler.positions,
            drafted,
            torch.tensor(lengths, device=device),
            counters(vocab_size, device),
        )
        for verdict, *ours in zip(expected, *(column.tolist() for column in found), strict=True):
            assert bool(ours[2]) == verdict.failed
            assert verdict.failed or tuple(ours[:2]) == verdict[:2]
            num_failed += verdict.failed
    assert num_failed > num_rounds // 4


def _kind(params: SamplingParams) -> DrawKind:
    if params.temperature == 0:
        return DrawKind.GREEDY
    return DrawKind.CUT if params.top_k or params.top_p < 1 or params.min_p else DrawKind.SAMPLED


def _row(choose: random.Random, params: SamplingParams) -> Row:
    history = History(params, [1] * choose.randint(1, 90), 1, frozenset())
    rule = Rule.COUPLED if params.temperature else Rule.EXACT_MATCH
    return Row(rule, choose.randrange(-(1 << 63), 1 << 63), history)


def _own_tokens(sampler: Sampler, logits: torch.Tensor) -> torch.Tensor:
    """What the usual verdict lets follow if all before it stands: [rows, positions]."""
    own = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
    for position in range(logits.shape[1]):
        lengths = [position] * len(own)
        verdicts = _judged(sampler, logits[:, : position + 1], own[:, :position], lengths)
        assert [verdict.num_accepted for verdict in verdicts] == lengths
        own[:, position] = torch.tensor([verdict.next_token for verdict in verdicts], device=own.device)
    return own


def _judged(
    sampler: Sampler, logits: torch.Tensor, drafted: torch.Tensor, lengths: list[int]
) -> list[RowVerdict]:
    packed = torch.cat([row[: length + 1] for row, length in zip(logits, lengths, strict=True)])
    width = max(lengths)
    return sampler.verify(packed, Drafts(drafted[:, :width].contiguous(), None, lengths))

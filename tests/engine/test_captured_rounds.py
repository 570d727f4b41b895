"""Captured rounds tell what the phases tell, step by step; a way back if they do not.

On a CPU a tape stands in for CUDA graphs (``tests.tape``). ``test_cuda`` runs the same gates on real graphs.
"""

import logging
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

import tests.models
from engine import captured_rounds, graph_plan
from engine.core import EngineCore
from engine.draft_length.rounds import RoundSeconds
from engine.messages import Failed, SamplingParams, TokenOutput
from engine.models import captured_round, round_inputs, step_buckets
from engine.models.captured_round import CapturedRound
from engine.models.round_inputs import MAX_DRAWN, RoundBucket, plan_rounds, smallest_round
from engine.models.step_buckets import Bucket
from engine.models.step_graphs import StepGraphs
from engine.sampling import captured_draw, captured_verify
from engine.sampling.captured_draw import DrawKind, DrawTensors
from tests.engine import gates
from tests.engine.conftest import Models
from tests.engine.round_gates import (
    PROMPTS,
    SETTINGS,
    Twins,
    broken_rows_fail_alike,
    make_twins,
    run,
    same_rounds,
    verdicts_are_the_samplers,
)
from tests.models import make_engine, run_engine
from tests.tape import TapeCapture

Patch = pytest.MonkeyPatch
CPU = torch.device("cpu")


def taped_twins(models: Models, draft: str | None = "close_draft", **config: Any) -> Twins:
    path = None if draft is None else getattr(models, draft)
    return make_twins(make_engine, TapeCapture, models.target, path, **config)


@pytest.fixture(scope="module")
def twins(models: Models) -> Twins:
    """Idle, and used by many tests: none of them changes what they are."""
    return taped_twins(models)


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


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_same_rounds(params: list[SamplingParams], twins: Twins) -> None:
    same_rounds(twins, params)


@pytest.mark.parametrize("draft", ["lacking_draft", "padded_draft", "random_draft", "target"])
def test_other_drafts(draft: str, models: Models) -> None:
    twins = taped_twins(models, draft)
    for name in ("greedy", "cut", "ending by stops", "ending by length"):
        same_rounds(twins, PARAMS[name])
    stats = twins.captured.stats
    assert (stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens) == (draft == "target")


def test_without_a_draft_model(models: Models) -> None:
    twins = taped_twins(models, None)
    same_rounds(twins, PARAMS["cut"])


def test_beside_rows_that_others_draft_for(models: Models) -> None:
    twins = make_twins(gates.rotating_engine, TapeCapture, models.target, models.close_draft)
    same_rounds(twins, PARAMS["seeded"], prediction=list(range(16)))
    assert set(twins.captured.stats.drafts) == {"draft_model", "ngram", "prediction"}


def test_arrivals_between_rounds(twins: Twins) -> None:
    same_rounds(twins, PARAMS["of several temperatures"], arrivals=[0, 0, 3, 5, 6])


@pytest.mark.parametrize("aborts", [{3: "1"}, {2: "0", 5: "3", 6: "4"}])
def test_aborts_between_rounds(aborts: dict[int, str], twins: Twins) -> None:
    same_rounds(twins, PARAMS["seeded"], aborts=aborts)


def test_preemption_and_prefix_hits(models: Models) -> None:
    # 30 blocks of 4 tokens in each cache, for five sequences of up to 57.
    twins = taped_twins(models, cache_memory=30 * 4 * 2 * 256, prefix_caching=True)
    params = [msgspec.structs.replace(p, max_tokens=25) for p in PARAMS["seeded"]]
    same_rounds(twins, params, arrivals=[0, 2, 4, 6, 8])
    same_rounds(twins, params)
    assert twins.captured.scheduler.num_preemptions > 0
    assert twins.captured.scheduler.num_prefix_hits > 0


@pytest.mark.parametrize("name", ["greedy", "of several temperatures"])
def test_logits_that_are_no_distribution(name: str, models: Models) -> None:
    broken_rows_fail_alike(taped_twins(models), PARAMS[name])


@pytest.mark.parametrize("draft_length", ["auto", 3])
def test_text_is_that_without_graphs_and_drafts(draft_length: str | int, models: Models) -> None:
    config = {**SETTINGS, "num_speculative_tokens": draft_length}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_plan, "make_capture", TapeCapture)
        core = make_engine(models.target, models.close_draft, **config)
    plain = make_engine(models.target, None, **SETTINGS)
    for name in ("greedy", "seeded", "cut"):
        assert run_engine(core, PROMPTS, PARAMS[name]) == run_engine(plain, PROMPTS, PARAMS[name])
    assert core.target.captured_round is not None
    assert core.target.captured_round.num_replays > 0


BY_PHASE = {
    "rejection": {"verification": "rejection"},
    "block": {"verification": "block"},
    "trace": {"trace": True},
    "penalty": {"presence_penalty": 0.5},
    "bias": {"logit_bias": {3: 2.0}},
    "log-probabilities": {"logprobs": 2},
}


@pytest.mark.parametrize("fields", BY_PHASE.values(), ids=BY_PHASE.keys())
def test_rows_that_ask_for_more_go_phase_by_phase(fields: dict[str, Any], twins: Twins) -> None:
    """And so do those beside them."""
    asking = SamplingParams(max_tokens=30, seed=9, **fields)
    same_rounds(twins, [*PARAMS["seeded"][:4], asking])
    others = twins.rounds.num_replays
    ours, theirs = (run(core, [asking]) for core in twins)
    assert ours == theirs
    assert twins.rounds.num_replays == others


def test_prompt_logprobs_of_a_last_chunk_of_one_token(twins: Twins) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=1)
    for core in twins:
        core.scheduler.max_num_batched_tokens = 6
    try:
        same_rounds(twins, [params] * 3)  # the third prompt has 7 tokens
    finally:
        for core in twins:
            core.scheduler.max_num_batched_tokens = 4096


def test_a_least_length_goes_phase_by_phase_until_it_is_reached(twins: Twins) -> None:
    same_rounds(twins, [SamplingParams(max_tokens=30, seed=9, min_tokens=12, stop_token_ids=[1, 2, 3, 4])])


# What the host waits for.


def test_the_host_reads_once_a_round(twins: Twins, monkeypatch: Patch) -> None:
    looks = count()
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__"):
        honest = getattr(torch.Tensor, name)

        def look(self: torch.Tensor, honest: Callable[..., Any] = honest) -> Any:
            next(looks)
            return honest(self)

        monkeypatch.setattr(torch.Tensor, name, look)
    core = twins.captured
    for name in ("greedy", "seeded", "cut", "of several lengths, 0 among them"):
        for i, params in enumerate(PARAMS[name]):
            core.add(tests.models.Generate(str(i), PROMPTS[i], params))
        core.step()
        while core.has_work:
            replays, before = twins.rounds.num_replays, next(looks)
            core.step()
            assert twins.rounds.num_replays == replays + 1
            assert next(looks) == before + 2  # one, beside our own


class Told:
    """What a planner is told of a step's seconds."""

    def __init__(self, core: EngineCore, patch: Patch) -> None:
        self.seconds: list[RoundSeconds | None] = []
        planner = core.scheduler.planner
        observe = planner.observe

        def observed(outcomes: Any, seconds: RoundSeconds | None) -> None:
            self.seconds.append(seconds)
            observe(outcomes, seconds)

        patch.setattr(planner, "observe", observed)


def test_seconds_are_the_devices(twins: Twins, monkeypatch: Patch) -> None:
    marks = iter(t + start for start in count(0, 100) for t in (0.0, 2.0, 7.0))
    monkeypatch.setattr(TapeCapture, "mark", lambda self: next(marks))
    core, told = twins.captured, Told(twins.captured, monkeypatch)
    before = dict(core.stats.phase_seconds)
    replays = twins.rounds.num_replays
    run(core, PARAMS["greedy"])
    num_rounds = twins.rounds.num_replays - replays
    rounds = [one for one in told.seconds if one is not None]
    assert len(rounds) == num_rounds > 5
    assert {(one.draft, one.score) for one in rounds} == {(2.0, 5.0)}
    spent = {name: core.stats.phase_seconds[name] - before[name] for name in before}
    assert spent["draft"] == pytest.approx(2 * num_rounds, abs=1)  # and what the prompts took
    assert spent["score"] == pytest.approx(5 * num_rounds, abs=1)
    assert sum(spent.values()) < 100  # the host's clock has not seen any of it


# A way back.


@pytest.fixture
def taped(monkeypatch: Patch) -> None:
    monkeypatch.setattr(graph_plan, "make_capture", TapeCapture)
    monkeypatch.setattr(step_buckets, "QUERIES", (1, 2))
    monkeypatch.setattr(graph_plan, "plan_chains", lambda *_: [])


def goes_phase_by_phase(core: EngineCore, models: Models) -> None:
    assert core.target.captured_round is None
    assert isinstance(core.target.graphs, StepGraphs)
    assert core.target.graphs.enabled
    plain = make_engine(models.target, None, **SETTINGS)
    for name in ("greedy", "seeded"):
        assert run_engine(core, PROMPTS, PARAMS[name]) == run_engine(plain, PROMPTS, PARAMS[name])


def test_what_cannot_be_captured_goes_phase_by_phase(
    models: Models, taped: None, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    def looks(kind: DrawKind, logits: torch.Tensor, *others: object) -> torch.Tensor:
        return logits.new_tensor([int(row.argmax()) for row in logits], dtype=torch.int64)

    monkeypatch.setattr(captured_verify, "captured_draw", looks)
    with caplog.at_level(logging.WARNING):
        core = make_engine(models.target, models.close_draft, **SETTINGS)
    assert "Rounds cannot be captured and are not used: operation not permitted" in caplog.text
    goes_phase_by_phase(core, models)


def test_what_the_time_does_not_allow_goes_phase_by_phase(
    models: Models, taped: None, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(captured_round, "check_texts", lambda *_: [])  # nothing fits
    goes_phase_by_phase(make_engine(models.target, models.close_draft, **SETTINGS), models)


def test_disabled_with_the_passes(twins: Twins, monkeypatch: Patch) -> None:
    monkeypatch.setattr(twins.captured.target.graphs, "enabled", False)
    before = twins.rounds.num_replays
    ours, theirs = (run(core, PARAMS["cut"]) for core in twins)
    assert ours == theirs
    assert twins.rounds.num_replays == before


def test_rounds_of_a_shape_that_was_not_captured_go_phase_by_phase(twins: Twins, monkeypatch: Patch) -> None:
    rounds = twins.rounds
    few = {b: replay for b, replay in rounds.replays.items() if b.kind is DrawKind.GREEDY}
    monkeypatch.setattr(rounds, "replays", few)
    monkeypatch.setattr(rounds, "_chosen", {})
    before = rounds.num_replays, rounds.num_misses
    same_rounds(twins, [each(0, temperature=0.5), each(3, temperature=0)])
    assert rounds.num_replays > before[0]  # a greedy row alone
    assert rounds.num_misses > before[1]


# Planted bugs: the module, what is right in it, what is wrong, whether the comparison at start sees it too.

AT_START, LATER = True, False
LINES = {
    "noise of the position before": (
        captured_verify,
        "first_positions[:, None] + offsets",
        "first_positions[:, None] + offsets - 1",
        AT_START,
    ),
    "noise of a row's first position": (
        captured_verify,
        "first_positions[:, None] + offsets",
        "first_positions[:, None] + 0 * offsets",
        AT_START,
    ),
    "padding is compared": (
        captured_verify,
        "(own[:, :-1] == drafted) & (offsets[:-1] < num_draft[:, None])",
        "own[:, :-1] == drafted",
        LATER,
    ),
    "drafts stand behind one that does not": (captured_verify, ".cumprod(-1).sum(-1)", ".sum(-1)", LATER),
    "a row's numbers go to the next row": (
        captured_verify,
        "rows.repeated(num_positions)",
        "DrawTensors(*(column.repeat(num_positions) for column in rows))",
        AT_START,
    ),
    "the first token follows": (
        captured_verify,
        "own.gather(1, num_accepted[:, None])[:, 0]",
        "own[:, 0]",
        AT_START,
    ),
    "all fail that are not needed": (captured_verify, "(is_broken & is_needed)", "is_broken", LATER),
    "the last position may be broken": (
        captured_verify,
        "offsets <= num_accepted[:, None]",
        "offsets < num_accepted[:, None]",
        LATER,
    ),
    "infinity is a number": (captured_verify, "~logits.amax(-1).isfinite()", "logits.amax(-1).isnan()", LATER),
    "positions one too far": (round_inputs, "last = first + num_draft", "last = first + num_draft + 1", LATER),
    "drawn one too early": (round_inputs, "DrawTensors.unpack(draws), first + 1,", "DrawTensors.unpack(draws), first,", AT_START),
    "padding is stored": (round_inputs, "block = torch.where(is_token, block, self.scratch_block)", "", AT_START),
    "slots without the table": (round_inputs, "slots = block * self.block_size + positions % self.block_size", "slots = positions", AT_START),
    "all rows draft alike": (round_inputs, "counts[:] = [*num_draft, *padding]", "counts[:] = [max(num_draft, default=0)] * len(counts)", LATER),
    "one seed for all": (round_inputs, "pack(rows, draws)", "pack(rows[:1] * len(rows), draws)", AT_START),
    "pending tokens of the round before": (round_inputs, "known[:] = [*pending, *padding]", "", AT_START),
    "drafts of the round before": (captured_round, "if drafts.numel():", "if False:", AT_START),
    "the verdict of the round before": (captured_round, "numbers = self._verdicts(bucket)[: len(num_draft)].tolist()", "numbers = getattr(self, 'kept', self._verdicts(bucket)[: len(num_draft)]).tolist()\n        self.kept = self._verdicts(bucket)[: len(num_draft)].clone()", AT_START),
    "fewer tokens are computed": (captured_round, "table.num_computed_tokens += count + 1", "table.num_computed_tokens += count", LATER),
}  # fmt: skip


def planted(module: ModuleType, right: str, wrong: str) -> dict[str, Any]:
    """The module's names with one of its lines changed."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(right) == 1
    names = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(source.replace(right, wrong), module.__file__, "exec"), names)
    return names


def plant(name: str, patch: Patch) -> None:
    module, right, wrong, _ = LINES[name]
    names = planted(module, right, wrong)
    if module is captured_verify:
        patch.setattr(captured_round, "captured_verify", names["captured_verify"])
    elif module is round_inputs:
        for method in ("send", "batch"):
            patch.setattr(round_inputs.RoundInputs, method, getattr(names["RoundInputs"], method))
    else:
        for method in ("replay", "read", "launch"):
            patch.setattr(CapturedRound, method, getattr(names["CapturedRound"], method))


def all_gates(models: Models) -> None:
    twins = taped_twins(models)
    for name in ("greedy", "of several temperatures", "cut", "of several lengths, 0 among them"):
        same_rounds(twins, PARAMS[name])
    verdicts_are_the_samplers(CPU, captured_round.captured_verify)


def test_gates_pass_without_a_bug(models: Models) -> None:
    all_gates(models)


@pytest.mark.parametrize("name", LINES)
def test_gates_catch(name: str, models: Models, monkeypatch: Patch) -> None:
    monkeypatch.setattr(captured_round, "_is_right", lambda *_: True)
    plant(name, monkeypatch)
    with pytest.raises(AssertionError):
        all_gates(models)


@pytest.mark.parametrize("name", [name for name, bug in LINES.items() if bug[-1] is AT_START])
def test_the_comparison_at_start_catches(
    name: str, models: Models, taped: None, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(name, monkeypatch)
    with caplog.at_level(logging.WARNING):
        core = make_engine(models.target, models.close_draft, **SETTINGS)
    assert "Captured rounds differ from the usual ones" in caplog.text
    goes_phase_by_phase(core, models)


# Verdicts and shapes.


@pytest.mark.parametrize("vocab_size", [20, 1500])
def test_verdicts_are_the_samplers(vocab_size: int) -> None:
    verdicts_are_the_samplers(CPU, vocab_size=vocab_size)


def test_a_failure_needs_to_be_reached() -> None:
    """Two drafts stand, the third does not: what lies behind it is never looked at."""
    logits = torch.zeros(1, 5, 4)
    for position, token_id in enumerate([1, 2, 3, 0, 0]):
        logits[0, position, token_id] = 5.0
    rows = DrawTensors(*(torch.tensor([column]) for column in captured_draw.PADDING))
    drafted, num_draft, first = torch.tensor([[1, 2, 0, 0]]), torch.tensor([4]), torch.tensor([9])

    def judge() -> list[int]:
        args = rows, first, drafted, num_draft, torch.zeros(4)
        verdict = captured_verify.captured_verify(DrawKind.GREEDY, logits, *args)
        return [int(column) for column in verdict]

    assert judge() == [2, 3, 0]
    logits[0, 3:] = torch.nan
    assert judge() == [2, 3, 0]
    logits[0, 2, 1] = torch.inf
    assert judge()[2] == 1


def test_the_first_rounds_are_the_most_useful() -> None:
    buckets = plan_rounds(48, 5000, 16, 4, 5, 1000)
    assert buckets[:3] == [RoundBucket(kind, Bucket(1, 1, 16)) for kind in DrawKind]
    assert len(set(buckets)) == len(buckets)
    assert {bucket.shape.queries for bucket in buckets} == {1, 5}
    assert {bucket.shape.queries for bucket in plan_rounds(48, 5000, 16, None, 5, 1000)} > {1, 2, 3, 5, 9}
    assert {bucket.shape.queries for bucket in plan_rounds(48, 5000, 16, 0, 1, 1000)} == {1}


def test_draws_over_a_large_vocabulary_have_few_positions() -> None:
    vocab_size = 1 << 17
    buckets = plan_rounds(64, 5000, 16, 4, 5, vocab_size)
    drawn = [bucket for bucket in buckets if bucket.kind is not DrawKind.GREEDY]
    assert max(bucket.shape.num_tokens for bucket in drawn) * vocab_size <= MAX_DRAWN
    assert max(bucket.shape.num_tokens for bucket in buckets) * vocab_size > MAX_DRAWN


def test_the_smallest_that_holds_the_round() -> None:
    buckets = plan_rounds(8, 1024, 16, 4, 5, 1000)
    found = smallest_round(buckets, DrawKind.CUT, 3, 2, 17)
    assert found == RoundBucket(DrawKind.CUT, Bucket(4, 5, 32))
    assert smallest_round(buckets, DrawKind.CUT, 9, 2, 17) is None
    assert smallest_round([b for b in buckets if b.kind], DrawKind.GREEDY, 1, 1, 1) is None


def test_failures_are_told(twins: Twins) -> None:
    """The gate of broken rows looks at what it says it does."""
    outputs = [output for step in run(twins.captured, PARAMS["greedy"]) for output in step]
    assert all(isinstance(output, TokenOutput) for output in outputs)
    assert not any(isinstance(output, Failed) for output in outputs)
    assert captured_rounds.run_captured(None, twins.captured.proposer, [], None) is None  # type: ignore[arg-type]

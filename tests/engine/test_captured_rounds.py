"""Captured rounds tell what the phases tell, step by step; a way back if they do not.

On a CPU a tape stands in for CUDA graphs (``tests.tape``). ``test_cuda`` runs the same gates on real graphs.
"""

import time
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import pytest
import torch

import tests.models
from engine import graph_plan
from engine.core.engine import EngineCore
from engine.draft_length.rounds import RoundSeconds
from engine.messages import SamplingParams
from engine.sampling.captured_draw import DrawKind
from tests.engine import gates
from tests.engine.conftest import Models
from tests.engine.round_gates import (
    PARAMS,
    PROMPTS,
    SETTINGS,
    Twins,
    broken_rows_fail_alike,
    each,
    make_twins,
    run,
    same_rounds,
    taped_twins,
)
from tests.models import make_engine, run_engine
from tests.tape import TapeCapture

Patch = pytest.MonkeyPatch
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def twins(models: Models) -> Twins:
    """Idle, and used by many tests: each gives both the same to do, so that their blocks lie alike."""
    return taped_twins(models)


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


def test_the_host_reads_once_a_round(models: Models, monkeypatch: Patch) -> None:
    twins = taped_twins(models)
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


def test_seconds_are_the_devices(models: Models, monkeypatch: Patch) -> None:
    twins = taped_twins(models)
    marks = iter(t + start for start in count(0, 100) for t in (0.0, 2.0, 7.0))
    monkeypatch.setattr(TapeCapture, "mark", lambda self: next(marks))
    core, told = twins.captured, Told(twins.captured, monkeypatch)
    replays, started = twins.rounds.num_replays, time.perf_counter()
    run(core, PARAMS["greedy"])
    took = time.perf_counter() - started
    num_rounds = twins.rounds.num_replays - replays
    rounds = [one for one in told.seconds if one is not None]
    assert len(rounds) == num_rounds > 5
    assert {(one.draft, one.score) for one in rounds} == {(2.0, 5.0)}
    # The prompts' steps are in it too, by the host's clock; what is not the device's is the host's.
    spent = core.stats.phase_seconds
    assert spent["draft"] >= 2 * num_rounds
    assert spent["score"] >= 5 * num_rounds
    assert sum(spent.values()) <= took


# Rounds that are not captured.


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

"""Who drafts in a round: the choice itself, and the engine with several sources in one sequence."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from engine.batch import Span
from engine.commands.replay import Replayer
from engine.commands.replay_round import Outcome as Finding
from engine.commands.trace_file import TracedChoice, TracedRound
from engine.core.engine import EngineCore
from engine.draft_length.costs import CostModel
from engine.draft_length.rounds import Candidate, Outcome, RoundSeconds
from engine.draft_length.sources import (
    TRY_AGAIN,
    CalibratedCosts,
    FollowedCosts,
    RoundCosts,
    SourceChooser,
    strength,
)
from engine.draft_length.survival import SequenceAcceptance
from engine.messages import Generate, SamplingParams
from engine.models.fresh import FreshModel
from tests.engine.conftest import Models
from tests.engine.gates import PROMPTS, rotating_engine
from tests.models import make_engine, run_engine, stepped

GREEDY = SamplingParams(max_tokens=60, temperature=0)
MODEL = Candidate("row", "draft_model", 0.0, limit=4)
LONG = Candidate("row", "ngram", 0.0, limit=4, match=strength(20))
SHORT = Candidate("row", "ngram", 0.0, limit=4, match=strength(2))
PREDICTED = Candidate("row", "prediction", 0.0, limit=4, match=strength(20))


def choose(chooser: SourceChooser, candidates: Sequence[Candidate], fixed: bool = True) -> Candidate | None:
    return chooser.choose([list(candidates)], fixed=[fixed], num_rows=1)[0]


def teach(chooser: SourceChooser, candidate: Candidate, num_accepted: int, rounds: int = 20) -> None:
    """Rounds in which only ``candidate`` could draft, or was tried."""
    seconds = RoundSeconds(draft=1.0 if candidate.method == "draft_model" else 0.0, score=1.0, host=0.0)
    for _ in range(rounds):
        if choose(chooser, [candidate]) is not None:
            chooser.observe([Outcome("row", candidate.limit, num_accepted, source=candidate.method)], seconds)


def calibrated(draft_seconds: float) -> CalibratedCosts:
    score = {size: 0.01 + 0.0005 * size for size in (1, 2, 5, 9, 17)}
    return CalibratedCosts(CostModel({1: draft_seconds, 17: 2 * draft_seconds}, score))


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("costs", [FollowedCosts(), calibrated(0.005)])
def test_the_cheaper_of_equals(costs: RoundCosts, fixed: bool) -> None:
    chooser = SourceChooser(costs)
    for candidate in (MODEL, LONG):
        teach(chooser, candidate, 4)
    assert choose(chooser, [LONG, MODEL], fixed) is LONG


def test_the_likelier_one_if_it_is_worth_its_cost() -> None:
    chooser = SourceChooser(calibrated(0.001))
    teach(chooser, MODEL, 3)
    teach(chooser, SHORT, 0, rounds=2)
    teach(chooser, LONG, 4)
    assert choose(chooser, [SHORT, MODEL]) is MODEL
    assert choose(chooser, [LONG, MODEL]) is LONG


def test_catching_up_counts() -> None:
    """A draft model that has fallen far behind must give more than one that has not."""
    chooser = SourceChooser(calibrated(0.002))
    teach(chooser, MODEL, 3)
    teach(chooser, SHORT, 1)
    assert choose(chooser, [SHORT, MODEL]) is MODEL
    behind = Candidate("row", "draft_model", 0.0, limit=4, lag=2000)
    assert choose(chooser, [SHORT, behind]) is SHORT


def test_a_look_up_that_is_hardly_right_is_left_alone_and_tried_again() -> None:
    chooser = SourceChooser(FollowedCosts())
    teach(chooser, PREDICTED, 0)
    chosen = [choose(chooser, [PREDICTED]) for _ in range(2 * TRY_AGAIN + 10)]
    assert 1 <= sum(candidate is not None for candidate in chosen) <= 3


def test_a_draft_model_that_was_alone_says_nothing_about_the_look_up_before() -> None:
    """Nobody is asked in its round, whose verdict and seconds are its own."""
    chooser = SourceChooser(costs := FollowedCosts())
    teach(chooser, LONG, 4)
    before = chooser.state()
    for _ in range(20):
        chooser.observe([Outcome("row", 4, 0, source="draft_model")], RoundSeconds(4.0, 1.0, 0.0))
    assert chooser.state() == before
    assert costs.draft_pass == 1.0


def test_verdicts_are_booked_to_who_drafted(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups have matches now and then; in between the draft model is alone."""
    drafted: dict[Any, str] = {}
    booked: list[tuple[str, str]] = []
    honest_learn, honest_observe = SequenceAcceptance.learn, SourceChooser.observe

    def observe(self: SourceChooser, outcomes: Sequence[Outcome], seconds: RoundSeconds | None) -> None:
        drafted.update({outcome.key: outcome.source for outcome in outcomes})
        known = None if seconds is None else RoundSeconds(1.0, 1.0, 0.0)  # nothing depends on the clock
        honest_observe(self, outcomes, known)

    def learn(self: SequenceAcceptance, *verdict: Any) -> None:
        for key, by_name in chooser._sequences.items():
            booked.extend((name[0], drafted[key]) for name, mine in by_name.items() if mine is self)
        honest_learn(self, *verdict)

    monkeypatch.setattr(SourceChooser, "observe", observe)
    monkeypatch.setattr(SequenceAcceptance, "learn", learn)
    core = make_engine(
        models.target, models.close_draft, method="auto", num_speculative_tokens=3, ngram_min_match=3
    )
    chooser = core.scheduler.planner.chooser
    assert chooser is not None
    run_engine(core, PROMPTS, GREEDY)
    assert set(booked) >= {("ngram", "ngram")}
    assert all(taken_for == source for taken_for, source in booked)
    assert core.stats.drafts["draft_model"].num_drafts > 10


def test_what_is_forgotten_leaves_nothing() -> None:
    chooser = SourceChooser(FollowedCosts())
    teach(chooser, LONG, 4)
    chooser.forget("row")
    assert not chooser._sequences
    assert not chooser._asked
    assert chooser.state()


def predictions(texts: list[list[int]]) -> list[list[int] | None]:
    """Right, wrong in the middle, none, right from its middle on, wrong."""
    return [texts[0], [*texts[1][:9], 0, 0, 0, *texts[1][11:]], None, texts[3][20:], [5] * 40]


def answers(core: EngineCore, params: list[SamplingParams], texts: list[list[int]]) -> list[list[int]]:
    for i, (prompt, each, predicted) in enumerate(zip(PROMPTS, params, predictions(texts), strict=True)):
        core.add(Generate(str(i), prompt, each, prediction_token_ids=predicted))
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    while core.has_work:
        for output in stepped(core):
            outputs[int(output.request_id)] += output.token_ids
    return outputs


@pytest.mark.parametrize("length", [1, 4, "auto"])
def test_the_text_does_not_depend_on_who_drafts(models: Models, length: int | str) -> None:
    """Greedy and seeded, side by side, preempted now and then; every source has drafted."""
    for base in (GREEDY, SamplingParams(max_tokens=60)):
        params = [msgspec.structs.replace(base, seed=i) for i in range(len(PROMPTS))]
        plain = run_engine(make_engine(models.target, None), PROMPTS, params)
        for core in (
            make_engine(models.target, models.close_draft, num_speculative_tokens=length, ngram_min_match=1),
            rotating_engine(
                models.target, models.close_draft, num_speculative_tokens=length, cache_memory="96KiB"
            ),
        ):
            assert answers(core, params, plain) == plain
        if length != "auto":
            assert set(core.stats.drafts) == {"draft_model", "ngram", "prediction"}


def test_traces_name_the_source_of_each_round_and_are_confirmed(models: Models) -> None:
    core = rotating_engine(models.target, models.close_draft, num_speculative_tokens=3)
    target, draft = (
        FreshModel(path, torch.float32, torch.device("cpu")) for path in (models.target, models.close_draft)
    )
    sources = set()
    for verification in ("rejection", "block", "coupled"):
        params = SamplingParams(max_tokens=30, seed=5, trace=True, verification=verification)  # type: ignore[arg-type]
        core.add(Generate("r", PROMPTS[3], params, prediction_token_ids=list(range(16)) * 2))
        rounds = []
        while core.has_work:
            rounds += [TracedRound.of(output.trace) for output in stepped(core) if output.trace]
        sources |= {round_.source for round_ in rounds}
        seed = core.admission.sequences(Generate("r", PROMPTS[3], params))[0].seed
        replayer = Replayer(target, draft, params, tolerance=1e-3)
        for report in replayer.replay(TracedChoice(PROMPTS[3], seed, rounds)):
            assert report.outcome is not Finding.WRONG, report
    assert sources == {"none", "draft_model", "ngram", "prediction"}


class DraftPasses:
    """Sizes of the draft model's passes, step by step."""

    def __init__(self, core: EngineCore) -> None:
        self.steps: list[list[int]] = []
        proposer = core.proposer.proposers["draft_model"]
        honest = proposer.model.forward  # type: ignore[attr-defined]

        def forward(spans: list[Span], *arguments: Any) -> torch.Tensor:
            if spans:
                self.steps[-1].append(sum(len(span.token_ids) for span in spans))
            result: torch.Tensor = honest(spans, *arguments)
            return result

        proposer.model.forward = forward  # type: ignore[attr-defined]

    def run(self, core: EngineCore) -> None:
        while core.has_work:
            self.steps.append([])
            stepped(core)


def mostly_predicted(models: Models, **config: object) -> tuple[EngineCore, DraftPasses, int]:
    """A prediction that comes true for 100 tokens, then nothing but the draft model; the lag until then."""
    text = run_engine(make_engine(models.target, None), [[1, 2]], GREEDY)[0]
    core = make_engine(models.target, models.close_draft, num_speculative_tokens=4, **config)
    passes = DraftPasses(core)
    params = SamplingParams(max_tokens=80, temperature=0)
    core.add(Generate("r", [1, 2], params, prediction_token_ids=text))
    core.scheduler.planner.offers = lambda sequence, limit: core.proposer.offers(sequence, limit)[
        : 1 if len(sequence) < 55 else None
    ][-1:]
    passes.run(core)
    assert set(core.stats.drafts) == {"draft_model", "prediction"}
    return core, passes, 50


def test_what_the_draft_missed_is_caught_up_in_one_pass(models: Models) -> None:
    _, passes, lag = mostly_predicted(models)
    first = next(sizes for sizes in passes.steps[1:] if sizes)
    assert len(first) == 4, "catching up must not take passes of its own"
    assert first[0] > lag
    assert first[1:] == [1, 1, 1]


def test_catching_up_is_bounded_in_each_step(models: Models) -> None:
    _, passes, lag = mostly_predicted(models, max_num_batched_tokens=16)
    sizes = [size for step in passes.steps[1:] for size in step]
    assert max(sizes) <= 17
    assert sum(sizes) > lag


def test_what_is_never_used_is_never_caught_up(models: Models) -> None:
    text = run_engine(make_engine(models.target, None), [[1, 2]], GREEDY)[0]
    core = make_engine(models.target, models.close_draft, num_speculative_tokens=4)
    passes = DraftPasses(core)
    core.add(Generate("r", [1, 2], msgspec.structs.replace(GREEDY, method="prediction"), 1, text))
    passes.run(core)
    assert not any(passes.steps)

"""Stopping drafts brings what it promises, on any machine where the draft's sureness says something."""

import random

import pytest

from tests.engine.speculation.simulation import MACHINES, Machine, Simulation, always, auto
from truedraft.engine.core.draft_choice import DraftChoice
from truedraft.engine.speculation.acceptance import Acceptance
from truedraft.engine.speculation.costs import MAX_LENGTH, Costs, PassCosts, Shape
from truedraft.engine.speculation.stopping import Confidence

ACCEPTANCE = 0.85


def easy_or_hard(rng: random.Random, rate: float) -> float:
    """Returns a token's own rate: those of hard ones are low."""
    easy, hard = 0.97, 0.45
    return easy if rng.random() < (rate - hard) / (easy - hard) else hard


def telling(rng: random.Random, rate: float) -> float:
    return rate * 0.8 + rng.uniform(-0.1, 0.1)


def run(machine: Machine, num_rows: int, stops: bool, seed: int) -> tuple[Simulation, float]:
    """Returns a run, and its rate once it has settled."""
    simulation = Simulation(
        machine,
        auto(machine, seed, stops=stops),
        always(ACCEPTANCE),
        lambda _: num_rows,
        seed=seed,
        position_decay=1.0,
        surety=easy_or_hard,
        confidence=telling,
    ).run(num_rounds=700)
    return simulation, simulation.rate(start=simulation.steps[len(simulation.steps) // 4].now)


@pytest.mark.parametrize(("machine", "num_rows"), [(MACHINES[0], 1), (MACHINES[2], 4)])
def test_it_pays_where_sureness_tells_what_is_accepted(machine: Machine, num_rows: int) -> None:
    gains = []
    for seed in (1, 2):
        gains.append(run(machine, num_rows, True, seed)[1] / run(machine, num_rows, False, seed)[1])
    assert sum(gains) / len(gains) > 1.01


def test_it_must_be_asked_for() -> None:
    simulation, _ = run(MACHINES[0], 1, False, 1)
    choice = simulation.planner.choose(simulation.running).drafts
    assert all(draft.stop is None for draft in choice.values())


def test_a_walk_ends_where_the_chance_is_low() -> None:
    confidence = Confidence()
    for _ in range(200):
        confidence.learn([0.9, 0.9, 0.1, 0.9], 2)  # sure tokens are accepted, others are not
    sure, unsure = confidence.rates()[14], confidence.rates()[1]
    assert (round(sure, 1), round(unsure, 1)) == (1.0, 0.0)
    assert confidence.walk(0.5).drafted == [1, 1, 1, 0, 0, 0, 0, 0]
    assert confidence.walk(0.5).accepted[-1] == pytest.approx(sure + sure**2 + sure**2 * unsure)
    assert confidence.walk(0.0).drafted == [1] * MAX_LENGTH


def test_stopped_drafts_leave_later_positions_as_they_are() -> None:
    """Only good drafts go on: counted alone, they would make long drafts look better than they are."""
    rng = random.Random(1)
    whole, stopped, naive = Acceptance(), Acceptance(), Acceptance()
    for _ in range(4000):
        rate = easy_or_hard(rng, ACCEPTANCE)  # the same for a whole draft
        num_accepted = next((place for place in range(4) if rng.random() >= rate), 4)
        length = 4 if rate > 0.5 else 1
        for table, end, usual in ((whole, 4, None), (stopped, length, ACCEPTANCE), (naive, length, None)):
            table.learn(end, min(end, num_accepted), usual_rate=usual)
    right, naive_error = whole.expected(4), naive.expected(4) - whole.expected(4)
    assert naive_error > 0.05 * right
    assert abs(stopped.expected(4) - right) < 0.75 * naive_error


def test_passes_that_run_in_some_rounds_cost_their_share() -> None:
    costs = Costs(PassCosts({1: 1.0, 9: 1.0}), {"draft_model": PassCosts({1: 0.5, 8: 0.5})})
    whole = costs.model_seconds(Shape(1, 2, 2, (1, 1), "draft_model"))
    some = costs.model_seconds(Shape(1, 2, 1.25, (1, 0.25), "draft_model", (1, 0.25)))
    assert (whole, some) == (pytest.approx(2.0), pytest.approx(1.625))


def test_a_choice_within_a_budget_still_stops() -> None:
    stop = Confidence().stop(0.4)
    assert DraftChoice("draft_model", 8, stop=stop).within(3) == DraftChoice("draft_model", 3, stop=stop)

"""What exploring costs and finds, with slow rounds: a text of a hundred tokens has forty of them."""

import math
from statistics import fmean

import pytest

from tests.engine.speculation.simulation import (
    DRAFT,
    Machine,
    Simulation,
    always,
    auto,
    fixed_rates,
    interpolate,
)
from truedraft.engine.speculation.costs import Shape
from truedraft.engine.speculation.planner import SpeculationPlanner
from truedraft.engine.speculation.policy import Plan, Policy

SCORING = interpolate([(1, 1), (2, 1.1), (5, 1.25), (9, 1.6), (16, 2.2)])
# A head whose pass takes a twentieth of the target's.
HEAD = Machine("a head", SCORING, interpolate([(1, 1), (16, 1.2)]), 0.05, unit=0.016)
ACCEPTANCE, FIRST_TEXT, SEEDS = 0.93, 40, range(12)


def share_of_the_best(num_rows: int) -> float:
    """Returns the speed of the first rounds, as a share of the best length's."""
    best = max(fixed_rates(HEAD, always(ACCEPTANCE), num_rows))
    simulations = [
        Simulation(HEAD, auto(HEAD, seed), always(ACCEPTANCE), lambda _: num_rows, seed=seed)
        for seed in SEEDS
    ]
    return fmean([each.run(num_rounds=FIRST_TEXT).rate() for each in simulations]) / best


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_first_text_is_hardly_slower_than_with_the_best_length(num_rows: int) -> None:
    assert share_of_the_best(num_rows) > 0.965


def test_exploring_what_cannot_be_better_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: whatever never ran is tried at once, plain rounds among them."""

    def at_once(self: Policy, option: int | str, plan: Plan, active: Plan) -> float:
        return 0.0

    monkeypatch.setattr(Policy, "_first_wait", at_once)
    assert share_of_the_best(1) < 0.965


def speed_where_plain_rounds_seemed_slow() -> float:
    """Returns the speed after some time, as a share of plain decoding's: plain rounds seem to take twice as
    long as they do, and drafts are accepted too seldom to pay."""
    costs, drafting = HEAD.costs(), Shape(1, 1, 1.0, (1.0,), DRAFT.name)
    for _ in range(50):
        costs.observe(Shape(1, 0), 2 * HEAD.score_seconds(1))
        costs.observe(drafting, HEAD.score_seconds(2) + HEAD.draft_seconds(1))
    planner = SpeculationPlanner(costs, proposers=[DRAFT])
    simulation = Simulation(HEAD, planner, always(0.05), lambda _: 1).run(40.0)
    return simulation.rate(30.0) / fixed_rates(HEAD, always(0.05), 1)[0]


def test_what_seemed_hopeless_is_tried_in_time() -> None:
    assert speed_where_plain_rounds_seemed_slow() > 0.95


def test_never_trying_what_seemed_hopeless_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug."""

    def never(self: Policy, option: int | str, plan: Plan, active: Plan) -> float:
        return math.inf

    monkeypatch.setattr(Policy, "_first_wait", never)
    assert speed_where_plain_rounds_seemed_slow() < 0.95

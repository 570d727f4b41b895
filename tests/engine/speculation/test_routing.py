"""Targets with experts: a pass costs what it reads, which drafts make several times as much.

A layer has 128 experts, of which each token takes 8. Tokens that have nothing in common read 36 of them for
five tokens; the tokens of a text may have much in common.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.engine.speculation.simulation import (
    CALIBRATED_SIZES,
    DRAFT,
    PROPORTIONAL,
    FixedPlanner,
    Machine,
    Simulation,
    always,
)
from truedraft.engine.speculation.costs import Costs, PassCosts, Shape
from truedraft.engine.speculation.planner import SpeculationPlanner
from truedraft.engine.speculation.routing import Routing

NUMBER, CHOSEN = 128, 8
# Layers but for their experts take this share of a pass over one token.
OTHERS = 0.3
NUM_ROUNDS = 400


def experts_of(tokens: float) -> float:
    return NUMBER * (1 - (1 - CHOSEN / NUMBER) ** tokens)


@dataclass(frozen=True)
class MachineWithExperts(Machine):
    """After the first token of a pass each further one counts for ``alike`` tokens that have nothing in
    common. ``counts``: experts and passes."""

    alike: float = 1.0
    counts: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def score_seconds(self, size: float) -> float:
        experts = experts_of(1 + self.alike * (size - 1))
        self.counts[0] += experts
        self.counts[1] += 1
        return self.seconds_of(experts)

    def seconds_of(self, experts: float) -> float:
        return self.unit * (OTHERS + (1 - OTHERS) * experts / CHOSEN)

    def routing(self) -> Routing:
        def counted() -> tuple[int, int]:
            return round(1e6 * self.counts[0]), round(1e6 * self.counts[1])

        return Routing(counted, {size: experts_of(size) for size in CALIBRATED_SIZES})

    def expert_costs(self, knows_experts: bool = True) -> Costs:
        """Returns costs as calibration measures them, of tokens that have nothing in common."""
        score = PassCosts({size: self.seconds_of(experts_of(size)) for size in CALIBRATED_SIZES})
        draft = PassCosts({size: self.draft_seconds(size) for size in CALIBRATED_SIZES})
        return Costs(score, {DRAFT.name: draft}, routing=self.routing() if knows_experts else None)


def machine(alike: float) -> MachineWithExperts:
    return MachineWithExperts("experts", PROPORTIONAL, PROPORTIONAL, 0.02, alike=alike)


def rate(planner: object, alike: float, acceptance: float, num_rows: int, of: MachineWithExperts) -> float:
    simulation = Simulation(of, planner, always(acceptance), lambda _: num_rows)  # type: ignore[arg-type]
    simulation.run(num_rounds=NUM_ROUNDS)
    return simulation.rate(start=simulation.now / 4)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_it_does_not_lose_where_a_fixed_length_does(num_rows: int) -> None:
    of = machine(alike=1.0)
    plain, four = (rate(FixedPlanner(length, of), 1.0, 0.6, num_rows, of) for length in (0, 4))
    assert four < 0.9 * plain
    assert (
        rate(SpeculationPlanner(of.expert_costs(), proposers=[DRAFT]), 1.0, 0.6, num_rows, of) > 0.97 * plain
    )


def test_it_drafts_where_texts_read_the_same_experts() -> None:
    of = machine(alike=0.15)
    plain, four = (rate(FixedPlanner(length, of), 0.15, 0.8, 1, of) for length in (0, 4))
    assert four > 1.2 * plain
    planner = SpeculationPlanner(of.expert_costs(), proposers=[DRAFT])
    assert rate(planner, 0.15, 0.8, 1, of) > 0.95 * four
    routing = planner.costs.routing
    assert routing is not None
    assert routing.of_draft == pytest.approx(0.15, abs=0.05)
    assert routing.experts(1, 4) == pytest.approx(experts_of(1.6), rel=0.1)
    state = planner.state()
    assert "experts of each layer are read instead of 8" in str(state["why"])
    assert state["costs"]["experts"]["a_draft_counts_for"] < 0.3  # type: ignore[index]


def test_what_was_learned_of_one_length_is_known_of_others() -> None:
    """Seconds of a length that never ran are those of the experts that it reads, and without them are not."""
    of = machine(alike=0.2)
    costs, blind = of.expert_costs(), of.expert_costs(knows_experts=False)
    routing = costs.routing
    assert routing is not None
    for _ in range(60):
        routing.observe(1, 2, experts_of(1.4))
    truth = of.seconds_of(experts_of(1 + 0.2 * 6))
    shape = Shape(1, 6, num_drafted=6.0)
    assert costs.model_seconds(shape) == pytest.approx(truth, rel=0.1)
    assert blind.model_seconds(shape) > 2 * truth


def test_rows_and_drafts_are_learned_apart() -> None:
    routing = machine(1.0).routing()
    for _ in range(300):
        for num_rows, drafted in ((1, 4), (4, 0), (4, 8)):
            routing.observe(num_rows, drafted, experts_of(1 + 0.8 * (num_rows - 1) + 0.25 * drafted))
    assert routing.of_row == pytest.approx(0.8, abs=0.05)
    assert routing.of_draft == pytest.approx(0.25, abs=0.05)


def test_passes_that_read_all_experts_teach_nothing() -> None:
    routing = machine(1.0).routing()
    routing.observe(100, 400, float(NUMBER))
    assert (routing.of_row, routing.of_draft) == (1.0, 1.0)


def test_counts_are_taken_once() -> None:
    counts = [(0, 0), (160, 10), (160, 10), (184, 12)]
    routing = Routing(lambda: counts.pop(0), {1: 8.0})
    assert [routing.take(), routing.take(), routing.take()] == [16.0, None, 12.0]


def of_all_tokens(routing: Routing) -> Callable[[float, float], float]:
    """A planted bug: each token counts in full, whatever was read."""
    return lambda num_rows, num_drafted: num_rows + num_drafted


def test_overlap_that_is_not_learned_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    routing = machine(0.2).routing()
    monkeypatch.setattr(routing, "tokens", of_all_tokens(routing))
    for _ in range(60):
        routing.observe(1, 4, experts_of(1.8))
    assert routing.experts(1, 4) > 1.5 * experts_of(1.8)

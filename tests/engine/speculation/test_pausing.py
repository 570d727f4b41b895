"""Heads that do not pay are told of nothing. They are tried with new texts, and draft again when it pays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from tests.engine.speculation.simulation import PACKED_CPU, FixedPlanner, Machine, Simulation, always
from tests.engine.speculation.test_rivals import share_of
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.proposer import Proposer
from truedraft.engine.core.sequence import Sequence as Text
from truedraft.engine.core.step import Round, ScheduledSequence, StepPlan
from truedraft.engine.speculation.costs import Costs
from truedraft.engine.speculation.planner import SpeculationPlanner
from truedraft.engine.speculation.policy import Policy

# A head's pass takes a tenth of a target's.
MACHINE = Machine("a head", PACKED_CPU, PACKED_CPU, 0.1)


class Head(Proposer):
    name = "head"
    can_lag = False

    @property
    def pools(self) -> Sequence[BlockPool]:
        return (BlockPool(1, 1),)


@dataclass
class Followed(Simulation):
    """A simulation in which a head drafts, and otherwise takes a pass over the tokens that it observes."""

    def _new_sequence(self) -> Text:
        sequence = super()._new_sequence()
        sequence.max_num_tokens = sequence.num_prompt_tokens + self.rng.randint(20, 2 * self.num_tokens)
        sequence.unfollowed = frozenset(self.planner.lagging(sequence))
        return sequence

    def _plan(self) -> StepPlan:
        plan = super()._plan()
        for sequence in self.running:
            sequence.unfollowed |= frozenset(self.planner.lagging(sequence))
        return plan

    def _draft(self, part: ScheduledSequence, place: int) -> tuple[int, int, list[float], list[float]]:
        assert not part.draft.num_tokens or part.sequence.is_followed_by(Head.name)
        return super()._draft(part, place)

    def _round(self, plan: StepPlan, is_first: bool) -> tuple[Round, float, float]:
        done, seconds, expected = super()._round(plan, is_first)
        num_told = sum(part.sequence.is_followed_by(Head.name) for part in plan.rows)
        if not num_told or any(part.draft.num_tokens for part in plan.rows):
            return done, seconds, expected
        told = MACHINE.draft_seconds(num_told)
        done.seconds = done.seconds._replace(score=done.seconds.score + told)
        return done, seconds + told, expected


def run(head: Callable[[float, int], float], num_rows: int, seconds: float, seed: int = 1) -> Followed:
    costs = MACHINE.costs()
    planner = SpeculationPlanner(
        Costs(costs.score, {Head.name: costs.drafts["draft_model"]}), proposers=[Head()]
    )
    simulation = Followed(
        MACHINE, planner, head, lambda _: num_rows, sources=("head",), num_tokens=80, seed=seed
    )  # type: ignore[arg-type]
    simulation.run(seconds)
    return simulation


def useless_heads_cost_nothing(num_rows: int) -> None:
    found = run(always(0.02), num_rows, 40.0)
    plain = Simulation(
        MACHINE, FixedPlanner(0, MACHINE), always(0.0), lambda _: num_rows, sources=(), num_tokens=80
    )
    assert found.rate(10.0) > 0.97 * plain.run(10.0).rate()


def heads_are_tried_again(num_rows: int) -> None:
    found = run(lambda now, _: 0.02 if now < 20 else 0.9, num_rows, 65.0)
    assert share_of(found, Head.name, 10.0, 20.0) < 0.15  # trials
    assert share_of(found, Head.name, 45.0) > 0.85


@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_useless_heads_cost_nothing(num_rows: int) -> None:
    useless_heads_cost_nothing(num_rows)


@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_heads_are_tried_again(num_rows: int) -> None:
    heads_are_tried_again(num_rows)


def test_following_for_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "wants", lambda self, source: True)
    with pytest.raises(AssertionError):
        useless_heads_cost_nothing(4)


def test_never_trying_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "_want", lambda self, source, num_replans: None)
    with pytest.raises(AssertionError):
        heads_are_tried_again(4)

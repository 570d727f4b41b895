"""The parts of the draft length policy: costs, survival, search, probes, and what it says about itself."""

import math

import msgspec
import pytest

from engine.core.block_pool import BlockPool
from engine.draft_length.calibrate import _plausible
from engine.draft_length.costs import CostCurve, CostModel
from engine.draft_length.plan import RowOutlook, evaluate, search
from engine.draft_length.policy import DraftLengthPolicy
from engine.draft_length.rounds import Candidate, Outcome, RoundSeconds
from engine.draft_length.survival import GroupAcceptance, SequenceAcceptance
from tests.engine.fixed_length import FixedDraftLength


def costs() -> CostModel:
    return CostModel({1: 0.001, 16: 0.002}, {1: 0.01, 2: 0.0125, 5: 0.013, 9: 0.016, 16: 0.02, 64: 0.08})


def rows(num_rows: int, limit: int = 8, method: str = "draft_model") -> list[Candidate]:
    return [Candidate(key, method, 1.0, limit) for key in range(num_rows)]


def test_a_curve_interpolates_and_goes_on_beyond_its_points() -> None:
    curve = CostCurve({1: 1.0, 3: 2.0, 5: 2.0})
    assert [curve(size) for size in (0, 1, 2, 4, 9)] == pytest.approx([0, 1, 1.5, 2, 2])
    assert CostCurve({1: 1.0, 2: 2.0})(10) == pytest.approx(10)


def test_a_curve_never_falls_whatever_was_measured() -> None:
    curve = CostCurve({1: 9.0, 2: 1.0, 3: 2.0, 4: 1.5})
    for surprise, size in ((0.2, 1), (-0.2, 4), (0.2, 2), (-0.2, 3)) * 20:
        curve.follow(size, surprise)
    values = list(curve.points().values())
    assert values == sorted(values)


def test_a_curve_follows_a_slower_machine_but_not_a_spike() -> None:
    curve = CostCurve({1: 1.0, 8: 2.0})
    for _ in range(100):
        curve.follow(8, math.log(2.0 / curve(8)), num_rounds=8)
    before = curve(8)
    curve.follow(8, math.log(10))
    assert curve(8) < 1.03 * before
    for _ in range(200):
        curve.follow(8, math.log(4.0 / curve(8)), num_rounds=8)
    assert curve(8) == pytest.approx(4.0, rel=0.01)
    assert 1.2 < curve(1) < 2.0  # most of it is believed of the other sizes


def test_acceptance_by_position_is_accepted_of_reached() -> None:
    group = GroupAcceptance()
    sequence = SequenceAcceptance(group, 0)
    for step in range(2000):
        accepted = (4, 0, 2, 4)[step % 4]  # a_1 = 3/4, a_2 = 1, a_3 = 2/3, a_4 = 1
        sequence.learn(step, 4, 4, accepted, ended=False)
    assert sequence.survival(4, 0) == pytest.approx([0.75, 0.75, 0.5, 0.5], abs=0.05)
    newcomer = SequenceAcceptance(group, 2000)
    assert newcomer.survival(4, 0) == pytest.approx(sequence.survival(4, 0), abs=0.05)
    beyond = sequence.survival(6, 0)
    assert beyond[5] / beyond[4] == pytest.approx(beyond[4] / beyond[3])


def test_a_draft_cut_by_the_end_of_the_text_is_not_counted() -> None:
    group = GroupAcceptance()
    SequenceAcceptance(group, 0).learn(1, 4, 4, 0, ended=True)
    assert group.rates() == []


def test_the_search_looks_past_a_slot_that_does_not_pay() -> None:
    """One token costs twice the time; three more are free."""
    step = CostModel({1: 1e-6}, {1: 0.01, 2: 0.022, 5: 0.022, 6: 0.1})
    found = search([RowOutlook([0.95, 0.9, 0.85, 0.8, 0.7], 1.0, True)], step, 0)
    assert found.best.lengths == [4]


def test_the_search_gives_slots_to_the_rows_that_deserve_them() -> None:
    hopeless, easy = RowOutlook([0.05], 1.0, True), RowOutlook([0.9, 0.8, 0.7], 1.0, True)
    *lengths, longest = search([hopeless, hopeless, hopeless, easy], costs(), 0).best.lengths
    assert lengths == [0, 0, 0]
    assert longest > 0


def test_rows_that_are_nearly_alike_draft_alike() -> None:
    rows = [RowOutlook([chance, chance**2, chance**3], 1.0, True) for chance in (0.78, 0.8, 0.82)]
    assert len(set(search(rows, costs(), 0).best.lengths)) == 1


def test_search_and_evaluation_agree() -> None:
    outlooks = [RowOutlook([0.9, 0.7, 0.6], 1.0, True), RowOutlook([0.8, 0.7], 0.5, True)]
    found = search(outlooks, costs(), 7)
    again = evaluate(outlooks, found.best.lengths, costs(), 7)
    assert (again.tokens, again.seconds) == pytest.approx((found.best.tokens, found.best.seconds))


@pytest.mark.parametrize("limit", [-1, 0, 1, 3])
def test_limits_are_kept(limit: int) -> None:
    for policy in (DraftLengthPolicy(costs()), FixedDraftLength(5)):
        for _ in range(200):
            lengths = policy.choose(rows(3, limit))
            assert all(0 <= length <= max(0, limit) for length in lengths)
            policy.observe([Outcome(i, n, n) for i, n in enumerate(lengths)], RoundSeconds(0.001, 0.01, 1e-4))


def test_rows_may_leave_between_choice_and_outcome_and_steps_may_be_empty() -> None:
    policy = DraftLengthPolicy(costs())
    assert policy.choose([]) == []
    policy.observe([], None)
    lengths = policy.choose(rows(3))
    policy.observe([Outcome(1, lengths[1], 0)], None)
    policy.forget(0)
    policy.forget("unknown")


def test_the_choice_depends_on_the_past_only() -> None:
    """Two policies with the same past choose the same, whatever is drawn next."""
    one, other = DraftLengthPolicy(costs()), DraftLengthPolicy(costs())
    for step in range(300):
        assert (lengths := one.choose(rows(2))) == other.choose(rows(2))
        outcomes = [Outcome(i, n, min(n, (step * 7 + i) % 3)) for i, n in enumerate(lengths)]
        for policy in (one, other):
            policy.observe(outcomes, RoundSeconds(0.001, 0.012, 1e-4))


def test_the_state_is_builtins_and_says_why() -> None:
    policy = DraftLengthPolicy(costs())
    assert policy.state()["why"] == "no step has run yet"
    for accepted, expected in ((1.0, "on: "), (0.0, "off: ")):
        for _ in range(300):
            lengths = policy.choose(rows(2))
            outcomes = [Outcome(i, n, int(n * accepted)) for i, n in enumerate(lengths)]
            policy.observe(outcomes, RoundSeconds(0.001 * max(lengths), 0.013, 1e-4))
        state = policy.state()
        assert str(state["why"]).startswith(expected)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(state)) == state


def test_a_pass_costs_no_more_than_smaller_ones_in_its_place() -> None:
    """One bad moment at start would keep ``auto`` from ever trying such a pass."""
    measured = {1: 1.0, 5: 1.2, 16: 3.5, 32: 56.0, 9: 30.0, 48: 8.0}
    assert _plausible(measured) == {1: 1.0, 5: 1.2, 9: 2.4, 16: 3.5, 32: 7.0, 48: 8.0}


def test_calibration_returns_every_block() -> None:
    from engine.draft_length.calibrate import calibrate

    class Model:
        """As slow as its input is long."""

        has_encoder = False

        is_native = False

        def __init__(self) -> None:
            import torch

            self.device = torch.device("cpu")
            self.max_position = None

        def forward(self, spans: list) -> None:  # type: ignore[type-arg]
            for span in spans:
                assert len(span.table.block_ids) * 16 >= len(span.token_ids)
                span.table.num_computed_tokens += len(span.token_ids)

    pools = BlockPool(20, 16), BlockPool(20, 16)
    model = calibrate(Model(), pools[0], Model(), pools[1], max_tokens=64, seconds=0.05)  # type: ignore[arg-type]
    assert [pool.num_free for pool in pools] == [20, 20]
    assert set(model.score.points()) == {1, 2, 3, 4, 5, 9, 12, 16, 24, 32, 48, 64}
    assert set(model.draft.points()) == {1, 2, 3, 4, 5, 9, 12, 16}  # 32 rows need 32 blocks


def test_rounds_that_share_a_step_share_what_the_host_takes_for_it() -> None:
    """Measured beside long rounds, of which each has a step, it is not what short ones would take, and the
    other way round: else a gain of some per cent is found where there is none."""

    def observe(model: CostModel, draft: float, score: float, host: float) -> None:
        for _ in range(200):
            sizes = [1.0] if draft else []
            model.observe_rounds(8, False, sizes, 0, 1, 1 + len(sizes), draft, score, host)

    long, short = (CostModel({1: 0.004}, {1: 0.004, 2: 0.012}) for _ in range(2))
    for model, step_seconds in ((long, 0.02), (short, 0.02)):
        model.step_seconds = step_seconds
    observe(long, 0.008, 0.012, 0.0005)
    observe(short, 0.0, 0.004, 0.0001)
    for model in (long, short):
        assert model.host(1, 0.004) == pytest.approx(0.0001, rel=0.05)
        assert model.host(1, 0.02) == pytest.approx(0.0005, rel=0.05)
    assert long.host(1) == pytest.approx(0.0005, rel=0.05)
    assert short.host(1) == pytest.approx(0.0001, rel=0.05)
    assert model.sharing(0.0001) == 16  # no step has more rounds
    model.step_seconds = 0.0
    assert model.sharing(0.0001) == 1

"""What the policy does between two looks, what it learns from rounds put aside, and when patience is on."""

import math
import random
from itertools import pairwise

import pytest

from engine.draft_length.confidence import ConfidenceTable, Patience, PatientDraft, bin_of
from engine.draft_length.costs import MAX_QUERIES, PADDING, CostCurve, CostModel
from engine.draft_length.in_force import PlanInForce
from engine.draft_length.learning import Round, learn_acceptance, observe_costs
from engine.draft_length.patient import LEAST_GAIN, LOSS, MOST_SELDOM, Compared, PatienceTrial, compare
from engine.draft_length.plan import Plan, RowOutlook, Search, evaluate, search
from engine.draft_length.policy import DraftLengthPolicy
from engine.draft_length.probes import Probes
from engine.draft_length.rounds import Candidate, Outcome, RoundSeconds
from engine.draft_length.survival import GroupAcceptance, SequenceAcceptance
from tests.engine.patience import NoPatience

SCORE = {1: 0.01, 2: 0.0105, 5: 0.011, 9: 0.012, 32: 0.02, 128: 0.06}


def costs() -> CostModel:
    return CostModel({1: 0.0005, 16: 0.001}, SCORE)


def candidates(keys: range, limit: int = 8) -> list[Candidate]:
    return [Candidate(key, "draft_model", 0.0, limit) for key in keys]


class Counted(DraftLengthPolicy):
    """Counts its searches."""

    num_searches = 0

    def _search(self, *arguments):  # type: ignore[no-untyped-def]
        self.num_searches += 1
        return super()._search(*arguments)


def seconds(lengths: list[int]) -> RoundSeconds:
    return RoundSeconds(0.0007 * max(lengths), 0.01 + 0.0003 * sum(lengths), 0.0002)


def run(policy: DraftLengthPolicy, rows: list[Candidate], num_rounds: int, share: float = 1.0) -> list[int]:
    """Every draft is accepted up to ``share``."""
    lengths: list[int] = []
    for _ in range(num_rounds):
        lengths = policy.choose(rows)
        outcomes = [Outcome(row.key, n, int(share * n)) for row, n in zip(rows, lengths, strict=True)]
        policy.observe(outcomes, seconds(lengths))
    return lengths


def test_most_rounds_are_only_compared() -> None:
    policy = Counted(costs())
    run(policy, candidates(range(4)), 600)
    before = policy.num_searches
    run(policy, candidates(range(4)), 600)
    assert policy.num_searches - before < 60


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_choice_stands_for_as_many_rounds_as_it_says(num_rows: int, share: float) -> None:
    """Trials of patience, probes and looks begin and end in between, and never within."""
    policy = DraftLengthPolicy(costs())
    rows, stands, chosen = candidates(range(num_rows)), 0, None
    announced = []
    for step in range(3000):
        if step >= 1000 and stands == 0 and not policy.patient.trials[num_rows].pays:
            # Patience pays from now on.
            policy.patient.trials[num_rows].learn(Compared(10_000, 1.0, 2 * LEAST_GAIN))
        (lengths,) = [run(policy, rows, 1, share)]
        patient = policy.patient_draft(0)
        now = lengths, patient is None or patient.patience
        assert stands == 0 or now == chosen, step
        if stands == 0:
            chosen, stands = now, policy.num_rounds
            announced.append(stands)
            assert stands > 0
        stands -= 1
    assert max(announced) > 8
    assert min(announced) < 8


@pytest.mark.parametrize("num_rows", [1, 4])
def test_rounds_of_one_step_teach_what_rounds_of_their_own_would(num_rows: int) -> None:
    one, other = DraftLengthPolicy(costs()), DraftLengthPolicy(costs())
    for _ in range(300):
        rows = candidates(range(num_rows))
        lengths = other.choose(rows)
        num_rounds = min(5, other.num_rounds)
        outcomes = [Outcome(row.key, n, n // 2) for row, n in zip(rows, lengths, strict=True)]
        patient = [other.patient_draft(row.key) for row in rows]
        other.observe(outcomes, seconds(lengths))
        for _ in range(num_rounds - 1):
            other.go_on([PatientDraft(draft.patience) for draft in patient if draft is not None] or None)
            other.observe(outcomes, seconds(lengths))
        assert run(one, rows, num_rounds, 0.5) == lengths
    assert one.state() == other.state()


def test_a_row_that_comes_gets_the_plan_in_force() -> None:
    policy = Counted(costs())
    run(policy, candidates(range(16)), 600)
    length = policy._in_force.even_length
    assert length > 0
    before = policy.num_searches
    assert policy.choose([*candidates(range(15)), *candidates(range(20, 21))]) == [length] * 16
    # Half of the rows have ended, and the next ones' prompts are being computed.
    assert policy.choose(candidates(range(8)), num_prompt_tokens=30) == [length] * 8
    assert policy.num_searches == before


def test_what_is_left_of_a_text_shortens_its_draft_only() -> None:
    policy = DraftLengthPolicy(costs())
    policy.patient.trials[1] = NoPatience()
    run(policy, candidates(range(1)), 600)
    length = policy._in_force.even_length
    assert length > 2
    policy._next_look = 0
    assert policy.choose(candidates(range(1), limit=2)) == [2]
    assert policy._in_force.even_length > 2


def test_more_rows_are_looked_at_at_once() -> None:
    policy = Counted(costs())
    run(policy, candidates(range(2)), 600)
    before = policy.num_searches
    policy.choose(candidates(range(8)))
    assert policy.num_searches == before + 1


def test_rows_that_leave_are_looked_at_once_nobody_has_come_for_them() -> None:
    policy = Counted(costs())
    run(policy, candidates(range(4)), 600)
    searches = []
    for num_rows in (3, 4, 2, 2, 2):
        policy._next_look = policy._round + 10
        before = policy.num_searches
        run(policy, candidates(range(num_rows)), 1)
        searches.append(policy.num_searches - before)
    assert searches == [0, 0, 0, 1, 0]


def test_rounds_put_aside_teach_what_each_of_them_would() -> None:
    """Counts of a batch of rounds are those of its drafts one by one."""
    group, alone = GroupAcceptance(), GroupAcceptance()
    sequences = {key: {"draft_model": SequenceAcceptance(group, 0)} for key in range(2)}
    single = [SequenceAcceptance(alone, 0) for _ in range(2)]
    rows, rounds = candidates(range(2)), []
    for step in range(40):
        accepted = [(3, 0, 2)[step % 3], (1, 3)[step % 2]]
        ended = step == 39
        outcomes = [Outcome(key, 3, accepted[key], ended=ended) for key in range(2)]
        rounds.append(Round(rows, [3, 3], [0, 0], outcomes, None, 0))
        for key in range(2):
            single[key].learn(step, 3, 3, accepted[key], ended)
    learn_acceptance(rounds, sequences, 0, 39)
    for key in range(2):
        learnt = sequences[key]["draft_model"].survival(3, 0.0)
        assert learnt == pytest.approx(single[key].survival(3, 0.0), abs=0.04)
    counts = sequences[0]["draft_model"].counts
    assert counts.reached[0] / counts.weight == pytest.approx(39)  # the one that ended is left out


def test_rows_that_left_do_not_shift_the_others() -> None:
    group = GroupAcceptance()
    sequences = {key: {"draft_model": SequenceAcceptance(group, 0)} for key in range(3)}
    one = Round(candidates(range(3)), [0, 2, 4], [0] * 3, [Outcome(2, 4, 4), Outcome(0, 0, 0)], None, 0)
    learn_acceptance([one], sequences, 0, 0)
    assert [len(sequences[key]["draft_model"].counts.reached) for key in range(3)] == [0, 0, 4]


def test_costs_follow_the_median_of_rounds_that_were_alike() -> None:
    rows = candidates(range(1))

    def one(score: float, num_drafted: int) -> Round:
        seconds = RoundSeconds(0.0005, score, 0.0001)
        return Round(rows, [num_drafted], [0], [Outcome(0, num_drafted, 0)], seconds, 0)

    model = costs()
    for _ in range(40):
        observe_costs([one(0.1, 0), *[one(0.02, 0)] * 5, one(0.5, 1)], model, is_new=False)
    assert model.score(1) == pytest.approx(0.02, rel=0.05)


def test_the_same_size_moves_all_and_another_how_they_compare() -> None:
    curve = CostCurve({1: 1.0, 8: 2.0})
    for _ in range(50):
        curve.follow(1, 0.0, num_rounds=8)
        curve.follow(8, 0.0, num_rounds=8)
    for _ in range(30):
        curve.follow(1, 0.1, num_rounds=8)
    assert curve(8) / curve(1) == pytest.approx(2.0, rel=0.08)
    assert curve(1) > 1.5


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_how_sizes_compare_is_learned_the_slower_the_less_steady_the_machine_is(noise: float) -> None:
    curve = CostCurve({1: 1.0, 8: 2.0})
    for i in range(50):
        curve.follow(1, noise * (-1) ** i, num_rounds=8)
    ratio = curve(8) / curve(1)
    curve.follow(8, 0.1, num_rounds=8, is_probe=True)
    moved = math.log(curve(8) / curve(1) / ratio) / 0.1
    assert moved == pytest.approx(1 / (1 + (2 * noise / 0.08) ** 2), abs=0.1)
    for _ in range(100):
        curve.follow(8, math.log(3.0) - math.log(curve(8) / curve(1)), num_rounds=8, is_probe=True)
    assert curve(8) / curve(1) == pytest.approx(3.0, rel=0.01)


def test_uneven_lengths_in_force_must_go_on_paying() -> None:
    in_force = PlanInForce(CostModel({1: 0.0005, 16: 0.001}, SCORE, padding=0.0))
    in_force.own_lengths = {0: 1}
    alike = [RowOutlook([0.8, 0.6, 0.4], 1.0, True)] * 32
    found = search(alike, in_force.costs, 0, uneven_gain=in_force.uneven_gain)
    assert len(set(found.best.lengths)) == 1
    length = found.best.lengths[0]
    uneven = [length] * 31 + [length - 1]
    assert evaluate(alike, uneven, in_force.costs, 0).rate * 1.005 > found.best.rate
    assert in_force._hold_on(found, uneven, alike, 0).best.lengths == found.best.lengths
    in_force.own_lengths = {}
    assert in_force._hold_on(found, uneven, alike, 0).best.lengths == uneven


@pytest.mark.parametrize("gain", [0.85, 0.99, 1.1])
def test_patience_is_on_where_it_has_paid(gain: float) -> None:
    trial = PatienceTrial()
    modes: list[str] = []
    for step in range(4000):
        modes.append(trial.mode(step))
        if modes[-1] == "patient":
            trial.learn(Compared(1, 1.0, gain))
    assert trial.gain == pytest.approx(gain)
    modes = modes[1000:]
    assert trial.pays == (gain > LEAST_GAIN)
    assert (modes.count("patient") > 2700) == trial.pays
    assert modes.count("planned") > 90
    assert modes.count("open") > 3
    # Where it has hardly lost it is tried more often.
    assert (modes.count("patient") > 150) == (gain > LOSS)


def test_patience_that_loses_is_tried_ever_more_seldom() -> None:
    trial, last, starts = PatienceTrial(), "", []
    for step in range(60_000):
        if (mode := trial.mode(step)) == "patient":
            trial.learn(Compared(1, 1.0, 0.8))
        if mode == "open" != last:
            starts.append(step)
        last = mode
    waits = [after - before for before, after in pairwise(starts)]
    assert waits == sorted(waits)
    assert waits[-1] == waits[-2] == MOST_SELDOM


def test_patience_ends_when_it_loses() -> None:
    trial = PatienceTrial()
    for gain in (1.1, 0.8):
        for step in range(6000):
            if trial.mode(step) == "patient":
                trial.learn(Compared(1, 1.0, gain))
        assert trial.pays == (gain > 1)


def test_patience_is_compared_with_the_planned_lengths_of_the_same_rounds() -> None:
    """Three tokens were planned for both rows. One drafted five and got them, the other one and got none."""
    sequences = [SequenceAcceptance(GroupAcceptance(), 0) for _ in range(2)]
    model = costs()
    rule = Patience(ConfidenceTable(), 0.1, 0.1)
    one = Round(
        candidates(range(2)),
        [8, 8],
        [0, 1],
        [Outcome(0, 5, 5), Outcome(1, 1, 0)],
        RoundSeconds(0.004, 0.011, 0.00013),
        0,
        [PatientDraft(rule, [0.9] * 5), PatientDraft(rule, [0.9, 0.1])],
    )
    opened = one._replace(patient=[PatientDraft(Patience(rule.table), [0.9])] * 2)
    ended = one._replace(outcomes=[Outcome(0, 5, 5), Outcome(1, 1, 1, ended=True)])
    rng = random.Random(1)
    assert compare([opened, ended], [3, 3], sequences, model, rng) is None
    compared = compare([one, opened, ended], [3, 3], sequences, model, rng)
    assert compared is not None
    assert compared.num_drafts == 2
    # What it was measured to take, as far as it drafts: passes of three tokens, of two, and three of one.
    assert compared.seconds == pytest.approx(0.004 + 0.00013 + model.score(8 + 4 * PADDING))
    chances = sequences[0].survival(3, 0.0)
    lag = 2 * chances[2]
    drafting = model.draft_start + model.draft(2 + lag) + 2 * model.draft(2)
    # Four tokens and the next two are a round and a half, and so is one that is not right.
    planned = drafting + model.host(2) + model.score(8)
    assert compared.planned_seconds == pytest.approx((1.5 + 1) / 2 * planned)


def test_planned_lengths_in_step_with_a_text_are_what_patience_must_beat() -> None:
    """The draft is wrong at every fourth token. Three are planned, and always accepted; two, and then the one
    that is left, are not as good, though each of them is."""
    sequences = [SequenceAcceptance(GroupAcceptance(), 0)]
    rule = Patience(ConfidenceTable(), 0.1, 0.1)
    rounds = [
        Round(
            candidates(range(1)),
            [8],
            [0],
            [Outcome(0, num_drafted, num_drafted - is_wrong)],
            seconds([2]),
            0,
            [PatientDraft(rule, [0.9] * num_drafted)],
        )
        for num_drafted, is_wrong in [(1, 0), (2, 1)] * 10
    ]
    for one in rounds:
        one.patient[0].confidences.append(0.99 if one.num_drafted == 1 else 0.01)  # type: ignore[index]
    compared = compare(rounds, [3], sequences, costs(), random.Random(0), most=1000)
    assert compared is not None
    in_step = evaluate([RowOutlook(sequences[0].survival(3, 0.0), 1.0, True)], [3], costs(), 0)
    assert compared.planned_seconds == pytest.approx(10 * in_step.seconds)


def test_what_is_known_of_a_token_counts_for_what_was_planned() -> None:
    """A draft that ended before a token which would mostly have been accepted lost by that."""
    sequences = [SequenceAcceptance(GroupAcceptance(), 0)]
    table = ConfidenceTable()
    planned = []
    for refused in (0.99, 0.5):
        draft = PatientDraft(Patience(table, 0.9, 0.9), [0.99, refused])
        one = Round(candidates(range(1)), [8], [0], [Outcome(0, 1, 1)], seconds([2]), 0, [draft])
        compared = compare([one] * 200, [3], sequences, costs(), random.Random(0), most=200)
        assert compared is not None
        planned.append(compared.planned_seconds)
    # The more tokens would have gone on, the fewer rounds.
    assert planned[0] < 0.95 * planned[1]


def test_rows_that_left_teach_nothing_of_those_that_draft_patiently() -> None:
    """Confidences go with their rows, whoever has left in between."""
    group = GroupAcceptance()
    sequences = {key: {"draft_model": SequenceAcceptance(group, 0)} for key in range(3)}
    drafts = [PatientDraft(Patience(group.confidence), [confidence]) for confidence in (0.99, 0.5, 0.7)]
    before = group.confidence.rates()
    outcomes = [Outcome(2, 1, 1), Outcome(0, 1, 0)]
    learn_acceptance(
        [Round(candidates(range(3)), [8] * 3, [0] * 3, outcomes, None, 0, drafts)], sequences, 0, 0
    )
    changed = [after - rate for rate, after in zip(before, group.confidence.rates(), strict=True)]
    assert changed[-1] < 0 < changed[bin_of(0.7)]
    assert changed[bin_of(0.5)] == 0


def test_rounds_are_compared_with_what_was_stored_then() -> None:
    """Costs are followed by rounds of a long text and by those of the next, short one, alike."""
    truth, model = costs(), costs()
    for one in (truth, model):
        one.score.seconds_per_stored = 2e-5
    for num_stored in [900, 30] * 20:
        truth.look_at(num_stored, 1)
        seconds = RoundSeconds(0.0005, truth.score(1), 0.0001)
        round_ = Round(candidates(range(1)), [0], [0], [Outcome(0, 0, 0)], seconds, num_stored)
        model.look_at(930 - num_stored, 1)
        observe_costs([round_] * 5, model, is_new=False)
    for one in (truth, model):
        one.look_at(500, 1)
    assert model.score(1) == pytest.approx(truth.score(1), rel=0.01)


def test_further_tokens_of_a_row_cost_a_share_of_what_is_stored() -> None:
    curve = CostCurve({1: 0.001, 8: 0.002})
    curve.seconds_per_stored, curve.share_per_query = 1e-5, 0.25
    curve.look_at(200, 2)
    assert curve(2) - curve._of_size(2) == pytest.approx(200e-5)
    assert curve(6) - curve._of_size(6) == pytest.approx(200e-5 * 1.5)
    # A prompt beside them looks at its own tokens.
    assert curve(1000) - curve._of_size(1000) == pytest.approx(200e-5 * (1 + 0.25 * (MAX_QUERIES - 1)))


def test_a_probe_pays_for_the_host_too() -> None:
    """A round that stands alone costs it more than one of many. A moment of a busy machine is not charged,
    and neither is bad luck."""
    found = Search(Plan([0], 1.0, 0.001), best := Plan([2], 2.0, 0.0015), best)
    charged = []
    for host in (1e-4, 3e-4, 1.0):
        probes = Probes()
        probes.save(found, 1)
        before = probes.credit
        assert before is not None
        probes.begin(Plan([3], 2.2, 0.0018), 0.0018, 9)
        outcome = [Outcome(0, 3, 1)]
        seconds = RoundSeconds(0.0003, 0.0013, host)
        probes.settle(10, found, [Round(candidates(range(1)), [3], [0], outcome, seconds, 0)] * 2, 1e-4)
        assert probes.credit is not None
        charged.append(before - probes.credit)
    plain = 2 * 0.0018 - 2 * 2.2 / best.rate
    assert charged == [pytest.approx(plain), pytest.approx(plain + 4e-4), pytest.approx(plain + best.seconds)]

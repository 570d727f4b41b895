"""What the policy does between two looks, what it learns from rounds put aside, and when patience is on."""

import pytest

from engine.draft_length.confidence import ConfidenceTable, Patience
from engine.draft_length.costs import CostCurve, CostModel
from engine.draft_length.learning import Round, learn_acceptance, observe_costs
from engine.draft_length.patient import LEAST_GAIN, PatienceTrial, compare
from engine.draft_length.plan import UNEVEN_KEPT, Plan, RowOutlook, evaluate, search
from engine.draft_length.policy import DraftLengthPolicy
from engine.draft_length.rounds import Candidate, Outcome, RoundSeconds
from engine.draft_length.survival import GroupAcceptance, SequenceAcceptance

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
        if num_rows == 1 and step == 1000:
            policy.trial.learn(100, 2 * LEAST_GAIN, 1.0, 1.0, 1.0)  # patience pays from now on
        (lengths,) = [run(policy, rows, 1, share)]
        now = lengths, policy.patience(0) is None
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
        patience = other.patience(0)
        other.observe(outcomes, seconds(lengths))
        for _ in range(num_rounds - 1):
            other.observe_again(outcomes, seconds(lengths), patience and patience.again())
        assert run(one, rows, num_rounds, 0.5) == lengths
    assert one.state() == other.state()


def test_a_row_that_comes_gets_the_plan_in_force() -> None:
    policy = Counted(costs())
    run(policy, candidates(range(16)), 600)
    length = policy._even_length
    assert length > 0
    before = policy.num_searches
    assert policy.choose([*candidates(range(15)), *candidates(range(20, 21))]) == [length] * 16
    # Half of the rows have ended, and the next ones' prompts are being computed.
    assert policy.choose(candidates(range(8)), num_prompt_tokens=30) == [length] * 8
    assert policy.num_searches == before


def test_what_is_left_of_a_text_shortens_its_draft_only() -> None:
    policy = DraftLengthPolicy(costs())
    policy.trial.is_on = lambda _: False  # type: ignore[method-assign]
    run(policy, candidates(range(1)), 600)
    length = policy._even_length
    assert length > 2
    policy._next_look = 0
    assert policy.choose(candidates(range(1), limit=2)) == [2]
    assert policy._even_length > 2


def test_more_rows_are_looked_at_at_once() -> None:
    policy = Counted(costs())
    run(policy, candidates(range(2)), 600)
    before = policy.num_searches
    policy.choose(candidates(range(8)))
    assert policy.num_searches == before + 1


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
        rounds.append(Round(rows, [3, 3], outcomes, None))
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
    one = Round(candidates(range(3)), [0, 2, 4], [Outcome(2, 4, 4), Outcome(0, 0, 0)], None)
    learn_acceptance([one], sequences, 0, 0)
    assert [len(sequences[key]["draft_model"].counts.reached) for key in range(3)] == [0, 0, 4]


def test_costs_follow_the_median_of_rounds_that_were_alike() -> None:
    rows = candidates(range(1))

    def one(score: float, num_drafted: int) -> Round:
        return Round(rows, [num_drafted], [Outcome(0, num_drafted, 0)], RoundSeconds(0.0005, score, 0.0001))

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
    ratio = curve(8) / curve(1)
    curve.follow(8, 0.1, num_rounds=8)
    assert curve(8) / curve(1) > 1.03 * ratio


def test_uneven_lengths_in_force_must_go_on_paying() -> None:
    policy = DraftLengthPolicy(CostModel({1: 0.0005, 16: 0.001}, SCORE, padding=0.0))
    policy._is_uneven = True
    alike = [RowOutlook([0.8, 0.6, 0.4], 1.0, True)] * 32
    found = search(alike, policy.costs, 0, uneven_gain=UNEVEN_KEPT)
    assert len(set(found.best.lengths)) == 1
    length = found.best.lengths[0]
    uneven = [length] * 31 + [length - 1]
    assert evaluate(alike, uneven, policy.costs, 0).rate * 1.005 > found.best.rate
    assert policy._hold_on(found, uneven, alike, 0).best.lengths == found.best.lengths
    policy._is_uneven = False
    assert policy._hold_on(found, uneven, alike, 0).best.lengths == uneven


@pytest.mark.parametrize("gain", [0.9, 1.1])
def test_patience_is_on_where_it_has_paid(gain: float) -> None:
    trial = PatienceTrial()
    num_on = 0
    for step in range(3000):
        if trial.is_on(step):
            num_on += step >= 1000
            trial.learn(1, gain, 1.0, 1.0, 1.0)
    assert trial.gain == pytest.approx(gain)
    assert (num_on > 1900) == (gain > LEAST_GAIN)
    assert 0 < num_on < 2000


def test_patience_is_compared_with_the_planned_length_of_the_same_rounds() -> None:
    """Three tokens were planned; it drafted five and got them, or one and got none."""
    sequence = SequenceAcceptance(GroupAcceptance(), 0)
    model = costs()
    planned = Plan([3], 2.0, 0.0135)
    table = ConfidenceTable()
    rounds = [
        Round(
            candidates(range(1)),
            [8],
            [Outcome(0, num_drafted, num_accepted)],
            RoundSeconds(0.0005 * num_drafted, 0.011, 0.00013),
            Patience(table, 0.0, 0.0),
        )
        for num_drafted, num_accepted in ((5, 5), (1, 0))
    ]
    compared = compare(rounds, planned, sequence, model)
    assert compared is not None
    num_rounds, tokens, _, planned_tokens, planned_seconds = compared
    assert (num_rounds, tokens) == (2, 7)
    assert planned_tokens == 1 + 3 + 1
    assert planned_seconds == pytest.approx(2 * 0.0135)

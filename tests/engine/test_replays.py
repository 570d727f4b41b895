"""Rounds of other lengths counted over what verdicts tell, against walking through the texts."""

import random
from collections.abc import Sequence

import pytest

from engine.draft_length.confidence import Patience, PatientDraft, bin_of
from engine.draft_length.costs import CostModel
from engine.draft_length.learning import Round, replay
from engine.draft_length.plan import RowOutlook, evaluate, search
from engine.draft_length.policy import DraftLengthPolicy
from engine.draft_length.replays import MOST, Replayed, Replays
from engine.draft_length.rounds import Candidate, Outcome, RoundSeconds
from engine.draft_length.survival import GroupAcceptance, SequenceAcceptance
from tests.engine.patience import NoPatience

EVERY_FOURTH = [True, True, True, False]


def rounds_of(text: Sequence[bool], length: int, next_right: float = 0.0) -> list[Replayed]:
    """The rounds of drafts of ``length`` tokens over a text: whether each of its tokens is drafted right."""
    rounds, place = [], 0
    while place + length < len(text):
        num_accepted = [*text[place : place + length], False].index(False)
        rounds.append(Replayed(length, num_accepted, next_right if num_accepted == length else 0.0))
        place += num_accepted + 1
    return rounds


def mean_accepted(text: Sequence[bool], length: int) -> float:
    rounds = rounds_of(text, length)
    return sum(one.num_accepted for one in rounds) / len(rounds)


def rates_of(text: Sequence[bool], length: int) -> list[float]:
    """Acceptance by position of drafts of ``length`` tokens; some that are one longer have shown that too."""
    rates = []
    for j in range(length + 1):
        rounds = rounds_of(text, max(length, j + 1))
        reached = [one.num_accepted > j for one in rounds if one.num_accepted >= j]
        rates.append(sum(reached) / len(reached))
    return rates


def replayed(text: Sequence[bool], in_force: int) -> Replays:
    replays = Replays()
    replays.learn([rounds_of(text, in_force, rates_of(text, in_force)[-1])])
    return replays


def expected(rates: Sequence[float], length: int) -> float:
    chance, tokens = 1.0, 0.0
    for rate in rates[:length]:
        chance *= rate
        tokens += chance
    return tokens


@pytest.mark.parametrize("in_force", [2, 3, 4, 6])
def test_rounds_are_counted_as_they_would_have_been(in_force: int) -> None:
    """But for the tokens behind drafts accepted to their end, which nobody knows."""
    rng = random.Random(in_force)
    text = [bit for _ in range(2000) for bit in [True] * rng.choice((0, 1, 3, 3, 5, 9)) + [False]]
    replays = replayed(text, in_force)
    for length in range(1, in_force + 1):
        found = replays._num_accepted[length - 1] / replays._num_rounds[length - 1]
        off = 1e-9 if length == in_force else 0.15
        assert found == pytest.approx(mean_accepted(text, length), rel=off), length


def test_what_is_in_step_with_its_text_is_seen() -> None:
    """The draft is wrong at every fourth token. By position, drafts of two say that the first token is right
    every other time, and that three come to little more."""
    text = EVERY_FOURTH * 500
    replays, rates = replayed(text, 2), rates_of(text, 2)
    assert expected(rates, 2) == pytest.approx(mean_accepted(text, 2)) == pytest.approx(1.0, abs=0.02)
    assert expected(rates, 3) == pytest.approx(1.5, abs=0.02)
    assert mean_accepted(text, 3) == pytest.approx(3.0, abs=0.02)
    factors = replays.factors()
    assert factors[1] == pytest.approx(1.0)
    assert factors[2] == MOST  # no more is believed at once
    replays, rates = replayed(text, 3), rates_of(text, 3)
    assert expected(rates, 2) == pytest.approx(2.0, abs=0.02)
    assert replays.factors()[1] < 0.75
    assert replays.factors()[2] == pytest.approx(1.0)


def test_texts_without_a_pattern_are_left_as_they_are() -> None:
    rng = random.Random(1)
    replays = replayed([rng.random() < 0.75 for _ in range(20_000)], 4)
    assert replays.factors()[:5] == pytest.approx([1.0] * 5, abs=0.04)


def test_little_is_believed_of_a_few_rounds() -> None:
    replays = Replays()
    assert replays.factors() == []
    replays.learn([rounds_of(EVERY_FOURTH * 3, 2, 1.0)])
    assert replays.factors() == pytest.approx([1.0] * 4, abs=0.15)


def test_probes_do_not_change_what_is_in_force() -> None:
    replays = replayed(EVERY_FOURTH * 100, 2)
    before, usual = replays.factors(), rounds_of(EVERY_FOURTH, 2, 1.0)
    replays.learn([[Replayed(3, 3, 0.0, is_probe=True)] * 2 + usual])
    assert replays.factors()[:3] == pytest.approx(before[:3], abs=0.05)


def test_while_only_probes_draft_nothing_is_in_step() -> None:
    replays = replayed(EVERY_FOURTH * 100, 2)
    assert replays.factors()
    replays.learn([[Replayed(2, 2, 0.5, is_probe=True)] * 2])
    assert replays.factors() == []


def test_a_token_that_nobody_knows_is_as_likely_as_it_is_said_to_be() -> None:
    counts = []
    for next_right in (0.0, 0.5, 1.0):
        replays = Replays()
        replays.learn([[Replayed(1, 1, next_right)] * 2000])
        counts.append(replays._num_accepted[2] / replays._num_rounds[2])
    assert counts == pytest.approx([1.0, 2.0, 3.0], rel=0.05)


def test_only_rounds_of_one_text_with_drafts_are_strung_together() -> None:
    """What somebody else's row was at that place is another text, as is what came before a pause."""
    group = GroupAcceptance()
    sequences = {key: {"draft_model": SequenceAcceptance(group, 0)} for key in range(3)}
    learned: list[list[Replayed]] = []
    group.replay = learned.extend  # type: ignore[assignment, method-assign]

    def one(*outcomes: Outcome) -> Round:
        rows = [Candidate(outcome.key, "draft_model", 0.0, 8) for outcome in outcomes]
        return Round(rows, [2] * len(rows), [0] * len(rows), outcomes, None, 0)

    rounds = [
        one(Outcome(0, 2, 1), Outcome(1, 2, 2)),
        one(Outcome(0, 0, 0), Outcome(1, 2, 0)),
        one(Outcome(0, 2, 2), Outcome(2, 2, 2)),
        one(Outcome(0, 2, 0), Outcome(2, 2, 1)),
    ]
    likely = sequences[0]["draft_model"].rate(2)
    assert likely > 0.5
    replay(rounds, sequences, first=0, most=100)
    of_second_place = [
        [Replayed(2, 2, likely), Replayed(2, 0)],
        [Replayed(2, 2, likely), Replayed(2, 1)],
    ]
    assert learned == [
        [Replayed(2, 1)],
        [Replayed(2, 2, likely), Replayed(2, 0)],
        *of_second_place,
    ]
    learned.clear()
    replay(rounds, sequences, first=3, most=4)
    assert learned == of_second_place


def test_a_refused_token_is_as_likely_as_its_confidence_says() -> None:
    group = GroupAcceptance()
    sequences = {0: {"draft_model": SequenceAcceptance(group, 0)}}
    learned: list[list[Replayed]] = []
    group.replay = learned.extend  # type: ignore[assignment, method-assign]
    drafts = [PatientDraft(Patience(group.confidence), [0.99, 0.5])]
    rows = [Candidate(0, "draft_model", 0.0, 8)]
    replay([Round(rows, [2], [0], [Outcome(0, 1, 1)], None, 0, drafts)], sequences, first=0, most=9)
    assert learned == [[Replayed(1, 1, group.confidence.rate(bin_of(0.5)))]]


def test_a_search_goes_by_the_tokens_accepted() -> None:
    costs = CostModel({1: 1e-4}, {1: 1e-3, 8: 2e-3}, padding=0.0)
    survival = [0.5, 0.5, 0.5]
    in_step = RowOutlook(survival, 1.0, True, [1.0, 1.0, 2.0])
    assert in_step.accepted == [0.5, 1.0, 3.0]
    assert evaluate([in_step] * 2, [3, 1], costs, 0).tokens == 2 + 3.0 + 0.5
    assert search([in_step] * 2, costs, 0).best.lengths == [3, 3]
    assert search([in_step] * 2, costs, 0).best.tokens == 2 + 6.0


@pytest.mark.parametrize("in_step", [2, 3])
def test_the_policy_stays_in_step(in_step: int) -> None:
    """Texts in which the draft is wrong after every so many tokens: drafts of as many are always accepted."""
    text = ([True] * in_step + [False]) * 4000
    draft, score = 2e-4, {size: 1e-3 + 2e-4 * size for size in (1, 2, 4, 8, 16)}
    policy = DraftLengthPolicy(CostModel({1: draft}, score, padding=0.0))
    policy.patient.trials[1] = NoPatience()
    place, lengths = 0, []
    for _ in range(1600):
        (length,) = policy.choose([Candidate(0, "draft_model", 0.0, 8)])
        num_accepted = [*text[place : place + length], False].index(False)
        place += num_accepted + 1
        lengths.append(length)
        seconds = RoundSeconds(draft * length, 1e-3 + 2e-4 * (1 + length), 1e-4)
        policy.observe([Outcome(0, length, num_accepted)], seconds)
    assert lengths[200:].count(in_step) > 0.8 * len(lengths[200:])

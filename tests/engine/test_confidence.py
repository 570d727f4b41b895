"""Drafts that end where the draft is unsure: what is kept, what is learnt, and what the policy asks for."""

import random

import pytest
import torch

from engine.draft_length.confidence import MOST_SEEN, ConfidenceTable, Patience, PatientDraft, bin_of
from engine.draft_length.costs import CostModel
from engine.draft_length.policy import DraftLengthPolicy
from engine.draft_length.rounds import Candidate, Outcome, RoundSeconds
from engine.proposers.draft_model import rows_going_on
from engine.sampling.sampler import DraftDraw
from tests.engine.patience import NoPatience, known, spend

SCORE = {1: 10e-3, 5: 12e-3, 9: 14e-3}


def draw(*confidence: float) -> DraftDraw:
    return DraftDraw(torch.zeros(len(confidence), dtype=torch.int64), None, torch.tensor(confidence))


def test_a_token_too_unlikely_to_be_scored_is_not_kept() -> None:
    patient = PatientDraft(Patience(known(), least_to_score=0.5, least_to_draft=0.0))
    lengths = [4]
    assert rows_going_on([patient], lengths, [0], 0, draw(0.99)) == [0]
    assert rows_going_on([patient], lengths, [0], 1, draw(0.1)) == []
    assert lengths == [1]
    assert patient.refused_rate(1) == pytest.approx(0.2)


def test_a_token_that_is_kept_can_be_the_last() -> None:
    patient = PatientDraft(Patience(known(), least_to_score=0.1, least_to_draft=0.7))
    lengths = [4]
    assert rows_going_on([patient], lengths, [0], 0, draw(0.6)) == []
    assert lengths == [1]
    assert patient.refused_rate(1) is None


def test_rows_without_patience_draft_what_they_were_told() -> None:
    patient = PatientDraft(Patience(known(), least_to_score=0.9, least_to_draft=0.9))
    lengths = [2, 2]
    assert rows_going_on([None, patient], lengths, [0, 1], 0, draw(0.1, 0.1)) == [0]
    assert rows_going_on([None, patient], lengths, [0], 1, draw(0.1)) == []
    assert lengths == [2, 0]


def test_the_table_learns_from_verdicts_up_to_the_first_rejection() -> None:
    table = ConfidenceTable()
    for _ in range(500):
        patient = PatientDraft(Patience(table, 0.0, 0.0))
        for confidence in (0.5, 0.98, 0.5):
            patient.keeps(confidence)
        patient.learn(num_kept=3, num_accepted=1)  # the second is wrong, the third was never judged
    state = table.state()
    assert state["0.4"] > 0.9
    assert state["0.97"] < 0.1


def test_an_unsure_token_that_was_refused_teaches_how_often_it_comes_only() -> None:
    table = ConfidenceTable()
    before = table.rates()
    for _ in range(100):
        PatientDraft(Patience(table), [0.99, 0.5]).learn(num_kept=1, num_accepted=1)
    assert table.rates()[bin_of(0.5)] == before[bin_of(0.5)]
    assert table.rates()[bin_of(0.99)] > before[bin_of(0.99)]


@pytest.mark.parametrize("to_score", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("to_draft", [0.02, 0.2])
def test_another_pass_is_worth_its_time_from_where_the_kept_tokens_pay_for_it(
    to_score: float, to_draft: float
) -> None:
    table = ConfidenceTable()
    for _ in range(300):
        for confidence, accepted in ((0.99, 1), (0.8, 1), (0.8, 0), (0.45, 0)):
            table.learn([confidence], 1, accepted)

    def gain(survival: float) -> float:
        """Expected tokens of another draft pass, less what it takes: each bin by itself."""
        kept = sum(
            seen * max(0.0, survival * rate - to_score)
            for seen, rate in zip(table._seen, table.rates(), strict=True)
        )
        return kept / table._num_seen - to_draft

    least = table.least_to_draft(to_score, to_draft)
    assert gain(least) == pytest.approx(0.0, abs=1e-9)
    assert gain(0.99 * least) < 0 < gain(1.01 * least)


def test_what_was_seen_is_forgotten_in_time() -> None:
    table = ConfidenceTable()
    for confidence in (0.45, 0.99):
        for _ in range(5000):
            table.learn([confidence], 0, 0)
    assert table._seen[-1] > 0.95 * table._num_seen
    assert table._num_seen == pytest.approx(sum(table._seen))
    assert table._num_seen <= MOST_SEEN


def test_no_token_is_refused_of_whose_like_little_is_known() -> None:
    """The draft is far better than its confidence says."""
    table = ConfidenceTable()
    for _ in range(20):
        patient = PatientDraft(Patience(table, 0.7, 0.7))
        assert patient.keeps(0.5)
        patient.learn(num_kept=1, num_accepted=1)
    assert table.rate(bin_of(0.5)) > 0.85
    for _ in range(20):
        table.learn([0.6], 1, 0)
    assert not PatientDraft(Patience(table, 0.7, 0.7)).keeps(0.6)


def policy_with(confidence: float, accepted: bool, rows: int = 1) -> tuple[DraftLengthPolicy, list[int]]:
    """After 300 rounds in which every draft had this confidence and came to this."""
    policy = DraftLengthPolicy(CostModel({1: 1e-3, 8: 2e-3}, SCORE))
    candidates = [Candidate(row, "draft_model", 0.0, 8) for row in range(rows)]
    drafted: list[int] = []
    for _ in range(300):
        chosen = policy.choose(candidates)
        outcomes = []
        for row, length in enumerate(chosen):
            lengths, active, position = [length], [0] if length else [], 0
            while active:
                active = rows_going_on(
                    [policy.patient_draft(row)], lengths, active, position, draw(confidence)
                )
                position += 1
            outcomes.append(Outcome(row, lengths[0], lengths[0] if accepted else 0))
        drafted.append(max(outcome.num_draft_tokens for outcome in outcomes))
        policy.observe(outcomes, RoundSeconds(1e-3 * drafted[-1], 1e-2 + 5e-4 * drafted[-1], 1e-4))
    return policy, drafted


def test_sure_drafts_that_hold_are_long() -> None:
    _, drafted = policy_with(confidence=0.99, accepted=True)
    assert sum(drafted[-100:]) > 700


def test_drafts_that_fail_are_given_up_and_tried_again() -> None:
    _, drafted = policy_with(confidence=0.99, accepted=False)
    assert 0 < sum(drafted[-100:]) < 50


def two_kinds(num_rows: int, telling: bool, num_rounds: int = 1500) -> tuple[float, float]:
    """Tokens per second with and without patience, where every other token is hard; whether the draft's
    confidence tells which. Of a plain round's time a third is what any further token costs the target."""

    def score(num_tokens: int) -> float:
        return 1e-3 * (num_rows + num_tokens)

    sizes, rates = (1, 2, 4, 8, 16, 32, 64, 128), []
    for is_off in (False, True):
        rng = random.Random(1)
        drafts, scores = {size: 3e-4 * size for size in sizes}, {size: score(size) for size in sizes}
        policy = DraftLengthPolicy(CostModel(drafts, scores, padding=0.0))
        if is_off:
            policy.patient.trials[num_rows] = NoPatience()
        rows = [Candidate(row, "draft_model", 0.0, 8) for row in range(num_rows)]
        tokens = seconds = 0.0
        for step in range(num_rounds):
            chosen = policy.choose(rows)
            outcomes, num_passes = [], 0
            for row, length in enumerate(chosen):
                hard = [rng.random() < 0.5 for _ in range(length)]
                right = [rng.random() < (0.2 if is_hard else 0.95) for is_hard in hard]
                unsure = hard if telling else [rng.random() < 0.5 for _ in hard]
                num_kept = num_drawn = length
                if (patient := policy.patient_draft(row)) is not None:
                    num_kept, num_drawn = spend(patient, [0.5 if doubt else 0.99 for doubt in unsure])
                outcomes.append(Outcome(row, num_kept, [*right[:num_kept], False].index(False)))
                num_passes += num_drawn
            num_tokens = num_rows + sum(one.num_draft_tokens for one in outcomes)
            times = RoundSeconds(3e-4 * num_passes, score(num_tokens), 1e-3 * num_rows)
            policy.observe(outcomes, times)
            if step > num_rounds // 2:
                tokens += num_rows + sum(one.num_accepted_tokens for one in outcomes)
                seconds += times.draft + times.score + times.host
        rates.append(tokens / seconds)
    return rates[0], rates[1]


@pytest.mark.parametrize("num_rows", [1, 3, 12])
def test_rows_draft_by_their_confidence_where_that_tells(num_rows: int) -> None:
    patient, planned = two_kinds(num_rows, telling=True)
    assert patient > 1.06 * planned


@pytest.mark.parametrize("num_rows", [1, 3, 12])
def test_hardly_anything_is_lost_where_it_tells_nothing(num_rows: int) -> None:
    patient, planned = two_kinds(num_rows, telling=False)
    assert patient > 0.97 * planned


def test_every_number_of_rows_has_its_own_trial() -> None:
    policy, _ = policy_with(confidence=0.99, accepted=True, rows=2)
    before = 0
    for step in range(200):
        if step == 8:  # What two rows did has been learned from.
            assert (before := policy.patient.trials[2].num_drafts) > 0
        chosen = policy.choose(rows := [Candidate(row, "draft_model", 0.0, 8) for row in range(4)])
        policy.observe(
            [Outcome(row.key, n, n) for row, n in zip(rows, chosen, strict=True)],
            RoundSeconds(1e-3, 2e-2, 1e-4),
        )
    assert policy.patient.trials[2].num_drafts == before
    assert set(policy.patient.trials) == {2, 4}

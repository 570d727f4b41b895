"""Drafts that end where the draft is unsure: what is kept, what is learnt, and what the policy asks for."""

import pytest
import torch

from engine.draft_length.confidence import ConfidenceTable, Patience
from engine.draft_length.costs import CostModel
from engine.draft_length.policy import DraftLengthPolicy
from engine.draft_length.rounds import Candidate, Outcome, RoundSeconds
from engine.proposers.draft_model import rows_going_on
from engine.sampling.sampler import DraftDraw

SCORE = {1: 10e-3, 5: 12e-3, 9: 14e-3}


def draw(*confidence: float) -> DraftDraw:
    return DraftDraw(torch.zeros(len(confidence), dtype=torch.int64), None, torch.tensor(confidence))


def test_a_token_too_unlikely_to_be_scored_is_not_kept() -> None:
    patience = Patience(ConfidenceTable(), least_to_score=0.5, least_to_draft=0.0)
    lengths = [4]
    assert rows_going_on([patience], lengths, [0], 0, draw(0.99)) == [0]
    assert rows_going_on([patience], lengths, [0], 1, draw(0.1)) == []
    assert lengths == [1]
    assert patience.refused_rate == pytest.approx(0.2)


def test_a_token_that_is_kept_can_be_the_last() -> None:
    patience = Patience(ConfidenceTable(), least_to_score=0.1, least_to_draft=0.7)
    lengths = [4]
    assert rows_going_on([patience], lengths, [0], 0, draw(0.6)) == []
    assert lengths == [1]
    assert patience.refused_rate is None


def test_rows_without_patience_draft_what_they_were_told() -> None:
    patience = Patience(ConfidenceTable(), least_to_score=0.9, least_to_draft=0.9)
    lengths = [2, 2]
    assert rows_going_on([None, patience], lengths, [0, 1], 0, draw(0.1, 0.1)) == [0]
    assert rows_going_on([None, patience], lengths, [0], 1, draw(0.1)) == []
    assert lengths == [2, 0]


def test_the_table_learns_from_verdicts_up_to_the_first_rejection() -> None:
    table = ConfidenceTable()
    for _ in range(500):
        patience = Patience(table, 0.0, 0.0)
        for confidence in (0.5, 0.98, 0.5):
            patience.keeps(confidence)
        patience.learn(num_accepted=1)  # the second is wrong, the third was never judged
    state = table.state()
    assert state["0.4"] > 0.9
    assert state["0.97"] < 0.1


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
                active = rows_going_on([policy.patience(row)], lengths, active, position, draw(confidence))
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


def test_rows_that_share_their_passes_keep_the_planned_length() -> None:
    policy, _ = policy_with(confidence=0.5, accepted=True, rows=2)
    policy.choose([Candidate(row, "draft_model", 0.0, 8) for row in range(2)])
    assert policy.patience(0) is policy.patience(1) is None

"""A lone row's patience: when a draft ends early, and whether that pays.

Patience needs the draft's confidence before every token, and gains where that tells much.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from engine.draft_length.costs import CostModel
from engine.draft_length.learning import Round
from engine.draft_length.plan import Plan
from engine.draft_length.survival import SequenceAcceptance

# Patience is on where it has gained so much, in so many rounds at least. Where it is off it is tried for some
# rounds again and again, seldom once it is known; where it is on, some rounds are as planned.
LEAST_GAIN, SOME_ROUNDS = 1.04, 128
TRIAL_ROUNDS, TRIAL_EVERY, TRIAL_SELDOM, NEW_ROUNDS = 16, 128, 1024, 128
PLANNED_ROUNDS, PLANNED_EVERY = 4, 128
# Decay of what trials have shown, per round.
TRIAL_DECAY = 0.995


class Compared(NamedTuple):
    """Rounds with patience, and what the planned length would have made of them."""

    num_rounds: int
    tokens: float
    seconds: float
    planned_tokens: float
    planned_seconds: float


class PatienceTrial:
    """Whether patience pays for a lone row, by rounds that had it, next to what the planned length would have
    made of the same rounds. It is no gain where the draft's confidence tells little, or a token of a fixed
    length is cheaper to draft than one that must be looked at first."""

    def __init__(self) -> None:
        self.num_rounds = 0  # measured
        self.gain = 1.0
        self._next_trial = 0
        self._until = 0
        self._tokens = self._seconds = self._planned_tokens = self._planned_seconds = 0.0

    def is_on(self, current_round: int) -> bool:
        """Whether the rounds from this one on have patience."""
        if self.num_rounds >= SOME_ROUNDS and self.gain > LEAST_GAIN:
            # Now and then what was planned: its time must stay known.
            return current_round % PLANNED_EVERY >= PLANNED_ROUNDS
        if current_round >= self._next_trial:
            is_new = self.num_rounds < NEW_ROUNDS
            self._next_trial = current_round + (TRIAL_EVERY if is_new else TRIAL_SELDOM)
            self._until = current_round + TRIAL_ROUNDS
        return current_round < self._until

    def until(self, current_round: int) -> int:
        """The round from which on that is to be asked again."""
        if self.num_rounds >= SOME_ROUNDS and self.gain > LEAST_GAIN:
            place = current_round % PLANNED_EVERY
            return current_round - place + (PLANNED_ROUNDS if place < PLANNED_ROUNDS else PLANNED_EVERY)
        return self._until if current_round < self._until else self._next_trial

    def learn(self, compared: Compared | None) -> None:
        """What rounds with patience came to, and what they would have without; None where none tells."""
        if compared is None:
            return
        num_rounds, tokens, seconds, planned_tokens, planned_seconds = compared
        decay = TRIAL_DECAY**num_rounds
        self.num_rounds += num_rounds
        self._tokens = decay * self._tokens + tokens
        self._seconds = decay * self._seconds + seconds
        self._planned_tokens = decay * self._planned_tokens + planned_tokens
        self._planned_seconds = decay * self._planned_seconds + planned_seconds
        self.gain = self._tokens / self._seconds / (self._planned_tokens / self._planned_seconds)

    def state(self) -> dict[str, float]:
        """For people."""
        return {"num_rounds": self.num_rounds, "gain": round(self.gain, 3)}


def thresholds(best: Plan, limit: int, sequence: SequenceAcceptance, costs: CostModel) -> tuple[float, float]:
    """How often a token must survive to be worth its place in the target's pass, and what is drafted already
    to be worth another draft pass: what those cost at the rate of ``best``."""
    longest = max(2, limit)
    score_seconds = (costs.score(1 + longest) - costs.score(2)) / (longest - 1)
    usual_rate = max(0.1, sequence.survival(1, 0.0)[0])
    return best.rate * score_seconds, best.rate * (score_seconds + costs.draft(1)) / usual_rate


def compare(
    rounds: Sequence[Round], planned: int, sequence: SequenceAcceptance, costs: CostModel
) -> Compared | None:
    """Of rounds with patience: how many, tokens and seconds, and what drafts of ``planned`` tokens would have
    come to.

    Seconds are what the costs say, but for the drafts' own, which are looked at one by one: those times the
    median of what some of them took to that. Nothing else differs, and a mood of the machine must not look
    like a gain. The costs ``look_at`` those rounds from then on.
    """
    told = [one for one in rounds if one.outcomes and not one.outcomes[0].ended]
    if not any(one.seconds for one in told):
        return None
    costs.look_at(sum(one.num_stored for one in told) // len(told), 1)
    chances = sequence.survival(planned, 0.0)
    tokens = planned_tokens = drafting = scoring = 0.0
    ratios = []
    for one in told:
        assert one.patience is not None
        num_drafted, num_accepted = one.outcomes[0].num_draft_tokens, one.outcomes[0].num_accepted_tokens
        refused = one.patience.refused_rate
        seconds = _draft_seconds(costs, num_drafted + (refused is not None), one.lags[0])
        if one.seconds is not None:
            ratios.append(one.seconds.draft / seconds)
        drafting += seconds
        scoring += costs.host(1) + costs.score(1 + num_drafted)
        tokens += 1 + num_accepted
        planned_tokens += 1 + min(num_accepted, planned)
        if num_accepted == num_drafted < planned:
            planned_tokens += _beyond(num_drafted, chances, refused)
    planned_seconds = costs.host(1) + costs.score(1 + planned) + _draft_seconds(costs, planned, 0)
    seconds = drafting * median(ratios) + scoring
    return Compared(len(told), tokens, seconds, planned_tokens, len(told) * planned_seconds)


def _draft_seconds(costs: CostModel, num_passes: int, lag: int) -> float:
    """Of a lone row, which catches up in the first of its passes."""
    return costs.draft_start + costs.draft(1 + lag) + (num_passes - 1) * costs.draft(1)


def _beyond(num_drafted: int, chances: Sequence[float], next_rate: float | None) -> float:
    """Tokens expected beyond a draft that was accepted to its end, from a longer one. ``next_rate`` of the
    next token, if it is known."""
    so_far = chances[num_drafted - 1] if num_drafted else 1.0
    further = sum(chances[num_drafted:]) / max(so_far, 1e-9)
    if next_rate is None:
        return further
    return further * next_rate * so_far / max(chances[num_drafted], 1e-9)

"""How far drafts survive: the chance that the j-th drafted token is accepted, by position.

``a_j``, the rate at which position j is accepted when it is reached, is counted with decay, for every
group of sequences (same method, similar temperature) and for every sequence, which starts from its group.
A position hardly ever reached is taken to be like the one before it. Survival to j is the product of
``a_1`` to ``a_j``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.draft_length.confidence import ConfidenceTable
from engine.draft_length.replays import Replayed, Replays

# Decay of the counts per draft: a group remembers about 200 drafts, a sequence about 100.
GROUP_DECAY, SEQUENCE_DECAY = 0.995, 0.99
# The same for further drafts of one round: many rows must not make a group forget within a few rounds.
SAME_ROUND_DECAY = 0.999
# What was known before a pause of so many rounds is old: it is worth less than it was, and of a group no more
# than so many drafts, however many there were. In a batch a probe is often one row's and can seldom be
# afforded: more is believed of it. That a sequence is harder than its group is not forgotten as fast.
PAUSE, PAUSED_DECAY, PAUSED_WORTH = 16, 0.6, 5.0
LONE_PAUSED_DECAY, LONE_PAUSED_WORTH = 0.85, 12.0
# A round long before the first one.
NEVER = -1_000_000
# The first draft of all starts optimistic; being wrong costs a few rounds.
FIRST_RATE = 0.6
# What a group assumes of its next first token is that, and what it has seen over so many drafts, pauses or
# not: a draft that was never right is not given the benefit of the doubt after every pause anew.
LONG_DECAY = 0.998
# How many drafts the assumptions are worth: of a group that the next position is like the last, of a
# sequence that it is like its group.
GROUP_WEIGHT, SEQUENCE_WEIGHT = 3.0, 10.0
# The text has changed when the first drafted tokens of late do so much better or worse than expected; what
# was known then loses most of its weight.
DRIFT_RATE, MAX_DRIFT, CHANGED_DECAY = 0.2, 0.5, 0.3
# The share of the tokens asked for that a proposer really drafts; a look-up often finds nothing.
FILL_RATE = 0.1


@dataclass(slots=True)
class Verdicts:
    """What became of some drafts: how many reached each position, how many were accepted there."""

    is_lone: bool = False  # the only row of its rounds
    num_drafts: int = 0
    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def add(self, num_drafted: int, num_accepted: int, count: int = 1) -> None:
        """``count`` drafts alike. A verdict speaks of the accepted positions and the first rejected one."""
        self._reach(num_drafted)
        self.num_drafts += count
        for position in range(num_accepted):
            self.reached[position] += count
            self.accepted[position] += count
        if num_accepted < num_drafted:
            self.reached[num_accepted] += count

    def add_next(self, position: int, rate: float, count: int = 1) -> None:
        """``count`` drafts were accepted to their ends, and the next token would have been so often. Where a
        draft refused it, a position would seem better than it is without counting that: only the likely
        tokens get there."""
        self._reach(position + 1)
        self.reached[position] += count
        self.accepted[position] += rate * count

    def update(self, other: "Verdicts") -> None:
        self._reach(len(other.reached))
        self.num_drafts += other.num_drafts
        for position, (reached, accepted) in enumerate(zip(other.reached, other.accepted, strict=True)):
            self.reached[position] += reached
            self.accepted[position] += accepted

    def _reach(self, num_positions: int) -> None:
        missing = num_positions - len(self.reached)
        if missing > 0:
            self.reached += [0.0] * missing
            self.accepted += [0.0] * missing


class AcceptanceCounts:
    """Decaying counts of drafts that reached each position and of those accepted there.

    Instead of shrinking what is old, what is new weighs more: ``weight`` is that of the next draft.
    """

    def __init__(self) -> None:
        self.reached: list[float] = []
        self.accepted: list[float] = []
        self.weight = 1.0
        self._drift = 0.0

    def fade(self, factor: float) -> None:
        self.weight /= factor
        if self.weight > 1e12:
            self.reached = [count / self.weight for count in self.reached]
            self.accepted = [count / self.weight for count in self.accepted]
            self.weight = 1.0

    def pause(self, decay: float, most: float = math.inf) -> None:
        """What comes next is told after a while without drafts. What is known is worth ``most`` drafts."""
        worth = self.reached[0] / self.weight if self.reached else 0.0
        self.fade(min(decay, most / max(worth, 1.0)))

    def rate(self, position: int, otherwise: float, otherwise_worth: float) -> float:
        """Acceptance rate there; ``otherwise`` is what is assumed, and how many drafts that is worth."""
        if position >= len(self.reached):
            return otherwise
        worth = otherwise_worth * self.weight
        return (self.accepted[position] + worth * otherwise) / (self.reached[position] + worth)

    def notice_change(self, verdicts: Verdicts, expected: float) -> None:
        """By the first drafted tokens, against the rate at which they were expected to be accepted."""
        if not verdicts.reached or not verdicts.reached[0]:
            return
        share = 1 - (1 - DRIFT_RATE) ** verdicts.reached[0]
        self._drift += share * (verdicts.accepted[0] / verdicts.reached[0] - expected - self._drift)
        if abs(self._drift) > MAX_DRIFT:
            self.fade(CHANGED_DECAY)
            self._drift = 0.0

    def add(self, verdicts: Verdicts, decay: float) -> None:
        """``decay`` of what is known by these drafts together."""
        self.fade(decay)
        missing = len(verdicts.reached) - len(self.reached)
        if missing > 0:
            self.reached += [0.0] * missing
            self.accepted += [0.0] * missing
        for position, (reached, accepted) in enumerate(zip(verdicts.reached, verdicts.accepted, strict=True)):
            self.reached[position] += self.weight * reached
            self.accepted[position] += self.weight * accepted


class GroupAcceptance:
    """What all sequences of one method and temperature bucket have shown."""

    def __init__(self) -> None:
        self.counts = AcceptanceCounts()
        self.first = AcceptanceCounts()  # of the first tokens, over a long time
        self.confidence = ConfidenceTable()
        self.replays = Replays()
        self.factors: list[float] = []  # of the tokens accepted, by length
        self.fill = 1.0
        self.last_drafted = NEVER  # round
        self._rates: list[float] | None = None

    def learn(self, verdicts: Verdicts, first_round: int, last_round: int) -> None:
        """The verdicts on drafts of these rounds."""
        counts = self.counts
        if first_round - self.last_drafted > PAUSE:
            worth = LONE_PAUSED_WORTH if verdicts.is_lone else PAUSED_WORTH
            counts.pause(LONE_PAUSED_DECAY if verdicts.is_lone else PAUSED_DECAY, worth)
        counts.notice_change(verdicts, self.first_rate)
        first = Verdicts(num_drafts=verdicts.num_drafts)
        first.reached, first.accepted = verdicts.reached[:1], verdicts.accepted[:1]
        self.first.add(first, LONG_DECAY**verdicts.num_drafts)
        num_rounds = min(last_round - first_round + 1, verdicts.num_drafts)
        decay = GROUP_DECAY**num_rounds * SAME_ROUND_DECAY ** (verdicts.num_drafts - num_rounds)
        counts.add(verdicts, decay)
        self.last_drafted = last_round
        self._rates = None

    @property
    def first_rate(self) -> float:
        """``a_1``."""
        return self.counts.rate(0, self._assumed, GROUP_WEIGHT)

    @property
    def _assumed(self) -> float:
        return self.first.rate(0, FIRST_RATE, GROUP_WEIGHT)

    def rates(self) -> list[float]:
        """``a_1`` to ``a_j`` of the positions seen so far."""
        if self._rates is None:
            rate, rates = self._assumed, []
            for position in range(len(self.counts.reached)):
                rate = self.counts.rate(position, rate, GROUP_WEIGHT)
                rates.append(rate)
            self._rates = rates
        return self._rates

    def replay(self, texts: Sequence[Sequence[Replayed]]) -> None:
        """What the rounds of some texts say of other lengths."""
        self.replays.learn(texts)
        self.factors = self.replays.factors()

    def survival(self, num_positions: int, floor: float) -> list[float]:
        """Chance to be accepted, by position; ends early where it falls below ``floor``."""
        rates, rate, chance = self.rates(), FIRST_RATE, 1.0
        chances = []
        for position in range(num_positions):
            rate = rates[position] if position < len(rates) else rate
            chance *= rate
            if chance < floor:
                break
            chances.append(chance)
        return chances

    def state(self) -> dict[str, object]:
        """Acceptance rate and survival by position, and how many drafts of late reached it."""
        chance, survival = 1.0, []
        for rate in self.rates():
            chance *= rate
            survival.append(round(chance, 4))
        return {
            "acceptance_rate": [round(rate, 4) for rate in self.rates()],
            "survival": survival,
            "recent_drafts": [round(reached / self.counts.weight, 1) for reached in self.counts.reached],
            "acceptance_by_confidence": self.confidence.state(),
            "drafted_of_asked": round(self.fill, 3),
        }


class SequenceAcceptance:
    """One sequence, on top of its group."""

    def __init__(self, group: GroupAcceptance, current_round: int) -> None:
        self.group = group
        self.counts = AcceptanceCounts()
        self.fill = group.fill
        self.last_drafted = current_round

    def learn_all(self, verdicts: Verdicts, first_round: int, last_round: int) -> None:
        """The verdicts on its drafts of these rounds; its group is told by whoever tells it."""
        counts = self.counts
        if first_round - self.last_drafted > PAUSE:
            counts.pause(LONE_PAUSED_DECAY)
        counts.notice_change(verdicts, self._first_rate())
        counts.add(verdicts, SEQUENCE_DECAY**verdicts.num_drafts)
        self.last_drafted = last_round

    def learn(
        self, current_round: int, num_asked: int, num_drafted: int, num_accepted: int, ended: bool
    ) -> None:
        """The verdict on one draft, for the group too. One cut short by the end of the text is not
        counted."""
        self.add_fill(num_asked, num_drafted, 1)
        if num_drafted and not ended:
            verdicts = Verdicts()
            verdicts.add(num_drafted, num_accepted)
            self.learn_all(verdicts, current_round, current_round)
            self.group.learn(verdicts, current_round, current_round)
        self.last_drafted = self.group.last_drafted = current_round

    def add_fill(self, num_asked: int, num_drafted: int, num_drafts: int) -> None:
        """Of the tokens asked for in some drafts, so many were drafted."""
        if num_drafted < num_asked or self.fill < 1:
            share, rate = num_drafted / num_asked, 1 - (1 - FILL_RATE) ** num_drafts
            self.fill += rate * (share - self.fill)
            self.group.fill += rate * (share - self.group.fill)

    def age(self, current_round: int) -> int:
        """Rounds since it drafted, or since anyone like it did if that is longer: short sequences must not
        keep a group from being tried again by being new all the time."""
        return current_round - min(self.last_drafted, self.group.last_drafted)

    def survival(self, num_positions: int, floor: float) -> list[float]:
        """Chance to be accepted, by position; ends early where it falls below ``floor``."""
        group_rates, counts = self.group.rates(), self.counts
        num_known = len(counts.reached)
        rate = FIRST_RATE
        chance, chances = 1.0, []
        for j in range(num_positions):
            if j < len(group_rates):
                rate = group_rates[j]
                if j < num_known:
                    rate = counts.rate(j, rate, SEQUENCE_WEIGHT)
            chance *= rate
            if chance < floor:
                break
            chances.append(chance)
        return chances

    def rate(self, position: int) -> float:
        """Acceptance rate there."""
        rates = self.group.rates()
        otherwise = rates[min(position, len(rates) - 1)] if rates else FIRST_RATE
        return self.counts.rate(position, otherwise, SEQUENCE_WEIGHT)

    def _first_rate(self) -> float:
        return self.counts.rate(0, self.group.first_rate, SEQUENCE_WEIGHT)

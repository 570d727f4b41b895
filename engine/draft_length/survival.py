"""How far drafts survive: the chance that the j-th drafted token is accepted, by position.

``a_j``, the rate at which position j is accepted when it is reached, is counted with decay, for every
group of sequences (same method, similar temperature) and for every sequence, which starts from its group.
A position hardly ever reached is taken to be like the one before it. Survival to j is the product of
``a_1`` to ``a_j``.
"""

from engine.draft_length.confidence import ConfidenceTable, Patience

# Decay of the counts per draft: a group remembers about 100 drafts, a sequence about 50.
GROUP_DECAY, SEQUENCE_DECAY = 0.99, 0.98
# The same for further drafts of one round: many rows must not make a group forget within a few rounds.
SAME_ROUND_DECAY = 0.9975
# What was known before a pause of so many rounds is old, and the first draft after it counts for more.
PAUSE, PAUSED_DECAY = 16, 0.7
# A round long before the first one.
NEVER = -1_000_000
# The first draft of all starts optimistic; being wrong costs a few rounds.
FIRST_RATE = 0.6
# How many drafts the assumptions are worth: of a group that the next position is like the last, of a
# sequence that it is like its group.
GROUP_WEIGHT, SEQUENCE_WEIGHT = 3.0, 10.0
# The text has changed when the first drafted tokens of late do so much better or worse than expected; what
# was known then loses most of its weight.
DRIFT_RATE, MAX_DRIFT, CHANGED_DECAY = 0.2, 0.5, 0.3
# The share of the tokens asked for that a proposer really drafts; a look-up often finds nothing.
FILL_RATE = 0.1


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

    def rate(self, position: int, otherwise: float, otherwise_worth: float) -> float:
        """Acceptance rate there; ``otherwise`` is what is assumed, and how many drafts that is worth."""
        if position >= len(self.reached):
            return otherwise
        worth = otherwise_worth * self.weight
        return (self.accepted[position] + worth * otherwise) / (self.reached[position] + worth)

    def notice_change(self, accepted: bool, expected: float) -> None:
        """``accepted`` of the first drafted token, against its expected rate."""
        self._drift += DRIFT_RATE * (accepted - expected - self._drift)
        if abs(self._drift) > MAX_DRIFT:
            self.fade(CHANGED_DECAY)
            self._drift = 0.0

    def add(
        self, num_drafted: int, num_accepted: int, decay: float, refused_rate: float | None = None
    ) -> None:
        """A verdict says something about the accepted positions and the first rejected one.

        ``refused_rate``: the draft ended before a token that would have been accepted so often. Without
        counting it, a position would seem better than it is: only the likely tokens get there.
        """
        reached, accepted, weight = self.reached, self.accepted, self.weight
        num_positions = num_drafted + (refused_rate is not None)
        if len(reached) < num_positions:
            missing = [0.0] * (num_positions - len(reached))
            reached += missing
            accepted += missing
        for position in range(num_accepted):
            reached[position] += weight
            accepted[position] += weight
        if num_accepted < num_positions:
            reached[num_accepted] += weight
        if num_accepted == num_drafted and refused_rate is not None:
            accepted[num_drafted] += weight * refused_rate
        self.fade(decay)


class GroupAcceptance:
    """What all sequences of one method and temperature bucket have shown."""

    def __init__(self) -> None:
        self.counts = AcceptanceCounts()
        self.confidence = ConfidenceTable()
        self.fill = 1.0
        self.last_drafted = NEVER  # round
        self._rates: list[float] | None = None

    def add(
        self, current_round: int, num_drafted: int, num_accepted: int, refused_rate: float | None
    ) -> None:
        if current_round - self.last_drafted > PAUSE:
            self.counts.fade(PAUSED_DECAY)
        if num_drafted:
            self.counts.notice_change(num_accepted > 0, self.counts.rate(0, FIRST_RATE, GROUP_WEIGHT))
        decay = SAME_ROUND_DECAY if current_round == self.last_drafted else GROUP_DECAY
        self.counts.add(num_drafted, num_accepted, decay, refused_rate)
        self._rates = None

    def rates(self) -> list[float]:
        """``a_1`` to ``a_j`` of the positions seen so far."""
        if self._rates is None:
            rate, rates = FIRST_RATE, []
            for position in range(len(self.counts.reached)):
                rate = self.counts.rate(position, rate, GROUP_WEIGHT)
                rates.append(rate)
            self._rates = rates
        return self._rates

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
        self.num_draft_tokens = 0  # chosen last

    def learn(
        self,
        current_round: int,
        num_asked: int,
        num_drafted: int,
        num_accepted: int,
        ended: bool,
        patience: Patience | None = None,
    ) -> None:
        """The verdict on one draft. One that was cut short by the end of the text is not counted.

        With ``patience`` fewer tokens than asked for are no sign of a proposer that finds nothing.
        """
        if patience is None and (num_drafted < num_asked or self.fill < 1):
            self._add_fill(num_drafted / num_asked)
        refused_rate = None if patience is None else patience.refused_rate
        if (num_drafted or refused_rate is not None) and not ended:
            if current_round - self.last_drafted > PAUSE:
                self.counts.fade(PAUSED_DECAY)
            if num_drafted:
                self.counts.notice_change(num_accepted > 0, self._first_rate())
            self.counts.add(num_drafted, num_accepted, SEQUENCE_DECAY, refused_rate)
            self.group.add(current_round, num_drafted, num_accepted, refused_rate)
            if patience is not None:
                patience.learn(num_accepted)
        self.last_drafted = self.group.last_drafted = current_round

    def _add_fill(self, share: float) -> None:
        self.fill += FILL_RATE * (share - self.fill)
        self.group.fill += FILL_RATE * (share - self.group.fill)

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

    def _first_rate(self) -> float:
        group_rate = self.group.counts.rate(0, FIRST_RATE, GROUP_WEIGHT)
        return self.counts.rate(0, group_rate, SEQUENCE_WEIGHT)

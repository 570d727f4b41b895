"""Learns how far drafts are accepted, as decayed counts by position, for groups of sequences that are alike.

A draft *reaches* position ``i`` if all tokens before it are accepted. The rate of a position is counted among
the drafts that reached it. The chance that the first ``i`` tokens are accepted is the product of their rates,
and the expected number of accepted tokens of a draft of ``k`` is the sum of the first ``k`` products
(Leviathan et al. 2023, eq. 1, without the assumption that all positions have the same rate).
"""

from collections.abc import Mapping

from truedraft.engine.speculation.costs import MAX_LENGTH

# Positions with a rate of their own; later ones share the last.
POSITIONS = MAX_LENGTH + 1
# Verdicts on a position that its rate remembers, and those that an old rate is worth.
MEMORY, OLD_VERDICTS = 200, 50.0
# The first rate starts here, each other one from the position before. That is worth some verdicts.
PRIOR_RATE, PRIOR_VERDICTS = 0.6, 4.0
# A row's rates start from its group's, which is worth more: the row that was lucky at first would else draft
# furthest.
ROW_VERDICTS = 16.0


class Acceptance:
    """Knows drafts that are alike: those of a group of sequences, or those of one, which starts from its
    ``group``'s rates."""

    def __init__(self, group: "Acceptance | None" = None) -> None:
        self.group = group
        self.reached = [0.0] * POSITIONS
        self.accepted = [0.0] * POSITIONS
        if group is None:
            self.reached[0], self.accepted[0] = PRIOR_VERDICTS, PRIOR_VERDICTS * PRIOR_RATE
        self._expected: list[float] = []  # the index is the length, as far as it was asked for

    def rates(self) -> list[float]:
        """Returns the acceptance rate of each position, among the drafts that reach it."""
        rates: list[float] = []
        prior, worth = None, PRIOR_VERDICTS
        if self.group is not None:
            prior, worth = self.group.rates(), ROW_VERDICTS
        for position, (reached, accepted) in enumerate(zip(self.reached, self.accepted, strict=True)):
            if prior is None and position == 0:
                rates.append(accepted / reached)
            else:
                before = rates[-1] if prior is None else prior[position]
                rates.append((accepted + worth * before) / (reached + worth))
        return rates

    def expected(self, length: int) -> float:
        """Returns the expected number of accepted tokens of a draft of ``length``."""
        if length >= len(self._expected):
            rates, survival, self._expected = self.rates(), 1.0, [0.0]
            for position in range(max(length, POSITIONS)):
                survival *= rates[min(position, POSITIONS - 1)]
                self._expected.append(self._expected[-1] + survival)
        return self._expected[length]

    def learn(self, num_drafted: int, num_accepted: int, count: float = 1.0) -> None:
        """Learns from ``count`` drafts of ``num_drafted`` tokens, the first ``num_accepted`` of them
        accepted."""
        for drafted in range(min(num_accepted + 1, num_drafted)):
            self._count(drafted, count, drafted < num_accepted)
        self._expected.clear()

    def _count(self, drafted: int, count: float, rate: float) -> None:
        position = min(drafted, POSITIONS - 1)
        kept = (1 - 1 / MEMORY) ** count
        self.reached[position] = kept * self.reached[position] + count
        self.accepted[position] = kept * self.accepted[position] + count * rate

    def learn_all(self, verdicts: Mapping[tuple[int, int], int]) -> None:
        """Learns from counts of verdicts (drafted, accepted)."""
        for (num_drafted, num_accepted), count in verdicts.items():
            self.learn(num_drafted, num_accepted, count)

    def forget(self) -> None:
        """Lets what is known be worth few verdicts: it is old."""
        for position, reached in enumerate(self.reached):
            if reached > OLD_VERDICTS:
                self.accepted[position] *= OLD_VERDICTS / reached
                self.reached[position] = OLD_VERDICTS
        self._expected.clear()

    def state(self) -> list[float]:
        """Returns rates of the positions that drafts have reached."""
        known = zip(self.rates(), self.reached, strict=True)
        return [round(rate, 3) for rate, reached in known if reached]


class Group:
    """Keeps what is known of the sequences of a temperature class: what holds for one is taken to hold for
    all."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.acceptances: dict[str, Acceptance] = {}  # keys: proposers
        self.lookups: dict[tuple[str, int], Acceptance] = {}  # keys: source, strength of the match
        self.lookup_balance = 0.0  # seconds that look-ups have saved lately

    def acceptance(self, source: str) -> Acceptance:
        """Returns what is known of a proposer's drafts."""
        if source not in self.acceptances:
            self.acceptances[source] = Acceptance()
        return self.acceptances[source]

"""How far drafts are accepted: decayed counts by position.

The token at position ``i`` of a draft is *reached* when all before it are accepted. Its acceptance rate is
counted among the drafts that reached it, so the chance that ``i`` tokens are accepted is the product of the
first ``i`` rates, and the expected number of accepted tokens of a draft of ``k`` is the sum of those products
(Leviathan et al. 2023, eq. 1, without their assumption that all rates are alike).
"""

from collections.abc import Mapping

# Positions with a rate of their own; later ones share the last.
POSITIONS = 9
# Verdicts on a position that its rate remembers.
MEMORY = 400
# Where a rate starts: at the one of the position before, at its group's, or here; and the number of verdicts
# that this is worth.
PRIOR_RATE, PRIOR_VERDICTS = 0.6, 4.0


class Acceptance:
    """Acceptance rates of drafts that are alike: of a group of sequences, or of one that starts from its
    ``group``'s rates."""

    def __init__(self, group: "Acceptance | None" = None) -> None:
        self.group = group
        self.reached = [0.0] * POSITIONS
        self.accepted = [0.0] * POSITIONS
        self._expected: list[float] = []

    def rates(self) -> list[float]:
        """Acceptance rate by position, among drafts that reached it."""
        rates, rate = [], PRIOR_RATE
        prior = self.group.rates() if self.group is not None else None
        for position, (reached, accepted) in enumerate(zip(self.reached, self.accepted, strict=True)):
            if prior is not None:
                rate = prior[position]
            rate = (accepted + PRIOR_VERDICTS * rate) / (reached + PRIOR_VERDICTS)
            rates.append(rate)
        return rates

    def expected(self, length: int) -> float:
        """Expected number of accepted tokens of a draft of ``length``."""
        if length >= len(self._expected):
            self._expect(max(length, POSITIONS))
        return self._expected[length]

    def _expect(self, length: int) -> None:
        rates = self.rates()
        total, survival = 0.0, 1.0
        self._expected = [0.0]
        for position in range(length):
            survival *= rates[min(position, POSITIONS - 1)]
            total += survival
            self._expected.append(total)

    def learn(self, num_drafted: int, num_accepted: int, count: float = 1.0) -> None:
        """``count`` drafts of ``num_drafted`` tokens of which the first ``num_accepted`` were accepted."""
        for position in range(min(num_accepted + 1, num_drafted)):
            self.learn_position(position, float(position < num_accepted), count)

    def learn_all(self, verdicts: Mapping[tuple[int, int], int]) -> None:
        """Verdicts (drafted, accepted), each with its number."""
        for (num_drafted, num_accepted), count in verdicts.items():
            self.learn(num_drafted, num_accepted, count)

    def learn_position(self, position: int, rate: float, count: float = 1.0) -> None:
        """``count`` drafts have reached ``position``; a share ``rate`` of them was accepted there."""
        position = min(position, POSITIONS - 1)
        kept = (1 - 1 / MEMORY) ** count
        self.reached[position] = self.reached[position] * kept + count
        self.accepted[position] = self.accepted[position] * kept + count * rate
        self._expected.clear()

    def cap(self, verdicts: float) -> None:
        """Let what is known of a position be worth at most so many ``verdicts``: it is old."""
        for position, reached in enumerate(self.reached):
            if reached > verdicts:
                self.accepted[position] *= verdicts / reached
                self.reached[position] = verdicts
        self._expected.clear()

    def state(self) -> dict[str, object]:
        """Builtins, for people."""
        known = [rate for rate, reached in zip(self.rates(), self.reached, strict=True) if reached >= 1]
        return {
            "acceptance_by_position": [round(rate, 3) for rate in known],
            "verdicts": round(self.reached[0]),
        }

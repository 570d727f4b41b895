"""Drafts that end where the draft model is unsure: one learned table of confidence to acceptance.

Before a token is drawn, the draft distribution tells how sure it is (``Sampler.draw_drafts``). Such
confidences are sorted into bins, and each bin counts how often its tokens were accepted. A draft multiplies
the rates of its bins and ends before the token that takes the product below a threshold: the probability at
which one more token is worth its draft pass and its place in the target's (a threshold on the chance of a
rejection, as in SpecDec++, arXiv:2405.19715).
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from engine.core.step import CONFIDENCE_BINS

# Verdicts that the table remembers, in all bins together; and those that a bin's prior is worth, which takes
# its confidence at its word.
TABLE_MEMORY, BIN_PRIOR = 600, 4.0
# A bin refuses nothing before so many of its tokens were judged. What is refused is not judged, so its count
# decays until some are accepted again.
JUDGED_ENOUGH = 8.0
# Products of rates and thresholds are rounded to multiples of this, and an estimate holds for so many tokens.
GRID, ESTIMATE_TOKENS = 1 / 16, 256


class EarlyExitEstimate(NamedTuple):
    """For one row: ``accepted`` and ``drafted`` tokens, and how likely each draft pass is to be run."""

    accepted: float
    drafted: float
    passes: tuple[float, ...]


class ConfidenceTable:
    """Acceptance rates by confidence of one group of sequences."""

    def __init__(self) -> None:
        middles = [(low + high) / 2 for low, high in pairwise((*CONFIDENCE_BINS, 1.0))]
        self.judged = [0.0] * len(middles)
        self.accepted = [0.0] * len(middles)
        self.seen = [1.0] * len(middles)
        self._middles = middles
        # What rounds with early exit have emitted, in units of the estimate.
        self.ratio, self._num_compared = 1.0, 0
        self._num_learned = 0
        self._key: tuple[int, float, int] | None = None
        self._last = EarlyExitEstimate(0.0, 0.0, ())

    @staticmethod
    def rounded(threshold: float) -> float:
        return min(1.0, GRID * round(threshold / GRID))

    def rate(self, bin_: int) -> float:
        return (self.accepted[bin_] + BIN_PRIOR * self._middles[bin_]) / (self.judged[bin_] + BIN_PRIOR)

    def rates(self) -> tuple[float, ...]:
        """For drafting: a bin that is hardly known is taken to be always accepted."""
        return tuple(
            self.rate(bin_) if judged >= JUDGED_ENOUGH else 1.0 for bin_, judged in enumerate(self.judged)
        )

    def learn(self, confidences: Sequence[float], num_drafted: int, num_accepted: int) -> float | None:
        """The verdict on a draft. The acceptance rate of a token that was refused behind an accepted draft:
        it stands for the verdict that the position does not get; None if there is no such token."""
        for position, confidence in enumerate(confidences):
            bin_ = bisect_right(CONFIDENCE_BINS, confidence) - 1
            self.seen[bin_] += 1
            if position < min(num_drafted, num_accepted + 1):
                self.judged[bin_] += 1
                self.accepted[bin_] += position < num_accepted
        self._num_learned += len(confidences)
        kept = (1 - 1 / TABLE_MEMORY) ** len(confidences)
        for counts in (self.seen, self.judged, self.accepted):
            counts[:] = [kept * count for count in counts]
        if len(confidences) > num_drafted == num_accepted:
            return self.rate(bisect_right(CONFIDENCE_BINS, confidences[num_drafted]) - 1)
        return None

    def compare(self, emitted: float) -> None:
        """Drafts by the last estimate have ``emitted`` so many tokens each, the token after them included."""
        self._num_compared += 1
        rate = max(0.05, 1 / (self._num_compared + 2))
        self.ratio += rate * (emitted / (1 + self._last.accepted) - self.ratio)

    def estimate(self, length: int, threshold: float) -> EarlyExitEstimate:
        """Of a draft of at most ``length`` tokens, as if confidences were independent of each other."""
        key = length, threshold, self._num_learned // ESTIMATE_TOKENS
        if key != self._key:
            self._key, self._last = key, self._estimate(length, threshold)
        return self._last

    def _estimate(self, length: int, threshold: float) -> EarlyExitEstimate:
        total = sum(self.seen)
        shares = [(seen / total, self.rate(bin_)) for bin_, seen in enumerate(self.seen)]
        products = {1.0: 1.0}  # how likely a draft is to be accepted so far -> how likely such a draft is
        accepted = drafted = 0.0
        passes = []
        for _ in range(length):
            passes.append(sum(products.values()))
            if passes[-1] < GRID:
                break
            longer: dict[float, float] = {}
            for product, chance in products.items():
                for share, rate in shares:
                    survival = product * rate
                    if survival >= threshold:
                        mass = chance * share
                        drafted += mass
                        accepted += mass * survival
                        rounded = GRID * round(survival / GRID)
                        longer[rounded] = longer.get(rounded, 0.0) + mass
            products = longer
        return EarlyExitEstimate(accepted, drafted, tuple(passes))

    def state(self) -> dict[str, float]:
        """Acceptance rate by the lower end of each bin."""
        return {f"{low:g}": round(self.rate(bin_), 3) for bin_, low in enumerate(CONFIDENCE_BINS)}

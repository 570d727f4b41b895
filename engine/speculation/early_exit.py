"""Drafts that end where the draft model is unsure, by one learned table of confidence to acceptance.

Before a token is drawn, its distribution tells how sure the draft model is (``Sampler.draw_drafts``). Such
confidences are sorted into bins, and each bin counts how often its tokens were accepted. A draft multiplies
the rates of its bins and ends before the token that would take the product below a threshold (a threshold on
the chance of a rejection, as in SpecDec++, arXiv:2405.19715).
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from engine.core.step import CONFIDENCE_BINS
from engine.speculation.acceptance import MEMORY, PRIOR_VERDICTS

# A bin refuses no token before so many were judged. Refused ones are not judged and all counts decay, so that
# some of them are accepted again later.
JUDGED_ENOUGH = 8.0
# Products of rates, and thresholds, are rounded to multiples of this.
GRID = 1 / 16


class ExitEstimate(NamedTuple):
    """Of a draft: ``accepted`` and ``drafted`` tokens, and the chance that each draft pass is run."""

    accepted: float
    drafted: float
    passes: tuple[float, ...]


class ConfidenceTable:
    """Of a group of sequences."""

    def __init__(self) -> None:
        self._middles = [(low + high) / 2 for low, high in pairwise((*CONFIDENCE_BINS, 1.0))]
        self._judged = [0.0] * len(self._middles)
        self._accepted = [0.0] * len(self._middles)
        self._seen = [1.0] * len(self._middles)
        self.ratio = 1.0  # emitted tokens over expected ones
        self._num_learned = self.num_compared = 0
        self._key: tuple[int, float, int] | None = None
        self._last = ExitEstimate(0.0, 0.0, ())

    def rate(self, bin_: int) -> float:
        """At first a bin's confidence is taken at its word."""
        prior = PRIOR_VERDICTS * self._middles[bin_]
        return (self._accepted[bin_] + prior) / (self._judged[bin_] + PRIOR_VERDICTS)

    def rates(self) -> tuple[float, ...]:
        """For drafting: 1 for bins that are hardly known."""
        bins = enumerate(self._judged)
        return tuple(self.rate(bin_) if judged >= JUDGED_ENOUGH else 1.0 for bin_, judged in bins)

    def learn(self, confidences: Sequence[float], num_drafted: int, num_accepted: int) -> float | None:
        """The verdict on a draft. Returns the acceptance rate of the token that was refused behind an
        accepted draft: it stands for the verdict that the position does not get. None: there is none."""
        bins = [bisect_right(CONFIDENCE_BINS, confidence) - 1 for confidence in confidences]
        kept = (1 - 1 / MEMORY) ** len(bins)
        for counts in (self._seen, self._judged, self._accepted):
            counts[:] = [kept * count for count in counts]
        for bin_ in bins:
            self._seen[bin_] += 1
        for position, bin_ in enumerate(bins[: min(num_drafted, num_accepted + 1)]):
            self._judged[bin_] += 1
            self._accepted[bin_] += position < num_accepted
        self._num_learned += len(bins)
        return self.rate(bins[num_drafted]) if len(bins) > num_drafted == num_accepted else None

    def compare(self, emitted: float) -> None:
        """Rounds that were expected to be as the last estimate have ``emitted`` so many tokens a row."""
        if self._num_learned < MEMORY / 4:
            return  # the estimate is not worth much yet
        self.num_compared += 1
        rate = max(0.05, 1 / (self.num_compared + 2))
        self.ratio += rate * (emitted / (1 + self._last.accepted) - self.ratio)

    def estimate(self, length: int, threshold: float) -> ExitEstimate:
        """Of a draft of at most ``length`` tokens, as if its confidences were independent of each other."""
        key = length, threshold, self._num_learned // MEMORY
        if key != self._key:
            self._key, self._last = key, self._estimate(length, threshold)
        return self._last

    def _estimate(self, length: int, threshold: float) -> ExitEstimate:
        total = sum(self._seen)
        bins = [(seen / total, self.rate(bin_)) for bin_, seen in enumerate(self._seen)]
        chances = {1.0: 1.0}  # of drafts that go on, by the product of their rates
        accepted = drafted = 0.0
        passes = []
        for _ in range(length):
            passes.append(sum(chances.values()))
            longer: dict[float, float] = {}
            for product, chance in chances.items():
                for share, rate in bins:
                    survival = product * rate
                    if survival >= threshold:
                        drafted += chance * share
                        accepted += chance * share * survival
                        rounded = GRID * round(survival / GRID)
                        longer[rounded] = longer.get(rounded, 0.0) + chance * share
            chances = longer
        return ExitEstimate(accepted, drafted, tuple(passes))

    def state(self) -> dict[str, float]:
        """Acceptance rate by the lower end of each bin."""
        return {f"{low:g}": round(self.rate(bin_), 3) for bin_, low in enumerate(CONFIDENCE_BINS)}

"""How sure the draft is of its next token, and what that says about its acceptance.

A draft model's own distribution tells more about a token than its position does. Its *confidence* (see
``Sampler.draw_drafts``) is sorted into bins, and every bin counts how often its tokens were accepted. A
round multiplies those rates as it drafts, and ends early where the product no longer pays.

Exactness: the confidence is a function of the distribution that a token is drawn from, never of the token,
and what was kept is always verified. For ``p = q = (.5, .3, .2)``, dropping drawn tokens with ``q < .25``
would give (.6, .36, .04).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

# Lower ends of the bins: most tokens are either open or nearly certain, where little makes a difference.
BINS = (0.0, 0.4, 0.55, 0.65, 0.75, 0.85, 0.92, 0.97)
# Decay of a bin's counts per token; they remember about 200.
DECAY = 0.995
# What is assumed of a bin, its confidence taken at its word, is worth so many tokens.
PRIOR_WEIGHT = 4.0


class ConfidenceTable:
    """Acceptance rates by confidence, of one group of sequences."""

    def __init__(self) -> None:
        middles = [(low + high) / 2 for low, high in pairwise((*BINS, 1.0))]
        self._reached = [PRIOR_WEIGHT] * len(BINS)
        self._accepted = [PRIOR_WEIGHT * middle for middle in middles]

    def rate(self, bin_: int) -> float:
        return self._accepted[bin_] / self._reached[bin_]

    def add(self, bin_: int, accepted: bool) -> None:
        self._reached[bin_] = DECAY * self._reached[bin_] + 1
        self._accepted[bin_] = DECAY * self._accepted[bin_] + accepted

    def state(self) -> dict[str, float]:
        """Acceptance rate by the lower end of each bin, for people."""
        return {f"{low:g}": round(self.rate(bin_), 3) for bin_, low in enumerate(BINS)}


@dataclass(slots=True)
class Patience:
    """One row's round: how unlikely what it has drafted may become before drafting on stops to pay.

    ``least_to_score``: a token must survive at least so often to be worth its place in the target's pass.
    ``least_to_draft``: what is drafted already must, to be worth another draft pass.
    """

    table: ConfidenceTable
    least_to_score: float
    least_to_draft: float
    survival: float = 1.0
    bins: list[int] = field(default_factory=list)  # of the tokens kept
    refused_rate: float | None = None  # of the token that ended the round

    def keeps(self, confidence: float) -> bool:
        """Whether a token from this distribution is worth its place in the target's pass."""
        bin_ = bisect_right(BINS, confidence) - 1
        rate = self.table.rate(bin_)
        if self.survival * rate < self.least_to_score:
            self.refused_rate = rate
            return False
        self.survival *= rate
        self.bins.append(bin_)
        return True

    def goes_on(self) -> bool:
        """Whether another draft pass is worth its time."""
        return self.survival >= self.least_to_draft

    def follow(self, confidences: Sequence[float]) -> None:
        """A round that somebody else has drafted by these rules, by the distributions drawn from."""
        for confidence in confidences:
            self.keeps(confidence)

    def again(self) -> "Patience":
        """The same for another round."""
        return Patience(self.table, self.least_to_score, self.least_to_draft)

    def learn(self, num_accepted: int) -> None:
        """The verdict on the tokens kept: it says something up to the first rejection."""
        for i, bin_ in enumerate(self.bins[: num_accepted + 1]):
            self.table.add(bin_, i < num_accepted)

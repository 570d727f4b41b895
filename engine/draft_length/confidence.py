"""How sure the draft is of its next token, and what that says about its acceptance.

A draft model's own distribution tells more about a token than its position does. Its *confidence* (see
``Sampler.draw_drafts``) is sorted into bins, and every bin counts how often its tokens were accepted. A
round multiplies those rates as it drafts, and ends early where the product no longer pays.

Exactness: the confidence is a function of the distribution that a token is drawn from, never of the token,
and what was kept is always verified. For ``p = q = (.5, .3, .2)``, dropping drawn tokens with ``q < .25``
would give (.6, .36, .04).
"""

from bisect import bisect_right
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

# Lower ends of the bins: most tokens are either open or nearly certain, where little makes a difference.
BINS = (0.0, 0.4, 0.55, 0.65, 0.75, 0.85, 0.92, 0.97)
# Decay of a bin's counts per token; they remember about 200.
DECAY = 0.995
# What is assumed of a bin, its confidence taken at its word, is worth so many tokens.
PRIOR_WEIGHT = 4.0
# No token is refused of whose like fewer than so many were judged: refused ones never are.
JUDGED_ENOUGH = 8.0
# How often each confidence comes is told by so many tokens at most.
MOST_SEEN = 1000.0


def bin_of(confidence: float) -> int:
    return bisect_right(BINS, confidence) - 1


class ConfidenceTable:
    """Acceptance rates by confidence, of one group of sequences."""

    def __init__(self) -> None:
        middles = [(low + high) / 2 for low, high in pairwise((*BINS, 1.0))]
        self._reached = [PRIOR_WEIGHT] * len(BINS)
        self._accepted = [PRIOR_WEIGHT * middle for middle in middles]
        self._seen = [PRIOR_WEIGHT] * len(BINS)
        self._num_seen = PRIOR_WEIGHT * len(BINS)

    def rate(self, bin_: int) -> float:
        return self._accepted[bin_] / self._reached[bin_]

    def least_to_draft(self, to_score: float, to_draft: float) -> float:
        """How often what is drafted must survive to be worth another draft pass, if a token's place in the
        target's pass costs as much as ``to_score`` tokens and a draft pass as much as ``to_draft``.

        The next token is kept where it is likely enough. Surviving ``s`` times, drafting on brings the sum of
        ``seen * (s * rate - to_score)`` over the bins that are kept, and those are the ones that make most of
        it: it pays from the lowest ``s`` on for which some of the surest bins pay for the pass.
        """
        seen = reaching = 0.0
        least = 1e9
        for share, rate in sorted(
            zip(self._seen, self.rates(), strict=True), key=itemgetter(1), reverse=True
        ):
            seen += share
            reaching += share * rate
            least = min(least, (to_draft * self._num_seen + to_score * seen) / reaching)
        return least

    def rates(self) -> list[float]:
        return [accepted / reached for accepted, reached in zip(self._accepted, self._reached, strict=True)]

    def hope(self, bin_: int) -> float:
        """What a draft goes by: of a bin that is hardly known, that all are accepted."""
        return 1.0 if self._reached[bin_] < PRIOR_WEIGHT + JUDGED_ENOUGH else self.rate(bin_)

    def learn(self, confidences: Sequence[float], num_judged: int, num_accepted: int) -> None:
        """Of a draft's tokens the first ``num_judged`` were judged; the others could have been drafted."""
        for i, confidence in enumerate(confidences):
            bin_ = bin_of(confidence)
            self._seen[bin_] += 1
            if i < num_judged:
                self._reached[bin_] = DECAY * self._reached[bin_] + 1
                self._accepted[bin_] = DECAY * self._accepted[bin_] + (i < num_accepted)
        self._num_seen += len(confidences)
        if self._num_seen > MOST_SEEN:
            self._seen = [count / 2 for count in self._seen]
            self._num_seen /= 2

    def state(self) -> dict[str, float]:
        """Acceptance rate by the lower end of each bin, for people."""
        return {f"{low:g}": round(self.rate(bin_), 3) for bin_, low in enumerate(BINS)}


class Patience(NamedTuple):
    """A row's rule: how unlikely what it drafts may become before drafting on stops to pay.

    ``least_to_score``: a token must survive at least so often to be worth its place in the target's pass.
    ``least_to_draft``: what is drafted already must, to be worth another draft pass.
    """

    table: ConfidenceTable
    least_to_score: float = 0.0
    least_to_draft: float = 0.0

    @property
    def is_open(self) -> bool:
        """Nothing is refused."""
        return self.least_to_score == self.least_to_draft == 0.0


@dataclass(slots=True)
class PatientDraft:
    """A row's draft in one round, by its rule. ``confidences`` are those of the distributions it has drawn
    from: one for every token kept and, where the draft ended before it, one for the token that was not."""

    patience: Patience
    confidences: MutableSequence[float] = field(default_factory=list)
    survival: float = 1.0

    def keeps(self, confidence: float) -> bool:
        """Whether a token from this distribution is worth its place in the target's pass."""
        self.confidences.append(confidence)
        survival = self.survival * self.patience.table.hope(bin_of(confidence))
        if survival < self.patience.least_to_score:
            return False
        self.survival = survival
        return True

    def goes_on(self) -> bool:
        """Whether another draft pass is worth its time."""
        return self.survival >= self.patience.least_to_draft

    def refused_rate(self, num_kept: int) -> float | None:
        """How often the token that ended the draft would have been accepted; None: it ended behind one."""
        if len(self.confidences) <= num_kept:
            return None
        return self.patience.table.rate(bin_of(self.confidences[num_kept]))

    def learn(self, num_kept: int, num_accepted: int) -> None:
        """The verdict on the tokens kept: it says something up to the first rejection."""
        self.patience.table.learn(self.confidences, min(num_kept, num_accepted + 1), num_accepted)

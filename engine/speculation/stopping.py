"""Learns what a proposer's distributions say about its drafts: where another token would no longer pay.

The more probability the most likely token has, the more often what is drawn is accepted: how often is
learned by parts of the probabilities from 0 to 1. Recent drafts, as the parts of their tokens, stand for
those to come: each may be walked through again with any limit to the chance that all of it is accepted.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from truedraft.engine.core.draft_choice import Stop, part_of
from truedraft.engine.speculation.acceptance import MEMORY, PRIOR_RATE, PRIOR_VERDICTS
from truedraft.engine.speculation.costs import MAX_LENGTH

# Equal parts of the probabilities from 0 to 1.
NUM_PARTS = 16
# Drafts that stand for those to come, and how many there must be.
NUM_DRAFTS, LEAST_DRAFTS = 128, 32


class Walk(NamedTuple):
    """Holds what drafts with a limit come to: the share of them that has a token at each position, and how
    many tokens they are expected to have accepted before each length, from 0 on."""

    drafted: list[float]
    accepted: list[float]


class Confidence:
    """Knows drafts that are alike: those of a proposer for a group of sequences."""

    def __init__(self) -> None:
        self.reached = [0.0] * NUM_PARTS
        self.accepted = [0.0] * NUM_PARTS
        self._drafts: deque[list[int]] = deque(maxlen=NUM_DRAFTS)  # the parts of their tokens
        self._rates: tuple[float, ...] = ()  # empty if something was learned since
        self._stops: dict[float, Stop] = {}
        self._walks: dict[float, Walk] = {}

    @property
    def is_known(self) -> bool:
        """Tells whether enough drafts were seen for ``walk``."""
        return len(self._drafts) >= LEAST_DRAFTS

    @property
    def usual_rate(self) -> float:
        """Returns the acceptance rate of all tokens that verdicts have reached."""
        accepted = sum(self.accepted) + PRIOR_VERDICTS * PRIOR_RATE
        return accepted / (sum(self.reached) + PRIOR_VERDICTS)

    def rates(self) -> tuple[float, ...]:
        """Returns acceptance rates by the part that the largest probability is in. A part starts with the
        rate of the one above, which is worth some verdicts; the last with the usual one."""
        if not self._rates:
            rates = [self.usual_rate]
            for reached, accepted in zip(reversed(self.reached), reversed(self.accepted), strict=True):
                rates.append((accepted + PRIOR_VERDICTS * rates[-1]) / (reached + PRIOR_VERDICTS))
            self._rates = tuple(reversed(rates[1:]))
        return self._rates

    def stop(self, below: float) -> Stop:
        """Returns what ends drafts below a chance: the same object until something is learned."""
        if below not in self._stops:
            self._stops[below] = Stop(self.rates(), below)
        return self._stops[below]

    def learn(self, confidences: Sequence[float], num_accepted: int) -> None:
        """Learns from a draft by the largest probabilities before each of its tokens."""
        parts = [part_of(confidence, NUM_PARTS) for confidence in confidences]
        for place, part in enumerate(parts[: num_accepted + 1]):
            self.reached[part] += 1 - self.reached[part] / MEMORY
            self.accepted[part] += (place < num_accepted) - self.accepted[part] / MEMORY
        self._drafts.append(parts)
        self._rates = ()
        self._stops.clear()
        self._walks.clear()

    def walk(self, below: float) -> Walk:
        """Returns what the drafts come to if they end ``below`` a chance, and have ``MAX_LENGTH`` tokens at
        most. What follows those that ended earlier is accepted as usual."""
        if below not in self._walks:
            rates, usual = self.rates(), self.usual_rate
            drafted, accepted = [0.0] * MAX_LENGTH, [0.0] * MAX_LENGTH
            for parts in self._drafts:
                chance = 1.0
                for place in range(MAX_LENGTH):
                    drafted[place] += 1
                    chance *= rates[parts[place]] if place < len(parts) else usual
                    accepted[place] += chance
                    if chance < below:
                        break
            num_drafts, sums = len(self._drafts), [0.0]
            for each in accepted:
                sums.append(sums[-1] + each / num_drafts)
            self._walks[below] = Walk([each / num_drafts for each in drafted], sums)
        return self._walks[below]

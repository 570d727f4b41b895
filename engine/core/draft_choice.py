"""Says what a sequence drafts in a step: decided before anything is drawn, which keeps the step exact."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from truedraft.engine.messages import Source


class Known(NamedTuple):
    """Holds drafts that a source without a model knows before their round."""

    source: Source
    token_ids: list[int]


class InRound(Protocol):
    """Knows drafts again and again within a step, as it follows what the rounds emit."""

    source: Source
    limit: int

    def drafts(self) -> list[int]:
        """Returns up to ``limit`` drafts of the next round, perhaps none."""


class Stop(NamedTuple):
    """Ends drafts that are not worth another pass: after a token where the chance that all of the draft is
    accepted has fallen below ``below``; 0 never ends one.

    The chance is the product over the drafted tokens of the ``rates`` at which such tokens are accepted, by
    the largest probability of the distribution that each was drawn from, which is known before it is drawn.
    A token that was drawn stays in the draft: to drop it for its own probability would not be exact.
    """

    rates: tuple[float, ...]  # one for each of equal parts of [0, 1]
    below: float = 0.0

    def rate(self, confidence: float) -> float:
        """Returns the acceptance rate at a largest probability, which may be NaN."""
        return self.rates[part_of(confidence, len(self.rates))]


def part_of(confidence: float, num_parts: int) -> int:
    """Returns the number of the part of 0 to 1 that holds a largest probability."""
    return min(int(confidence * num_parts), num_parts - 1) if confidence > 0 else 0


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """``source`` drafts ``num_tokens`` with its model in every round for which nothing else is known, or
    fewer where ``stop`` ends drafts.

    ``known`` tokens are the drafts of the first round instead; ``in_round`` is asked before each later one.
    ``num_missing`` tokens must be computed by the model's cache before its first draft, the pending token
    apart.
    """

    source: str = "none"
    num_tokens: int = 0
    num_missing: int = 0
    known: Known | None = None
    in_round: InRound | None = None
    stop: Stop | None = None

    @property
    def known_ids(self) -> list[int]:
        """Returns the known drafts of the first round."""
        return [] if self.known is None else self.known.token_ids

    @property
    def num_first_drafts(self) -> int:
        """Returns the number of drafts in the first round."""
        return self.num_tokens if self.known is None else len(self.known.token_ids)

    @property
    def first_source(self) -> str:
        """Returns who drafts in the first round."""
        return self.source if self.known is None else self.known.source

    @property
    def max_num_drafts(self) -> int:
        """Returns the largest number of drafts that any round may have."""
        limit = 0 if self.in_round is None else self.in_round.limit
        return max(self.num_tokens, limit, 0 if self.known is None else len(self.known.token_ids))

    def within(self, budget: int) -> "DraftChoice":
        """Returns the choice with at most ``budget`` drafts in the first round."""
        if self.num_first_drafts <= budget:
            return self
        if self.known is None:
            return replace(self, num_tokens=budget)
        return replace(self, known=Known(self.known.source, self.known.token_ids[:budget]))


# The choice of a row that drafts nothing.
NO_DRAFT = DraftChoice()

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


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """``source`` drafts ``num_tokens`` with its model in every round for which nothing else is known.

    ``known`` tokens are the drafts of the first round instead; ``in_round`` is asked before each later one.
    ``num_missing`` tokens must be computed by the model's cache before its first draft, the pending token
    apart.
    """

    source: str = "none"
    num_tokens: int = 0
    num_missing: int = 0
    known: Known | None = None
    in_round: InRound | None = None

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

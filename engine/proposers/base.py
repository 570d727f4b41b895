"""What every proposer does: guess the next tokens of each sequence that draws in this step."""

from typing import Protocol, runtime_checkable

from engine.core.scheduler import Scheduled
from engine.core.sequence import Sequence
from engine.messages import Source
from engine.sampling.sampler import Drafts, Sampler


class Proposer(Protocol):
    """``scheduled`` is the whole step; ``sampler`` has one row per part that completes, in order.

    A part's ``num_draft_tokens`` is how many tokens to guess for it at most, decided before anything is
    drawn. Parts whose ``source`` is another proposer's name get none.
    """

    name: Source

    def propose(self, scheduled: list[Scheduled], sampler: Sampler) -> Drafts: ...


@runtime_checkable
class LookUp(Protocol):
    """A proposer that goes on from a match in known text, and often has none."""

    def look_up(self, sequence: Sequence, num_tokens: int) -> tuple[int, int]:
        """How many tokens, up to ``num_tokens``, it could draft now, and the length of the match."""
        ...

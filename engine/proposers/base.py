"""What every proposer does: guess the next tokens of each sequence that draws in this step."""

from typing import Protocol

from engine.messages import Method
from engine.sampling.sampler import Drafts, Sampler
from engine.scheduler import Scheduled


class Proposer(Protocol):
    """``scheduled`` is the whole step; ``sampler`` has one row per part that completes, in order.

    A part's ``num_draft_tokens`` is how many tokens to guess for it at most, decided before anything is
    drawn. Sequences that chose another method get none.
    """

    name: Method

    def propose(self, scheduled: list[Scheduled], sampler: Sampler) -> Drafts: ...

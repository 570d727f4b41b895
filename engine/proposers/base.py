"""What every proposer does: guess the next tokens of each sequence that draws in this step."""

from typing import Protocol

from engine.sampling.sampler import Drafts, Sampler
from engine.scheduler import Scheduled


class Proposer(Protocol):
    """``scheduled`` is the whole step; ``sampler`` has one row per part that completes, in order.

    A part's ``num_draft_tokens`` is how many tokens to guess for it, decided before anything is drawn.
    """

    name: str

    def propose(self, scheduled: list[Scheduled], sampler: Sampler) -> Drafts: ...


class NoProposer:
    """Plain decoding: the step with empty drafts."""

    name = "none"

    def propose(self, scheduled: list[Scheduled], sampler: Sampler) -> Drafts:
        return Drafts.empty(len(sampler.rows), sampler.device)

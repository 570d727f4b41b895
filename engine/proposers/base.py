"""What a proposer with a model does: guess the next tokens of sequences during a step."""

from typing import Protocol

from truedraft.engine.core.step import ScheduledSequence
from truedraft.engine.messages import Source
from truedraft.engine.sampling.sampler import Drafts, Sampler


class Proposer(Protocol):
    """Drafts with a model, during a step. ``trace_source`` is what traces call it."""

    name: Source
    trace_source: str

    def propose(self, scheduled: list[ScheduledSequence], sampler: Sampler) -> Drafts:
        """``scheduled`` is the whole step; ``sampler`` has one row per sequence that completes, in order.

        ``num_drawn_by`` this proposer is how many tokens to draft for it at most, decided before anything is
        drawn.
        """

    def prefill(self, prompts: list[ScheduledSequence]) -> None:
        """Store a step's ``prompts``, as ``propose`` does, where no phase drafts for them."""

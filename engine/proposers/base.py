"""What proposers do: guess the next tokens of sequences, with a model or from a text that is known."""

from typing import Protocol

from engine.core.sequence import Sequence
from engine.core.step import ScheduledSequence
from engine.messages import Source
from engine.sampling.sampler import Drafts, Sampler


class Proposer(Protocol):
    """Drafts with a model, during a step. ``trace_source`` is what traces call it."""

    name: Source
    trace_source: str

    def propose(self, scheduled: list[ScheduledSequence], sampler: Sampler) -> Drafts:
        """``scheduled`` is the whole step; ``sampler`` has one row per sequence that completes, in order.

        ``num_draft_tokens`` is how many tokens to draft for it at most, decided before anything is drawn.
        Rows whose ``source`` is another proposer's name get none.
        """


class Lookup(Protocol):
    """Drafts from a text that is known, when a step is planned."""

    name: Source

    def read(self, sequence: Sequence, max_tokens: int) -> int:
        """Take in up to ``max_tokens`` of the sequence's text that are new; returns how many."""

    def offers(self, sequence: Sequence, num_tokens: int) -> tuple[list[int], int]:
        """Up to ``num_tokens`` drafts and the length of the match that they follow, without side effects."""

"""Defines the planner, which decides before a step who drafts for each decoding sequence, and how much."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import DraftChoice, InRound, StepPlan, StepResult
from truedraft.engine.messages import Source

# A grammar forces at most this many tokens in a later round of a step: each round has blocks for them.
MAX_FORCED = 8


class Found(NamedTuple):
    """Holds the length of a match in known text, and tokens that could follow it. ``where`` tells texts apart
    that one look-up has: what is accepted is learned for each."""

    match_length: int
    token_ids: list[int]
    where: str = ""


NOTHING = Found(0, [])


class Lookup(Protocol):
    """Finds drafts in known text."""

    name: Source

    def offers(self, sequence: Sequence, limit: int) -> Found:
        """Returns a match with up to ``limit`` tokens; changes nothing."""


@runtime_checkable
class ReadingLookup(Lookup, Protocol):
    """Must read a sequence to its end before it offers anything."""

    def read(self, sequence: Sequence, max_tokens: int) -> int:
        """Reads up to ``max_tokens`` more of the sequence's tokens; returns how many were read."""

    def num_unread(self, sequence: Sequence) -> int:
        """Returns how many tokens of the sequence are still to be read."""


@runtime_checkable
class KeepingLookup(Lookup, Protocol):
    """Drafts from texts of earlier sequences, too."""

    def keep(self, sequence: Sequence) -> None:
        """Keeps the text of a sequence that is finished."""

    def forget_texts(self) -> None:
        """Forgets all texts that were kept."""


@runtime_checkable
class InRoundLookup(Lookup, Protocol):
    """Makes offers that are always accepted, and follows the rounds of a step by itself."""

    def in_round(self, sequence: Sequence, limit: int) -> InRound:
        """Returns an object that later rounds ask, for up to ``limit`` drafts each."""


@dataclass(slots=True)
class StepChoice:
    """Holds a planner's decisions for a step: the ``drafts`` of all decoding sequences.

    They stand for ``max_rounds`` rounds if the rows stay. ``option`` comes back to ``observe`` in the step's
    plan: it holds whatever the planner must know to learn from the step.
    """

    drafts: dict[Sequence, DraftChoice]
    max_rounds: int = 1
    option: object = None


class Planner(Protocol):
    """Decides before anything of the step is drawn, from earlier rounds and the texts so far: that keeps the
    output's law."""

    @property
    def num_speculative_tokens(self) -> float:
        """Returns the mean length of the drafts that the last ``choose`` has asked for."""

    def choose(self, decoding: list[Sequence]) -> StepChoice:
        """Chooses for sequences of which the target has only the pending token to compute."""

    def choose_for_prompt(self, sequence: Sequence) -> DraftChoice:
        """Chooses for a prompt of one token, which is a row at once."""

    def lagging(self, sequence: Sequence) -> Collection[str]:
        """Returns the proposers that skip a prompt, and catch up when they draft."""

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learns from the verdicts on the drafts that ``choose`` asked for, and from the rounds' costs."""

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence, which has ended: it is finished, or was given up."""

    def forget_texts(self) -> None:
        """Forgets what earlier sequences have left for later ones."""

    def state(self) -> dict[str, object]:
        """Returns builtins, for ``GET /speculation``."""

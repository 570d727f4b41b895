"""What the scheduler asks before a step is drawn: who drafts for each decoding sequence, and how much."""

from dataclasses import dataclass, field
from typing import Protocol

from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import StepPlan, StepResult
from truedraft.engine.messages import Source

# The most tokens that a grammar forces in a later round of a step: each round has blocks for them.
MAX_FORCED = 8
# The longest drafts where the length is open: tokens without a model cost next to nothing.
AUTO_LIMITS: dict[Source, int] = {"draft_model": 8, "ngram": 16, "prediction": 32, "grammar": 32, "none": 0}


class Lookup(Protocol):
    """A source of drafts in known text. ``reads``: it must read a sequence to its end before it offers."""

    name: Source
    reads: bool

    def read(self, sequence: Sequence, max_tokens: int) -> int:
        """Read up to ``max_tokens`` more of the sequence's tokens; return how many were read."""

    def num_unread(self, sequence: Sequence) -> int:
        """Tokens of the sequence that are still to be read."""

    def offers(self, sequence: Sequence, limit: int) -> tuple[int, list[int]]:
        """The length of a match, and up to ``limit`` tokens that could follow it; no side effects."""


@dataclass(slots=True)
class DraftChoice:
    """What a decoding sequence drafts in this step: ``num_tokens`` at most, in each of its rounds.

    ``draft_ids``: the drafts themselves, from a source that needs no model; then the step has one round,
    unless the source is the grammar. In later rounds of a constrained sequence it forces up to ``max_forced``
    tokens; where it forces none, the draft model drafts ``num_model_tokens``.
    ``num_missing``: tokens that the draft model's cache must compute before it drafts, the pending token
    apart.
    """

    source: str = "none"
    num_tokens: int = 0
    num_missing: int = 0
    draft_ids: list[int] = field(default_factory=list)
    max_forced: int = 0
    num_model_tokens: int = 0


class Planner(Protocol):
    """Decides before anything of the step is drawn, from earlier rounds and the texts so far: that keeps the
    output's law."""

    @property
    def max_rounds(self) -> int:
        """Rounds for which the last ``choose`` stands, if the rows stay."""

    @property
    def num_speculative_tokens(self) -> float:
        """Mean length of the drafts that the last ``choose`` has asked for."""

    def choose(self, decoding: list[Sequence]) -> dict[Sequence, DraftChoice]:
        """For sequences whose pending token is all that the target has to compute."""

    def choose_for_prompt(self, sequence: Sequence) -> DraftChoice:
        """For a prompt of one token, which is a row at once."""

    def prefills_draft(self, sequence: Sequence) -> bool:
        """Whether the draft model computes a prompt along with the target, or catches up when it drafts."""

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """The verdicts on what ``choose`` asked for, and what the rounds cost."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""

    def state(self) -> dict[str, object]:
        """For ``GET /speculation``: builtins only."""

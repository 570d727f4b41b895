"""Holds the data of a step: the scheduler's plan, and a runner's results, in plain integers.

A *round* is one draft, score and verify of every row. A step has one round, or several where rounds are
short; whatever counts (usage, metrics, traces, acceptance) counts rounds.
"""

from collections.abc import Collection
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple, Protocol

from truedraft.engine.core.needs import Need, Needs
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.messages import RoundTrace, Source, TokenLogprob

# A pass over decoding rows takes up to this many tokens of one sequence: a draft cache may catch up with them
# and draft in the same round.
MAX_CATCH_UP_TOKENS = 32
# Such a pass takes up to this many tokens of a step's prompts: its working memory stays small, and the time
# of Python in a step counts little against longer passes.
MAX_PROMPT_TOKENS = 256
# These are the longest drafts where the length is open: a proposer's, and those of known text, whose tokens
# cost next to nothing.
PROPOSER_LIMIT = 8
AUTO_LIMITS: dict[str, int] = {"ngram": 16, "prediction": 32, "grammar": 32}


class Known(NamedTuple):
    """Holds drafts that a source without a model knows before their round."""

    source: Source
    token_ids: list[int]


class InRound(Protocol):
    """Finds drafts again and again within a step, as it follows the tokens of its rounds."""

    source: Source
    limit: int

    def drafts(self) -> list[int]:
        """Returns up to ``limit`` drafts of the next round, perhaps none."""


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """Says who drafts for a row: ``source`` drafts ``num_tokens`` with its model in every round for which
    nothing else is known.

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


def auto_limit(source: str) -> int:
    """Returns the longest draft of ``source`` where the length is open."""
    return AUTO_LIMITS.get(source, PROPOSER_LIMIT)


class Kind(Enum):
    """Says what a sequence's part in a step is. The number of tokens does not tell it: a piece of a prompt
    may be a single token."""

    PIECE = auto()  # a part of a prompt, whose last token comes in a later step: it emits nothing
    PROMPT = auto()  # all that is left of a prompt, several tokens: a row whose first pass brings them
    DECODE = auto()  # the pending token alone: a row


# The class is not frozen: many are made in every step, and freezing would take five times as long.
@dataclass(slots=True)
class ScheduledSequence:
    """Describes one sequence's part in a step: ``num_tokens`` known tokens to compute, and drafts on top.

    ``kind`` follows from the tokens that are left to compute when the part is made. ``num_catch_up_tokens``
    of those that the drafting proposer's cache misses are computed before it drafts, or instead of it; a
    prompt's chunk does not count. ``lagging`` are proposers that skip a prompt's chunk; the others' caches
    take it in now.
    """

    sequence: Sequence
    num_tokens: int
    draft: DraftChoice = NO_DRAFT
    num_catch_up_tokens: int = 0
    lagging: Collection[str] = ()
    kind: Kind = field(init=False)

    def __post_init__(self) -> None:
        if self.sequence.is_decoding:
            self.kind = Kind.DECODE
        else:
            is_whole = self.num_tokens == self.sequence.num_uncomputed_tokens
            self.kind = Kind.PROMPT if is_whole else Kind.PIECE

    @property
    def completes(self) -> bool:
        """Tells whether the last known token is computed, so that the sequence is a row of the rounds."""
        return self.kind is not Kind.PIECE

    def is_prefilled_by(self, proposer: str) -> bool:
        """Tells whether a proposer takes in a prompt's chunk along with the target."""
        return self.sequence.is_followed_by(proposer) and proposer not in self.lagging

    def num_drawn_by(self, proposer: str) -> int:
        """Returns how many drafts of the first round a proposer with a model must draw."""
        draft = self.draft
        return draft.num_tokens if draft.known is None and draft.source == proposer else 0


@dataclass(slots=True)
class StepPlan:
    """Holds the plan of a step. ``rows`` are the scheduled sequences that complete, in order. Blocks are
    reserved for ``max_rounds`` rounds. ``started`` is the time when planning began, by ``time.perf_counter``.
    ``option`` is the planner's own account of its choice, from which it learns when the step has run."""

    scheduled: list[ScheduledSequence]
    rows: list[ScheduledSequence]
    needs: Needs
    max_rounds: int
    started: float
    option: object = None

    def __bool__(self) -> bool:
        return bool(self.scheduled)

    @property
    def is_decode_only(self) -> bool:
        """Tells whether no prompt takes part, so that the step's duration is that of its rounds."""
        return Need.PROMPT not in self.needs

    @property
    def prompts(self) -> list[ScheduledSequence]:
        """Returns the prompts, and pieces of prompts, that take part."""
        return [part for part in self.scheduled if part.kind is not Kind.DECODE]


class PhaseSeconds(NamedTuple):
    """Holds the seconds of each phase; their sum is the wall time of a round."""

    draft: float
    score: float
    verify: float


@dataclass(slots=True)
class Round:
    """Holds the results of one round, row by row.

    ``emitted`` are the accepted drafts and the token that follows them, before stop tokens and limits cut
    them off. ``failed`` rows had no distribution to draw from. ``sources`` says who drafted, where that is
    not as planned for the first round. The optional columns are None where no row asks for them.
    """

    num_drafted: list[int]
    num_accepted: list[int]
    emitted: list[list[int]]
    seconds: PhaseSeconds
    failed: list[bool] | None = None
    logprobs: Sequences[list[TokenLogprob] | None] | None = None
    traces: Sequences[RoundTrace | None] | None = None
    sources: list[str] | None = None

    def source(self, row: int, part: ScheduledSequence) -> str:
        """Returns who drafted for the row that belongs to ``part``."""
        return part.draft.first_source if self.sources is None else self.sources[row]

    def logprobs_of(self, row: int) -> list[TokenLogprob]:
        """Returns the log-probabilities of the tokens that the row emitted, if it asks for them."""
        return [] if self.logprobs is None else self.logprobs[row] or []


@dataclass(slots=True)
class StepResult:
    """Holds the results of a step. ``rounds`` has at least one, if the plan has rows; only in the last one
    may a row end.

    ``num_rows`` counts the rows of all rounds by the runner that executed them. ``prompt_seconds`` are those
    of prompts, outside rounds. ``host_seconds`` are the rest of the step, known once it is committed.
    """

    rounds: list[Round]
    num_rows: dict[str, int] = field(default_factory=dict)
    prompt_seconds: PhaseSeconds | None = None
    host_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Returns the time of drafting, scoring and verifying."""
        parts = [one.seconds for one in self.rounds]
        if self.prompt_seconds is not None:
            parts.append(self.prompt_seconds)
        return sum(map(sum, parts))

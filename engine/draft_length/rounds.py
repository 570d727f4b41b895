"""What a policy is asked before a round and told after it: rows, outcomes, seconds."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.draft_length.confidence import PatientDraft

DRAFT_MODEL = "draft_model"

# What is made of every row in every round is not frozen: that would take five times as long.


@dataclass(slots=True)
class Candidate:
    """One drawing row. ``limit``: the most it may draft. ``num_stored``: tokens in the target's cache.
    ``lag``: tokens that its draft cache misses. ``match`` names how good the match is that a look-up goes on
    from: likely drafts apart from others."""

    key: Hashable
    method: str
    temperature: float
    limit: int
    lag: int = 0
    match: str = ""
    num_stored: int = 0

    @property
    def label(self) -> str:
        return f"{self.method} after {self.match}" if self.match else self.method


@dataclass(slots=True)
class Outcome:
    """What became of one row, for which ``source`` has drafted. ``ended``: it finished within the round,
    which then says nothing about acceptance: the tokens behind its end were never judged. ``next_right``:
    whether a draft that was accepted to its end would have been right about the token that followed; None:
    nobody knows."""

    key: Hashable
    num_draft_tokens: int
    num_accepted_tokens: int
    ended: bool = False
    source: str = DRAFT_MODEL
    next_right: bool | None = None


@dataclass(slots=True)
class RoundSeconds:
    """Wall time of drafting, of scoring with verification, and of the rest."""

    draft: float
    score: float
    host: float


def lags_after(outcomes: Sequence[Outcome], patient: Sequence[PatientDraft] | None) -> list[int]:
    """What the draft caches of rows that drafted miss in the round after this one. ``patient``: their drafts
    as they went, if they had patience. The last token drawn is in no cache."""
    lags = [int(0 < outcome.num_draft_tokens == outcome.num_accepted_tokens) for outcome in outcomes]
    if patient is None:
        return lags
    return [
        lag * (len(draft.confidences) == outcome.num_draft_tokens)
        for lag, draft, outcome in zip(lags, patient, outcomes, strict=True)
    ]


class LengthPolicy(Protocol):
    """``choose`` and ``observe`` once per round; rows that left in between are left out of ``outcomes``.
    What is chosen stands for ``num_rounds`` rounds of the same rows, the last one included: in all but the
    first ``go_on`` may stand for ``choose``, if all rows had outcomes: with the drafts of rows with patience,
    or before those are made. Rounds that share a step may be ``most_rounds``: a choice that could be thought
    over waits for the end of the step, one that has an end of its own does not.

    ``seconds`` is None for a step that also computed prompts: its times say nothing about rounds; and for the
    first of several rounds of a step.
    """

    def choose(self, rows: Sequence[Candidate], num_prompt_tokens: int = 0) -> list[int]: ...

    @property
    def num_rounds(self) -> int: ...

    @property
    def most_rounds(self) -> int: ...

    def go_on(self, patient: list[PatientDraft] | None) -> None: ...

    def observe(self, outcomes: Sequence[Outcome], seconds: RoundSeconds | None) -> None: ...

    def patient_draft(self, key: Hashable) -> PatientDraft | None: ...

    def follows_prompts(self) -> bool: ...

    def forget(self, key: Hashable) -> None: ...

    def state(self) -> dict[str, object]: ...


def temperature_bucket(temperature: float) -> str:
    """Requests in a bucket share what is known about acceptance."""
    if temperature == 0:
        return "greedy"
    return "temperature up to 0.8" if temperature <= 0.8 else "temperature above 0.8"

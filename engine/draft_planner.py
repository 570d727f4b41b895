"""Before anything is drawn: who drafts for each decoding sequence in a step, and how much.

Puts together what the sources offer, which of them is worth most (``draft_length.sources``) and how long a
draft pays (``draft_length.policy``). Plain integers, no tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.draft_length.confidence import Patience
from engine.draft_length.rounds import DRAFT_MODEL, Candidate, LengthPolicy, Outcome, RoundSeconds
from engine.draft_length.sources import AUTO_LIMITS, Offer, SourceChooser, strength
from engine.sequence import Sequence

# More than anybody asks for.
MANY_ROUNDS = 1000


@dataclass(slots=True)
class Choice:
    """What a decoding sequence is to draft in this step; ``lag`` tokens must be caught up with first."""

    source: str
    num_tokens: int
    lag: int = 0


def offer_all(sequence: Sequence, limit: int) -> list[Offer]:
    """Every source could draft as much as it may."""
    return [Offer(source, limit) for source in sequence.sources]


class DraftPlanner:
    """``offers`` says what the sources of a sequence could draft now, ``chooser`` which of them does, and
    ``policy`` how much, where that is left open; None where nothing is. ``max_draft_len`` is the draft
    model's context; ``follows`` is False where it keeps tables of its own, whose lag is its own business."""

    def __init__(
        self,
        max_draft_len: int = 0,
        policy: LengthPolicy | None = None,
        chooser: SourceChooser | None = None,
        offers: Callable[[Sequence, int], list[Offer]] = offer_all,
        follows: bool = True,
    ) -> None:
        self.max_draft_len = max_draft_len
        self.policy = policy
        self.chooser = chooser
        self.offers = offers
        self.follows = follows

    @property
    def num_rounds(self) -> int:
        """For how many rounds, this one included, what ``choose`` has said stands if the rows stay."""
        return MANY_ROUNDS if self.policy is None else self.policy.num_rounds

    def choose(self, running: list[Sequence], max_prompt_tokens: int) -> dict[Sequence, Choice]:
        """For every running sequence that decodes; prompts share the step with ``max_prompt_tokens``."""
        decoding = [sequence for sequence in running if sequence.num_uncomputed_tokens == 1]
        rows = self._choose_sources(decoding)
        lengths = [row.limit for row in rows]
        if self.policy is not None:
            num_prompt_tokens = 0
            if len(decoding) < len(running):
                num_tokens = sum(sequence.num_uncomputed_tokens for sequence in running)
                num_prompt_tokens = num_tokens - len(decoding)
            for sequence, row in zip(decoding, rows, strict=True):
                if sequence.fixed_draft_length:
                    row.limit = 0  # for the policy: here it has nothing to say
            chosen = self.policy.choose(rows, min(num_prompt_tokens, max_prompt_tokens))
            lengths = [
                fixed if sequence.fixed_draft_length else length
                for sequence, fixed, length in zip(decoding, lengths, chosen, strict=True)
            ]
        return {
            sequence: Choice(row.method, length, row.lag)
            for sequence, row, length in zip(decoding, rows, lengths, strict=True)
        }

    def _choose_sources(self, decoding: list[Sequence]) -> list[Candidate]:
        """Who drafts if anybody does, and the most that may be drafted."""
        options = [self._candidates(sequence) for sequence in decoding]
        chosen = [candidates[0] if candidates else None for candidates in options]
        # A draft model alone has nobody to be compared with; whether it pays is the length policy's question.
        combining = [
            i
            for i, sequence in enumerate(decoding)
            if sequence.combines and not (len(options[i]) == 1 and options[i][0].method == DRAFT_MODEL)
        ]
        if self.chooser is not None and combining:
            choices = self.chooser.choose(
                [options[i] for i in combining],
                fixed=[decoding[i].fixed_draft_length for i in combining],
                num_rows=len(decoding),
            )
            for i, choice in zip(combining, choices, strict=True):
                chosen[i] = choice
        return [
            choice or self._candidate(sequence, "none", 0)
            for sequence, choice in zip(decoding, chosen, strict=True)
        ]

    def _candidates(self, sequence: Sequence) -> list[Candidate]:
        """The sources that could draft something now."""
        # A round emits one more than it drafts.
        room = min(sequence.num_speculative_tokens, sequence.max_num_tokens - len(sequence.token_ids) - 1)
        if room <= 0:
            return []
        candidates = []
        for source, limit, match_length in self.offers(sequence, room):
            if not sequence.fixed_draft_length:
                limit = min(limit, AUTO_LIMITS[source])
            if source == DRAFT_MODEL:
                limit = min(limit, self.max_draft_len - len(sequence.token_ids))
            if limit > 0:
                candidates.append(self._candidate(sequence, source, limit, match_length))
        return candidates

    def unasked(self, sequence: Sequence) -> Choice:
        """For a prompt of one token, which draws at once: nobody has been asked about it."""
        if sequence.fixed_draft_length and (candidates := self._candidates(sequence)):
            return Choice(candidates[0].method, candidates[0].limit, candidates[0].lag)
        return Choice("none", 0)

    def follows_prompt(self, sequence: Sequence) -> bool:
        """Whether a draft model computes the prompt along with the target, or catches up when it drafts."""
        return self.policy is None or sequence.fixed_draft_length or self.policy.follows_prompts()

    def patience(self, sequence: Sequence) -> Patience | None:
        """When the draft just chosen may end early."""
        return self.policy.patience(sequence) if self.policy is not None else None

    @property
    def learns(self) -> bool:
        """Whether somebody wants to know what becomes of rounds."""
        return self.policy is not None or self.chooser is not None

    def observe(self, outcomes: list[Outcome], seconds: RoundSeconds | None) -> None:
        """What became of the rows of ``choose``, if they drew; ``seconds`` of a step without prompts."""
        if self.chooser is not None:
            self.chooser.observe(outcomes, seconds)
        if self.policy is not None:
            self.policy.observe(outcomes, seconds)

    def observe_again(
        self, outcomes: list[Outcome], seconds: RoundSeconds | None, patience: Patience | None
    ) -> None:
        """What became of the same rows in another round of the step; ``patience`` was a lone row's."""
        if self.chooser is not None:
            self.chooser.observe(outcomes, seconds)
        if self.policy is not None:
            self.policy.observe_again(outcomes, seconds, patience)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        if self.policy is not None:
            self.policy.forget(sequence)
        if self.chooser is not None:
            self.chooser.forget(sequence)

    def _candidate(self, sequence: Sequence, source: str, limit: int, match_length: int = 0) -> Candidate:
        num_stored = len(sequence.token_ids) - 1
        lag = 0
        if source == DRAFT_MODEL and self.follows:
            # What the draft model's cache misses, the pending token apart.
            lag = max(0, num_stored - sequence.draft_blocks.num_computed_tokens)
        temperature = 0.0 if sequence.greedy else sequence.params.temperature
        return Candidate(sequence, source, temperature, limit, lag, strength(match_length), num_stored)

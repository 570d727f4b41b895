"""Before anything is drawn: who drafts for each decoding sequence in a step, and how much.

Puts together what the sources offer, which of them is worth most (``draft_length.sources``) and how long a
draft pays (``draft_length.policy``). Plain integers, no tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.sequence import Sequence
from engine.draft_length.confidence import PatientDraft
from engine.draft_length.rounds import DRAFT_MODEL, Candidate, LengthPolicy, Outcome, RoundSeconds
from engine.draft_length.sources import AUTO_LIMITS, Offer, SourceChooser, strength
from engine.messages import Source

# More than anybody asks for.
MANY_ROUNDS = 1000
# Sources that look nothing up.
NO_LOOK_UPS: tuple[Source, ...] = "draft_model", "none"


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
        # What was chosen last, for whom; how long each text may become before its draft must be shorter;
        # whether the choice may stand, and whether all that it was for have been heard of.
        self._choices: dict[Sequence, Choice] = {}
        self._decoding: list[Sequence] = []
        self._longest: list[int] = []
        self._may_stand = self._was_observed = False

    @property
    def num_rounds(self) -> int:
        """For how many rounds, the last one included, what ``choose`` has said stands if the rows stay."""
        return MANY_ROUNDS if self.policy is None else self.policy.num_rounds

    @property
    def most_rounds(self) -> int:
        """The same, of rounds that share a step."""
        return MANY_ROUNDS if self.policy is None else self.policy.most_rounds

    def choose(self, running: list[Sequence], max_prompt_tokens: int) -> dict[Sequence, Choice]:
        """For every running sequence that decodes; prompts share the step with ``max_prompt_tokens``."""
        decoding = [sequence for sequence in running if sequence.num_uncomputed_tokens == 1]
        if self._stands(decoding, len(running)):
            self.go_on(None)
        else:
            self._choices = self._choose_anew(decoding, running, max_prompt_tokens)
            self._decoding = decoding
            self._longest = [
                min(sequence.max_num_tokens - 1, self.max_draft_len) - choice.num_tokens
                if choice.num_tokens
                else sequence.max_num_tokens
                for sequence, choice in self._choices.items()
            ]
            # Who looks something up may find it at any time.
            looks_up = any(source not in NO_LOOK_UPS for row in decoding for source in row.sources)
            self._may_stand = not looks_up
        self._was_observed = False
        return self._choices

    def _stands(self, decoding: list[Sequence], num_running: int) -> bool:
        """Whether what was chosen last goes for this step too. Asking all rows anew takes as long as some
        draft passes."""
        if not (self._may_stand and self._was_observed and self.num_rounds > 1):
            return False
        if len(decoding) < num_running or decoding != self._decoding:
            return False
        if any(len(row.token_ids) > most for row, most in zip(decoding, self._longest, strict=True)):
            return False
        if self.follows:
            for sequence, choice in self._choices.items():
                if choice.num_tokens:
                    choice.lag = _lag(sequence)
        return True

    def _choose_anew(
        self, decoding: list[Sequence], running: list[Sequence], max_prompt_tokens: int
    ) -> dict[Sequence, Choice]:
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

    def patient_draft(self, sequence: Sequence) -> PatientDraft | None:
        """The draft just chosen, if it may end early."""
        return self.policy.patient_draft(sequence) if self.policy is not None else None

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
        self._was_observed = len(outcomes) == len(self._decoding)

    def go_on(self, patient: list[PatientDraft] | None) -> None:
        """Another round of the same rows: in this step, where they have made their ``patient`` drafts, or in
        the next one."""
        if self.policy is not None:
            self.policy.go_on(patient)

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
            lag = _lag(sequence)
        temperature = 0.0 if sequence.greedy else sequence.params.temperature
        return Candidate(sequence, source, temperature, limit, lag, strength(match_length), num_stored)


def _lag(sequence: Sequence) -> int:
    """What the draft model's cache misses of a sequence, the pending token apart."""
    return max(0, len(sequence.token_ids) - 1 - sequence.draft_blocks.num_computed_tokens)

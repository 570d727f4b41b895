"""Who drafts for a row in a round, of those who can: the one with the highest expected tokens per second.

What a source is worth is learned from its verdicts: how far its drafts survive, by position, for every
source and strength of match, temperature bucket and sequence (``survival``). A look-up costs nothing but the
tokens it gives the target to score; a model's draft costs its passes, and catching up with what its cache
has missed.

Exactness: chosen before the round draws anything, from earlier rounds and the text so far.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

from engine.draft_length.costs import CostModel
from engine.draft_length.plan import SURVIVAL_FLOOR
from engine.draft_length.rounds import DRAFT_MODEL, Candidate, Outcome, RoundSeconds, temperature_bucket
from engine.draft_length.survival import GroupAcceptance, SequenceAcceptance
from engine.messages import Source

# The longest draft that the policy may choose: drafts without a model cost next to nothing.
AUTO_LIMITS: dict[str, int] = {"draft_model": 8, "ngram": 16, "prediction": 32, "none": 0}
# Matches of at least so many tokens are kept apart: the longer, the likelier they go on.
STRENGTHS = {2: "2 tokens", 4: "4 tokens", 8: "8 tokens", 16: "16 tokens"}
# Where the length is fixed nobody compares with a round without drafts: a look-up must be expected to save so
# many tokens to be worth their scoring.
MIN_GAIN = 0.3
# A source that could draft but was not chosen for so many rounds is tried once.
TRY_AGAIN = 128
# Catching up is paid over so many rounds: that is how long one usually stays with the draft model.
CATCH_UP_ROUNDS = 8
# A pass of so many more tokens takes twice as long, unless measured.
CATCH_UP_TOKENS = 16
RATE = 0.1
# A choice between the same kinds of offers stands for so many rounds: rating them takes longer than a pass of
# a small draft model.
CHOICE_STANDS = 8


class Offer(NamedTuple):
    """What one source could draft: ``num_tokens`` after a match of ``match_length`` (0: no such thing)."""

    source: Source
    num_tokens: int
    match_length: int = 0


def strength(match_length: int) -> str:
    """Names matches that are alike."""
    if match_length == 0:
        return ""
    names = [name for shortest, name in STRENGTHS.items() if match_length >= shortest]
    return names[-1] if names else ""


class RoundCosts(Protocol):
    def seconds(self, num_rows: int, length: int, uses_model: bool, lag: int) -> float:
        """One row's share of a round in which all rows draft ``length`` tokens alike."""
        ...

    def observe(self, model_lengths: Sequence[int], seconds: RoundSeconds) -> None: ...


class CalibratedCosts:
    """By the curves that the draft length policy keeps."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs

    def seconds(self, num_rows: int, length: int, uses_model: bool, lag: int) -> float:
        costs = self.costs
        together = costs.host(num_rows) + costs.score(num_rows * (1 + length))
        if not uses_model:
            return together / num_rows + costs.lookup_seconds
        one_pass = costs.draft(num_rows)
        catching_up = costs.draft(num_rows + lag) - one_pass
        drafting = costs.draft_start + length * one_pass
        return (together + drafting) / num_rows + catching_up / CATCH_UP_ROUNDS

    def observe(self, model_lengths: Sequence[int], seconds: RoundSeconds) -> None:
        pass


class FollowedCosts:
    """For fixed lengths, without calibration: moving averages of a draft pass and of the rest of a round."""

    def __init__(self) -> None:
        self.draft_pass: float | None = None
        self.rest: float | None = None

    def seconds(self, num_rows: int, length: int, uses_model: bool, lag: int) -> float:
        rest, one_pass = self.rest or 1.0, self.draft_pass or 0.0
        if not uses_model:
            return rest / num_rows
        catching_up = one_pass * lag / CATCH_UP_TOKENS / CATCH_UP_ROUNDS
        return (rest + length * one_pass) / num_rows + catching_up

    def observe(self, model_lengths: Sequence[int], seconds: RoundSeconds) -> None:
        self.rest = _follow(self.rest, seconds.score + seconds.host)
        if num_passes := max(model_lengths, default=0):
            self.draft_pass = _follow(self.draft_pass, seconds.draft / num_passes)


class SourceChooser:
    """``choose`` before every round, ``observe`` after it, ``forget`` a sequence that has ended."""

    def __init__(self, costs: RoundCosts) -> None:
        self.costs = costs
        self._groups: dict[tuple[str, str, str], GroupAcceptance] = {}
        self._sequences: dict[Hashable, dict[tuple[str, str], SequenceAcceptance]] = {}
        self._asked: dict[Hashable, SequenceAcceptance] = {}  # whose draft was chosen in this round
        # Until which round a sequence's choice stands, between what, and who was chosen.
        self._standing: dict[Hashable, tuple[int, object, int | None]] = {}
        self._round = 0

    def choose(
        self, rows: Sequence[list[Candidate]], *, fixed: Sequence[bool], num_rows: int
    ) -> list[Candidate | None]:
        """One of each row's candidates; None if none is worth it. ``fixed``: its length is the limit.
        ``num_rows`` is how many rows draw in this step, others included."""
        self._round += 1
        self._asked.clear()
        return [
            self._choose_one(candidates, num_rows, is_fixed) if candidates else None
            for candidates, is_fixed in zip(rows, fixed, strict=True)
        ]

    def observe(self, outcomes: Sequence[Outcome], seconds: RoundSeconds | None) -> None:
        """Verdicts on all drafts; acceptance is learned of the rows that were asked about. ``seconds``: of a
        step without prompts."""
        # Forgotten with its verdict: in the next round a draft model may be alone, and nobody asked.
        asked, self._asked = self._asked, {}
        for outcome in outcomes if asked else ():
            acceptance = asked.get(outcome.key)
            if acceptance is None or outcome.num_draft_tokens == 0:
                continue
            # What was not drafted of the limit says nothing: the length policy may have asked for less.
            drafted = outcome.num_draft_tokens
            acceptance.learn(self._round, drafted, drafted, outcome.num_accepted_tokens, outcome.ended)
        if seconds is not None and outcomes:
            by_model = [outcome.num_draft_tokens for outcome in outcomes if outcome.source == DRAFT_MODEL]
            self.costs.observe(by_model, seconds)

    def forget(self, key: Hashable) -> None:
        for of_sequences in (self._sequences, self._asked, self._standing):
            of_sequences.pop(key, None)

    def state(self) -> dict[str, object]:
        """How often each source was accepted lately, for people."""
        return {
            ", ".join(filter(None, names)): group.state()
            for names, group in self._groups.items()
            if group.counts.reached
        }

    def _choose_one(self, candidates: list[Candidate], num_rows: int, is_fixed: bool) -> Candidate | None:
        key = candidates[0].key
        kinds = num_rows, is_fixed, *((c.method, c.match, c.limit, c.lag > 1) for c in candidates)
        until, of, index = self._standing.get(key, (0, None, None))
        if self._round >= until or of != kinds:
            index, rounds = self._due(candidates), 1
            if index is None:
                index, rounds = self._best(candidates, num_rows, is_fixed), CHOICE_STANDS
            self._standing[key] = self._round + rounds, kinds, index
        if index is None:
            return None
        self._asked[key] = self._acceptance(candidates[index])
        return candidates[index]

    def _best(self, candidates: list[Candidate], num_rows: int, is_fixed: bool) -> int | None:
        """The one that is worth most; None if none is worth it."""
        rated = [self._rate(candidate, num_rows, is_fixed) for candidate in candidates]
        best = max(range(len(candidates)), key=rated.__getitem__)
        return best if rated[best] > 0 else None

    def _due(self, candidates: list[Candidate]) -> int | None:
        """Who has not drafted for so long that it is tried once."""
        for index, candidate in enumerate(candidates):
            acceptance = self._acceptance(candidate)
            if acceptance.age(self._round) >= TRY_AGAIN:
                acceptance.last_drafted = acceptance.group.last_drafted = self._round
                return index
        return None

    def _rate(self, candidate: Candidate, num_rows: int, is_fixed: bool) -> float:
        """Expected tokens per second at the best length; 0 if it is not worth it."""
        uses_model = candidate.method == DRAFT_MODEL
        survival = self._acceptance(candidate).survival(candidate.limit, 0.0 if is_fixed else SURVIVAL_FLOOR)
        if is_fixed:
            gain = sum(survival)
            if not uses_model and gain < MIN_GAIN:
                return 0.0
            return (1 + gain) / self.costs.seconds(num_rows, candidate.limit, uses_model, candidate.lag)
        best, tokens = 0.0, 1.0
        for length, chance in enumerate(survival, start=1):
            tokens += chance
            seconds = self.costs.seconds(num_rows, length, uses_model, candidate.lag)
            best = max(best, tokens / seconds)
        return best

    def _acceptance(self, candidate: Candidate) -> SequenceAcceptance:
        mine = self._sequences.setdefault(candidate.key, {})
        name = candidate.method, candidate.match
        if name not in mine:
            bucket = temperature_bucket(candidate.temperature)
            group = self._groups.setdefault((*name, bucket), GroupAcceptance())
            mine[name] = SequenceAcceptance(group, self._round)
        return mine[name]


def _follow(average: float | None, value: float) -> float:
    return value if average is None else average + RATE * (value - average)

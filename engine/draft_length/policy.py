"""How many tokens every row of a step drafts: as many as raise expected tokens per second, or none.

Exactness: ``choose`` is called before a round draws anything and knows only earlier rounds, the rows and
the clock. A length that depended on a token of its own round would bias the output: tokens that are easy
to accept would be dropped less often than others. Whatever is drafted after ``choose`` must be verified.

Three things are tried out now and then, as far as a small share of the time pays for it (``probes``): a
short draft where drafting is off, a longer one where it is on, and none at all, so that the plain step
that everything is compared with is a measured one.
"""

from collections.abc import Hashable, Sequence

from engine.draft_length.confidence import Patience
from engine.draft_length.costs import CostModel
from engine.draft_length.plan import (
    SURVIVAL_FLOOR,
    Plan,
    RowOutlook,
    Search,
    draft_sizes,
    evaluate,
    padding,
    search,
)
from engine.draft_length.probes import Probes
from engine.draft_length.report import Report
from engine.draft_length.rounds import DRAFT_MODEL, Candidate, Outcome, RoundSeconds, temperature_bucket
from engine.draft_length.survival import GroupAcceptance, SequenceAcceptance

# A new plan replaces the last one when it promises this much more. Little: what it saves is a draft cache
# that lags a token or two, and sitting on a plan that is 5 % worse is a loss of 5 %.
HYSTERESIS = 0.01
# The search is repeated after so many rounds, after twice as many where it found the same again, and at once
# when rows, limits or prompts change and after a probe.
SEARCH_EVERY, MAX_SEARCH_EVERY = 4, 16
# Uneven lengths in a batch are looked for after so many rounds, and in every search while they are uneven.
UNEVEN_EVERY = 16
# Switching on must earn within so many rounds what it takes to bring the draft's cache up to date.
CATCH_UP_ROUNDS = 128
# Costs are followed in every round at first, then in one of seven and in those that try something else: it
# takes a while itself, and seven has no rhythm in common with anything above.
COSTS_EVERY, NEW_ROUNDS = 7, 256
# So many rows of a round, in turns, tell how far drafts survive.
LEARN_ROWS = 8
# While drafting does not pay, prompts are computed for a draft model that takes less than this share of the
# target's time over so many tokens. A dearer one catches up if it is needed.
CHEAP_DRAFT, TYPICAL_CHUNK = 0.1, 64
# Every so many rounds nothing ends early, so that what unlikely tokens are worth stays known.
EXPLORE_EVERY = 32


class DraftLengthPolicy:
    """``auto``. Deterministic: the same past gives the same lengths."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.probes = Probes()
        self.report = Report()
        self._groups: dict[tuple[str, str], GroupAcceptance] = {}
        self._sequences: dict[Hashable, dict[str, SequenceAcceptance]] = {}
        self._round = 0
        self._signature: tuple[object, ...] = ()
        self._last_search: Search | None = None
        self._next_search = 0
        self._search_every = SEARCH_EVERY
        self._next_uneven = 0
        self._next_learned = 0
        self._least: tuple[float, float] | None = None  # what a lone row drafts must be worth
        self._asked: dict[Hashable, tuple[Candidate, int]] = {}
        self._patience: dict[Hashable, Patience] = {}

    def choose(self, rows: Sequence[Candidate], num_prompt_tokens: int = 0) -> list[int]:
        """Tokens to draft, by row."""
        if not rows:
            return []
        self._round += 1
        sequences = [self._sequence(row) for row in rows]
        signature = (num_prompt_tokens, *((row.key, row.label, row.limit) for row in rows))
        if self._last_search is None or signature != self._signature or self._round >= self._next_search:
            self._signature = signature
            self.costs.look_at(sum(row.num_stored for row in rows))
            before, self._least = self._last_search, None
            self._last_search = self._search(rows, sequences, num_prompt_tokens)
            is_same = before is not None and before.best.lengths == self._last_search.best.lengths
            self._search_every = min(2 * self._search_every, MAX_SEARCH_EVERY) if is_same else SEARCH_EVERY
            self._next_search = self._round + self._search_every
        found = self._last_search
        lengths, self._patience = found.best.lengths, {}
        if num_prompt_tokens == 0 and self.probes.may_run(self._round, found):
            lengths = self._probe(rows, sequences, found) or lengths
        if lengths is found.best.lengths and self._round % EXPLORE_EVERY:
            lengths = self._be_patient(rows, sequences, found.best)
        self._asked = {row.key: (row, length) for row, length in zip(rows, lengths, strict=True)}
        return list(lengths)

    def patience(self, key: Hashable) -> Patience | None:
        """When a row may stop drafting before the length that ``choose`` has just named."""
        return self._patience.get(key)

    def follows_prompts(self) -> bool:
        """Whether drafts are to be expected soon, or computing prompts for them costs next to nothing."""
        found = self._last_search
        if found is None or any(found.best.lengths):
            return True
        return self.costs.draft(TYPICAL_CHUNK) < CHEAP_DRAFT * self.costs.score(TYPICAL_CHUNK)

    def observe(self, outcomes: Sequence[Outcome], seconds: RoundSeconds | None) -> None:
        """The verdict on what ``choose`` asked for; fewer may have been drafted."""
        found = self._last_search
        if found is None or not outcomes:
            return
        num_emitted = len(outcomes) + sum(outcome.num_accepted_tokens for outcome in outcomes)
        self._learn(outcomes)
        if seconds is not None:
            lengths = [outcome.num_draft_tokens for outcome in outcomes]
            is_new = self._round < NEW_ROUNDS or self.probes.is_running
            if is_new or self._round % COSTS_EVERY == 0:
                self._observe_costs(outcomes, seconds)
            self.report.count(found, lengths, num_emitted, seconds.draft + seconds.score + seconds.host)
        if self.probes.is_running:
            self._next_search = self._round + 1
        self.probes.settle(self._round, found, num_emitted)

    def forget(self, key: Hashable) -> None:
        """A sequence has ended."""
        self._sequences.pop(key, None)

    def state(self) -> dict[str, object]:
        """For people: builtins only."""
        return {
            "policy": "auto",
            **self.report.state(self._last_search, [length for _, length in self._asked.values()]),
            "survival": {
                f"{method}, {bucket}": group.state() for (method, bucket), group in self._groups.items()
            },
            "costs": self.costs.state(),
            "probes": self.probes.state(),
        }

    def _sequence(self, row: Candidate) -> SequenceAcceptance:
        by_label = self._sequences.setdefault(row.key, {})
        sequence = by_label.get(row.label)
        if sequence is None:
            name = row.label, temperature_bucket(row.temperature)
            group = self._groups.setdefault(name, GroupAcceptance())
            sequence = by_label[row.label] = SequenceAcceptance(group, self._round)
        return sequence

    def _search(
        self, rows: Sequence[Candidate], sequences: list[SequenceAcceptance], num_prompt_tokens: int
    ) -> Search:
        outlooks = _outlooks(rows, sequences)
        previous = [
            min(sequence.num_draft_tokens, max(0, row.limit))
            for row, sequence in zip(rows, sequences, strict=True)
        ]
        may_be_uneven = self._round >= self._next_uneven or len(set(previous)) > 1
        if may_be_uneven:
            self._next_uneven = self._round + UNEVEN_EVERY
        found = search(outlooks, self.costs, num_prompt_tokens, may_be_uneven)
        if any(previous) and previous != found.best.lengths:
            kept = evaluate(outlooks, previous, self.costs, num_prompt_tokens)
            if kept.rate * (1 + HYSTERESIS) > found.best.rate and kept.rate > found.plain.rate:
                found = Search(found.plain, kept, found.best_drafting)
        elif not any(previous) and found.best.rate < (1 + HYSTERESIS) * found.plain.rate:
            found = Search(found.plain, found.plain, found.best_drafting)
        if any(found.best.lengths) and not self._worth_catching_up(rows, found):
            found = Search(found.plain, found.plain, found.best_drafting)
        for sequence, length in zip(sequences, found.best.lengths, strict=True):
            sequence.num_draft_tokens = length
        return found

    def _worth_catching_up(self, rows: Sequence[Candidate], found: Search) -> bool:
        """A draft cache that was left behind costs a long pass, to be earned within some rounds."""
        best = found.best
        catching_up = self.costs.draft(_lag(rows, best.lengths)) / CATCH_UP_ROUNDS
        return best.tokens / (best.seconds + catching_up) > found.plain.rate

    def _be_patient(
        self, rows: Sequence[Candidate], sequences: list[SequenceAcceptance], best: Plan
    ) -> list[int]:
        """A lone row may draft up to its limit, but ends early where the draft is unsure.

        A token is worth what it costs at the rate of ``best``: its place in the target's pass, and a draft
        pass. Rows that share their passes save little by one row's doubt, and rows of different lengths
        cost more: there the planned lengths stay.
        """
        (row, sequence), *others = zip(rows, sequences, strict=True)
        if others or not best.lengths[0] or row.method != DRAFT_MODEL:
            return best.lengths
        if self._least is None:
            costs, longest = self.costs, max(2, row.limit)
            score_seconds = (costs.score(1 + longest) - costs.score(2)) / (longest - 1)
            usual_rate = max(0.1, sequence.survival(1, 0.0)[0])
            to_draft = best.rate * (score_seconds + costs.draft(1)) / usual_rate
            self._least = best.rate * score_seconds, to_draft
        to_score, to_draft = self._least
        self._patience[row.key] = Patience(sequence.group.confidence, to_score, to_draft)
        return [row.limit]

    def _probe(
        self, rows: Sequence[Candidate], sequences: list[SequenceAcceptance], found: Search
    ) -> list[int] | None:
        """Other lengths for this round, if some are due and can be afforded."""
        outlooks = _outlooks(rows, sequences)
        ages = [sequence.age(self._round) for sequence in sequences]
        limits = [max(0, row.limit) for row in rows]
        for lengths in self.probes.candidates(found, limits, ages, [row.lag for row in rows]):
            plan = evaluate(outlooks, lengths, self.costs, 0, _lag(rows, lengths))
            again = evaluate(outlooks, lengths, self.costs, 0)
            if self.probes.begin(plan, again.seconds, found.best):
                return lengths
        self.probes.postpone(self._round)
        return None

    def _learn(self, outcomes: Sequence[Outcome]) -> None:
        drafted = [outcome for outcome in outcomes if self._asked[outcome.key][1]]
        if len(drafted) > LEARN_ROWS:
            first = self._next_learned = self._next_learned % len(drafted)
            drafted = [*drafted[first:], *drafted[:first]][:LEARN_ROWS]
            self._next_learned += LEARN_ROWS
        for outcome in drafted:
            row, num_asked = self._asked[outcome.key]
            by_label = self._sequences.get(outcome.key)
            if by_label is not None:
                by_label[row.label].learn(
                    self._round,
                    num_asked,
                    outcome.num_draft_tokens,
                    outcome.num_accepted_tokens,
                    outcome.ended,
                    self._patience.get(outcome.key),
                )

    def _observe_costs(self, outcomes: Sequence[Outcome], seconds: RoundSeconds) -> None:
        lag, num_lookups, by_model = 0, 0, []
        for outcome in outcomes:
            row, num_asked = self._asked[outcome.key]
            patience = self._patience.get(outcome.key)
            # A token that was refused has cost its draft pass all the same.
            refused = patience is not None and patience.refused_rate is not None
            num_passes = outcome.num_draft_tokens + refused
            if row.method != DRAFT_MODEL:
                num_lookups += num_asked > 0
            elif num_passes:
                by_model.append(num_passes)
                lag += row.lag
        lengths = [outcome.num_draft_tokens for outcome in outcomes]
        num_drafted = sum(lengths)
        padded = padding(self.costs, max(lengths), len(outcomes), num_drafted)
        # A pass that caught up with a pause was many times larger than any round's: no news about those.
        is_usual = lag <= len(by_model)
        self.costs.observe_round(
            draft_sizes=draft_sizes(by_model, lag) if is_usual else [],
            num_lookups=num_lookups,
            num_rows=len(outcomes),
            num_score_tokens=len(outcomes) + num_drafted + padded,
            draft_seconds=seconds.draft,
            score_seconds=seconds.score,
            host_seconds=seconds.host,
        )


def _outlooks(rows: Sequence[Candidate], sequences: list[SequenceAcceptance]) -> list[RowOutlook]:
    return [
        RowOutlook(sequence.survival(row.limit, SURVIVAL_FLOOR), sequence.fill, row.method == DRAFT_MODEL)
        for row, sequence in zip(rows, sequences, strict=True)
    ]


def _lag(rows: Sequence[Candidate], lengths: list[int]) -> int:
    """Tokens that the draft's cache has to catch up with before these lengths."""
    return sum(
        row.lag for row, length in zip(rows, lengths, strict=True) if length and row.method == DRAFT_MODEL
    )

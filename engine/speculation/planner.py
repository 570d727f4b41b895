"""Before a step: who drafts for each decoding sequence, and how much. After it: what came of that.

``Policy`` decides how much the draft model drafts, for all rows alike; ``lookups`` which rows draft something
from known text instead. The planner knows sequences and steps, and puts the two together.
"""

from collections import Counter
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

from engine.core.planning import AUTO_LIMITS, DraftChoice, Lookup
from engine.core.sequence import Sequence
from engine.core.step import EarlyExit, Round, ScheduledSequence, StepPlan, StepResult
from engine.speculation.costs import LOOKUP, MAX_ROUNDS, Costs, Shape
from engine.speculation.explore import LOOKUP_SHARE, Budget
from engine.speculation.lookups import RowLookup, Terms, make_terms, read_all, start_some
from engine.speculation.policy import Decision, Group, Policy

# What all rows draft that draft nothing; shared, so never changed.
NO_DRAFT = DraftChoice()
# Rounds whose timing is used may bring so many tokens per row that the draft model's cache has missed.
USUAL_MISSING = 2
# Rounds are timed as decided if rows near their ends have not shortened their drafts to less than this share.
FULL_SHARE = 0.9
# Verdicts on drafts with early exit from which a step teaches.
MAX_EXITS = 32


@dataclass(slots=True, eq=False)
class Row:
    """What the planner keeps of a sequence."""

    sequence: Sequence
    group: Group
    drafts: bool  # whether the draft model may draft, and the policy decides how much
    fixed_length: int  # 0 where the policy decides
    follows: bool  # whether the scheduler's tables say what the draft model's cache misses
    lookups: list[RowLookup] = field(default_factory=list)

    def num_missing(self) -> int:
        """Tokens that the draft model's cache misses, the pending one apart."""
        if not self.follows:
            return 0
        sequence = self.sequence
        return max(0, len(sequence.token_ids) - 1 - sequence.draft_blocks.num_computed_tokens)


class SpeculationPlanner:
    """``core.planning.Planner``.

    ``lookups`` are the sources that need no model. ``max_draft_len`` is the draft model's context; without
    ``tracks_draft_cache`` it keeps tables of its own, and what they miss is its own business. Only runners
    that report confidences can end drafts early (``has_early_exit``).
    """

    def __init__(
        self,
        costs: Costs,
        lookups: Sequences[Lookup] = (),
        max_draft_len: int = 0,
        tracks_draft_cache: bool = True,
        has_early_exit: bool = True,
    ) -> None:
        self.policy = Policy(costs, has_early_exit)
        self.costs = costs
        self.max_draft_len = max_draft_len
        self.tracks_draft_cache = tracks_draft_cache
        self.max_rounds = 1
        self._lookups = {lookup.name: lookup for lookup in lookups}
        self._lookup_budget = Budget(LOOKUP_SHARE)
        self._groups: dict[str, Group] = {}
        self._rows: dict[Sequence, Row] = {}
        self._terms: dict[tuple[Group, int, int, int], Terms] = {}
        self._terms_of: object = None
        # Of the last timed round, by rows and drafted tokens.
        self._round_seconds: dict[tuple[int, int], float] = {}
        # Of the last choice: whether anything may draft at all; tokens that the policy has decided on and
        # those chosen in all; whether other lengths are among them, and drafts that are known already.
        self._decoding: list[Sequence] = []
        self._is_used = self._is_mixed = self._drafts_known = False
        self._num_decided = self._num_chosen = 0

    @property
    def num_speculative_tokens(self) -> float:
        """Mean length of the drafts that the last ``choose`` has asked for."""
        return self._num_chosen / max(1, len(self._decoding))

    def choose(self, decoding: list[Sequence]) -> dict[Sequence, DraftChoice]:
        choices = dict.fromkeys(decoding, NO_DRAFT)
        rows = [self._rows.get(sequence) or self._add(sequence) for sequence in decoding if sequence.sources]
        self._decoding, self._is_used = decoding, bool(rows)
        self._is_mixed = self._drafts_known = False
        self._num_decided = self._num_chosen = 0
        if not rows:
            self.max_rounds = MAX_ROUNDS
            return choices
        num_rows = len(decoding)
        self.costs.stored_per_row = sum([len(sequence.token_ids) for sequence in decoding]) / num_rows
        drafting = [row for row in rows if row.drafts]
        decision = self.policy.choose(num_rows, drafting)
        self._choose_model(drafting, decision, choices)
        if self._lookups or len(drafting) < len(rows):
            self._choose_others(rows, num_rows, len(drafting), choices)
        self._num_chosen = sum([choice.num_tokens for choice in choices.values()])
        self.max_rounds = self._num_rounds(num_rows)
        return choices

    def choose_for_prompt(self, sequence: Sequence) -> DraftChoice:
        if not sequence.sources or not sequence.fixed_draft_length:
            return NO_DRAFT
        row = self._rows.get(sequence) or self._add(sequence)
        return self._fixed_model(row)

    def prefills_draft(self, sequence: Sequence) -> bool:
        return sequence.fixed_draft_length or self.policy.prefills_draft()

    def forget(self, sequence: Sequence) -> None:
        self._rows.pop(sequence, None)

    def _add(self, sequence: Sequence) -> Row:
        temperature = 0.0 if sequence.greedy else sequence.params.temperature
        name = "greedy" if temperature == 0 else "up to 0.8" if temperature <= 0.8 else "above 0.8"
        if sequence.verification == "coupled" and temperature:
            name += ", coupled"
        group = self._groups.setdefault(name, Group(name))
        is_fixed, uses_model = sequence.fixed_draft_length, "draft_model" in sequence.sources
        row = Row(
            sequence,
            group,
            drafts=uses_model and not is_fixed,
            fixed_length=sequence.num_speculative_tokens if is_fixed else 0,
            follows=self.tracks_draft_cache,
        )
        for source in sequence.sources:
            if (proposer := self._lookups.get(source)) is not None:
                always = not proposer.reads or (is_fixed and not sequence.combines)
                row.lookups.append(RowLookup(sequence, group, proposer, always, is_asked=always))
        self._rows[sequence] = row
        return row

    def _choose_model(
        self, drafting: list[Row], decision: Decision, choices: dict[Sequence, DraftChoice]
    ) -> None:
        """What the policy has decided, as far as each row may go."""
        length = decision.length
        if not length:
            return
        exits = {}
        if decision.threshold is not None:
            for row in drafting:
                exits[row.group] = EarlyExit(row.group.confidence.rates(), decision.threshold)
        max_draft_len, follows = self.max_draft_len, self.tracks_draft_cache
        for place, row in enumerate(drafting):
            if decision.scouts is not None and place not in decision.scouts:
                continue
            self._num_decided += length
            sequence = row.sequence
            num_known = len(sequence.token_ids)
            num_tokens = min(
                length,
                sequence.num_speculative_tokens,
                sequence.max_num_tokens - num_known - 1,
                max_draft_len - num_known,
            )
            if num_tokens > 0:
                num_missing = num_known - 1 - sequence.draft_blocks.num_computed_tokens if follows else 0
                choices[sequence] = DraftChoice(
                    "draft_model", num_tokens, max(0, num_missing), exits.get(row.group) if exits else None
                )

    def _fixed_model(self, row: Row) -> DraftChoice:
        """The draft model's part where the length is fixed."""
        sequence = row.sequence
        num_known = len(sequence.token_ids)
        num_tokens = min(
            row.fixed_length, sequence.max_num_tokens - num_known - 1, self.max_draft_len - num_known
        )
        if "draft_model" not in sequence.sources or num_tokens <= 0:
            return NO_DRAFT
        return DraftChoice("draft_model", num_tokens, row.num_missing())

    def _choose_others(
        self, rows: list[Row], num_rows: int, num_drafting: int, choices: dict[Sequence, DraftChoice]
    ) -> None:
        """Fixed lengths, and look-ups that promise more than the draft model."""
        for row in rows:
            if row.fixed_length:
                choices[row.sequence] = self._fixed_model(row)
                self._is_mixed = True
        lookups = [lookup for row in rows for lookup in row.lookups]
        start_some([lookup for lookup in lookups if not lookup.is_asked], self._lookup_budget)
        asked = [lookup for lookup in lookups if lookup.is_asked]
        if not asked:
            return
        read_all(asked)
        found: list[tuple[float, RowLookup, DraftChoice]] = []
        alone = 0.0
        for row in rows:
            best: tuple[float, RowLookup, DraftChoice] | None = None
            for lookup in row.lookups:
                if not lookup.is_asked:
                    continue
                limit = self._lookup_limit(row, lookup)
                if limit <= 0 or not (token_ids := lookup.offer(limit)):
                    lookup.settle(0.0)
                    continue
                if row.fixed_length and not row.sequence.combines:
                    choice = DraftChoice(lookup.proposer.name, len(token_ids), draft_ids=token_ids)
                    best = 1.0, lookup, choice  # whatever it is worth
                    continue
                length = choices[row.sequence].num_tokens
                terms = self._terms_for(row, num_rows, num_drafting, length)
                alone = terms.alone
                model_tokens = row.group.acceptance.expected(length)
                length, saved = lookup.best_length(terms, model_tokens)
                if row.fixed_length:
                    length = len(token_ids) if length else 0
                lookup.settle(saved)
                if length and (best is None or saved > best[0]):
                    choice = DraftChoice(lookup.proposer.name, length, draft_ids=token_ids[:length])
                    best = saved, lookup, choice
            if best is not None:
                found.append(best)
        if not found or self.policy.exploration is not None or sum([one[0] for one in found]) <= alone:
            return
        for _, lookup, choice in found:
            choices[lookup.sequence] = choice
        self._is_mixed = self._drafts_known = True

    @staticmethod
    def _lookup_limit(row: Row, lookup: RowLookup) -> int:
        sequence = row.sequence
        left = sequence.max_num_tokens - len(sequence.token_ids) - 1
        most = row.fixed_length or min(AUTO_LIMITS[lookup.proposer.name], sequence.num_speculative_tokens)
        return min(left, most)

    def _terms_for(self, row: Row, num_rows: int, num_drafting: int, length: int) -> Terms:
        best = self.policy.best
        if best is not self._terms_of:
            self._terms.clear()
            self._terms_of = best
        num_drafting = max(num_drafting, 1) if length else 0
        key = row.group, num_rows, num_drafting, length
        if key not in self._terms:
            rate = self.policy.estimate(num_rows, Counter({row.group: num_drafting}), length).rate
            if best is not None and not row.fixed_length:
                rate = best.active.rate
            self._terms[key] = make_terms(self.costs, rate, num_rows, num_drafting, length)
        return self._terms[key]

    def _num_rounds(self, num_rows: int) -> int:
        """Rounds for which the choice stands, as far as they fit into a step."""
        costs = self.costs
        if costs.step_seconds == 0 or self._drafts_known:
            return 1
        seconds = self._round_seconds.get((num_rows, self._num_chosen))
        if seconds is None:
            if not costs.is_calibrated:
                return 1
            seconds = costs.model_seconds(self.policy.shape)
        return min(self.policy.rounds_left, int(costs.rounds_per_step(seconds)))

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        rounds, rows = result.rounds, plan.rows
        if not self._is_used or not rounds:
            return
        self._learn(rows, rounds)
        for place, part in enumerate(rows):
            row = self._rows.get(part.sequence)
            if row is not None and row.lookups:
                for lookup in row.lookups:
                    if lookup.pending is not None:
                        lookup.judge([token_id for one in rounds for token_id in one.emitted[place]])
        seconds = result.seconds + result.host_seconds
        self._lookup_budget.save(seconds, seconds / len(rounds))
        round_seconds, shape = self._timing(plan, rounds)
        if round_seconds is not None and not self._drafts_known:
            self._round_seconds[len(rows), self._num_chosen] = round_seconds[-1]
        self.policy.observe(
            len(rounds),
            sum([sum(map(len, one.emitted)) for one in rounds]),
            sum([sum(one.num_drafted) for one in rounds]),
            round_seconds,
            result.host_seconds,
            seconds,
            shape,
        )

    def _timing(self, plan: StepPlan, rounds: list[Round]) -> tuple[list[float] | None, Shape | None]:
        """Seconds of rounds that were as planned, if they say something about such rounds; and their shape,
        if that is not what the policy has decided."""
        rows = plan.rows
        if not plan.is_decode_only or len(rows) != len(self._decoding) or len(rows) < len(plan.scheduled):
            return None, None
        round_seconds = [sum(one.seconds) for one in rounds]
        if sum([part.num_catch_up_tokens for part in rows]) > USUAL_MISSING * len(rows):
            del round_seconds[0]
            if not round_seconds:
                return None, None
        if not self._is_mixed:
            drafted = sum([part.num_draft_tokens for part in rows])
            is_as_decided = drafted >= FULL_SHARE * self._num_decided
            return (round_seconds if is_as_decided else None), None
        lengths = [part.num_draft_tokens for part in rows if part.source == "draft_model"]
        sizes = tuple(sum(length > i for length in lengths) for i in range(max(lengths, default=0)))
        if not self.costs.is_calibrated and sizes:
            drafting = sum([one.seconds.draft for one in rounds])
            scoring = sum([one.seconds.score + one.seconds.verify for one in rounds])
            self.costs.observe_passes(drafting / scoring, len(sizes), len(lengths))
        num_drafted = sum([part.num_draft_tokens for part in rows])
        return round_seconds, Shape(len(rows), LOOKUP, num_drafted, sizes)

    def _learn(self, rows: list[ScheduledSequence], rounds: list[Round]) -> None:
        """Verdicts on the draft model. A row that only caught up has drafted nothing, and teaches nothing."""
        places: dict[Group, list[int]] = {}
        for place, part in enumerate(rows):
            if part.num_draft_tokens and part.source == "draft_model":
                row = self._rows.get(part.sequence)
                if row is not None:
                    places.setdefault(row.group, []).append(place)
        for group, members in places.items():
            if rows[members[0]].early_exit is not None:
                _learn_early_exits(group, members, rounds)
                continue
            verdicts: Counter[tuple[int, int]] = Counter()
            for one in rounds:
                drafted, accepted = one.num_drafted, one.num_accepted
                verdicts.update([(drafted[place], accepted[place]) for place in members])
            group.acceptance.learn_all(verdicts)

    def state(self) -> dict[str, object]:
        """For ``GET /speculation``: builtins."""
        groups = self._groups.values()
        sources = {f"draft_model, {group.name}": group.acceptance for group in groups}
        for group in groups:
            for (source, strength), acceptance in sorted(group.lookups.items()):
                sources[f"{source} after {1 << strength >> 1} tokens, {group.name}"] = acceptance
        return {
            "policy": "auto" if self.costs.is_calibrated else "fixed",
            **self.policy.state(),
            "sources": {
                name: acceptance.state() for name, acceptance in sources.items() if acceptance.reached[0]
            },
        }


def _learn_early_exits(group: Group, members: list[int], rounds: list[Round]) -> None:
    """Verdicts on drafts that could end early, of some rows of each round."""
    num_emitted = num_judged = 0
    step = 1 + len(members) * len(rounds) // MAX_EXITS
    for number, one in enumerate(rounds):
        for place in members[number % step :: step]:
            num_drafted, num_accepted = one.num_drafted[place], one.num_accepted[place]
            confidences = one.confidences[place] if one.confidences is not None else None
            group.acceptance.learn(num_drafted, num_accepted)
            num_emitted, num_judged = num_emitted + num_accepted + 1, num_judged + 1
            if confidences:
                refused = group.confidence.learn(confidences, num_drafted, num_accepted)
                if refused is not None:
                    group.acceptance.learn_position(num_drafted, refused)
    if num_judged:
        group.confidence.compare(num_emitted / num_judged)

"""Before a step: who drafts for each decoding sequence, and how much. After it: what came of that.

``Policy`` decides how much the draft model drafts, for all rows alike; ``lookups`` which rows draft something
from known text instead. The planner knows sequences and steps, and puts the two together.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace

from truedraft.engine.core.planning import AUTO_LIMITS, MAX_FORCED, DraftChoice, Lookup
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import Round, ScheduledSequence, StepPlan, StepResult
from truedraft.engine.speculation.costs import MAX_ROUNDS, MIXED, Costs, Shape
from truedraft.engine.speculation.explore import Explorer
from truedraft.engine.speculation.lookups import (
    LookupReport,
    RowLookup,
    Terms,
    free_seconds,
    make_terms,
    read_all,
    start_if_it_pays,
    start_some,
)
from truedraft.engine.speculation.policy import Group, Observed, Plan, Policy

# What a row drafts that drafts nothing: shared, and never changed.
NO_DRAFT = DraftChoice()
# Share of a round that free rows wait for tokens which grammars force on others.
FORCED_SHARE = 0.02


@dataclass(slots=True, eq=False)
class Row:
    """What the planner keeps of a sequence. ``fixed_length`` is 0 where the policy decides."""

    sequence: Sequence
    group: Group
    uses_model: bool
    fixed_length: int
    lookups: list[RowLookup] = field(default_factory=list)


class SpeculationPlanner:
    """``core.planning.Planner``.

    ``lookups`` are the sources that need no model. ``max_draft_len`` is the draft model's context. Without
    ``tracks_draft_cache`` it keeps tables of its own (another tokenizer): what they miss is its own business.
    """

    def __init__(
        self,
        costs: Costs,
        lookups: Sequences[Lookup] = (),
        max_draft_len: int = 0,
        tracks_draft_cache: bool = True,
    ) -> None:
        self.costs = costs
        self.policy = Policy(costs)
        self.max_draft_len = max_draft_len
        self.tracks_draft_cache = tracks_draft_cache
        self.max_rounds = MAX_ROUNDS
        self._sources = {lookup.name: lookup for lookup in lookups}
        self._explorer = Explorer()  # of texts that may repeat themselves
        self._now = 0.0  # seconds of all steps
        self._groups: dict[str, Group] = {}
        self._rows: dict[Sequence, Row] = {}
        self._observed: list[Observed] = []  # since the last replan, like those that have ended
        self._ended: list[Sequence] = []
        self._terms: dict[object, Terms] = {}  # since the last replan
        self._terms_of = 0
        # Of the last choice: sequences that decode; rows that may draft; whether not all drafts are the
        # policy's; whether some are known already; whether they neither look something up nor draft; what is
        # looked up for which row; tokens to draft.
        self._decoding: list[Sequence] = []
        self._chosen: list[Row] = []
        self._is_mixed = self._is_known = self._is_idle = False
        self._asked: list[tuple[Row, RowLookup]] = []
        self._num_chosen = 0
        self._lookup_report = LookupReport()

    @property
    def num_speculative_tokens(self) -> float:
        return self._num_chosen / max(1, len(self._decoding))

    def choose(self, decoding: list[Sequence]) -> dict[Sequence, DraftChoice]:
        choices = dict.fromkeys(decoding, NO_DRAFT)
        if self._is_idle and decoding == self._decoding and not self.policy.is_due():
            return choices  # most steps while drafting is off: the long way would find the same
        num_rows = len(decoding)
        rows = [
            self._rows.get(sequence) or self._add(sequence, num_rows)
            for sequence in decoding
            if sequence.sources
        ]
        self._decoding, self._chosen, self._num_chosen = decoding, rows, 0
        self._is_mixed = self._is_known = self._is_idle = False
        self._asked = []
        self.max_rounds = MAX_ROUNDS
        if not rows:
            self._learn_all()  # nothing is kept of sequences that have ended
            return choices
        self.costs.stored_per_row = sum([len(sequence.token_ids) for sequence in decoding]) / num_rows
        drafting = {row.sequence: row.group for row in rows if row.uses_model and not row.fixed_length}
        if self.policy.is_due():
            self._learn_all()
            idle = [lookup for row in rows for lookup in row.lookups if not lookup.is_asked]
            start_some(idle, self._free_seconds(num_rows), self._explorer, self._now)
        plan = self.policy.choose(
            num_rows, drafting, lambda: [self._num_missing(sequence) for sequence in drafting]
        )
        if plan.length:
            for sequence in drafting if plan.scouts is None else plan.scouts:
                choices[sequence] = self._choice(sequence, plan.length)
        for row in rows:
            if row.fixed_length and row.uses_model:
                choices[row.sequence] = self._choice(row.sequence, row.fixed_length)
                self._is_mixed = True
        self._asked = asked = [
            (row, lookup) for row in rows for lookup in row.lookups if self._is_asked(lookup)
        ]
        if asked:
            self._look_up(asked, plan, choices)
        self._num_chosen = sum([choice.num_tokens for choice in choices.values()])
        if self._is_known or self.costs.step_seconds == 0:
            self.max_rounds = 1  # the next round has other drafts, or rounds do not share steps
        else:
            self.max_rounds = self.policy.max_rounds
        self._is_idle = not (self._num_chosen or asked or self.policy.exploration is not None)
        return choices

    def choose_for_prompt(self, sequence: Sequence) -> DraftChoice:
        if not (sequence.fixed_draft_length and "draft_model" in sequence.sources):
            return NO_DRAFT
        row = self._rows.get(sequence) or self._add(sequence, 1 + len(self._decoding))
        return self._choice(sequence, row.fixed_length)

    def prefills_draft(self, sequence: Sequence) -> bool:
        return sequence.fixed_draft_length or self.policy.expects_drafts

    def forget(self, sequence: Sequence) -> None:
        if sequence in self._rows:
            self._ended.append(sequence)  # its last verdicts are still to be learned

    def _free_seconds(self, num_rows: int) -> float:
        """What asking for a row may take in a step without drafts."""
        return free_seconds(self.costs, Shape(num_rows, 0))

    def _add(self, sequence: Sequence, num_rows: int) -> Row:
        temperature = 0.0 if sequence.greedy else sequence.params.temperature
        name = "greedy" if temperature == 0 else "up to 0.8" if temperature <= 0.8 else "above 0.8"
        if temperature and sequence.verification == "coupled":
            name += ", coupled"
        if sequence.matcher is not None:
            name += ", constrained"
        group = self._groups.setdefault(name, Group(name))
        length = sequence.num_speculative_tokens if sequence.fixed_draft_length else 0
        row = self._rows[sequence] = Row(sequence, group, "draft_model" in sequence.sources, length)
        for name in sequence.sources:
            if (source := self._sources.get(name)) is not None:
                always = not source.reads or (length > 0 and len(sequence.sources) == 1)
                row.lookups.append(lookup := RowLookup(sequence, group, source, always, is_asked=always))
                if not always:
                    start_if_it_pays(lookup, self._free_seconds(num_rows))
        return row

    def _choice(self, sequence: Sequence, length: int) -> DraftChoice:
        """A draft of the draft model, as far as it may go. A round emits one token more than it drafts."""
        num_known = len(sequence.token_ids)
        num_tokens = min(length, sequence.max_num_tokens - num_known - 1, self.max_draft_len - num_known)
        if num_tokens <= 0:
            return NO_DRAFT
        return DraftChoice("draft_model", num_tokens, self._num_missing(sequence))

    def _num_missing(self, sequence: Sequence) -> int:
        """Tokens that the draft model's cache misses, the pending one apart."""
        if not self.tracks_draft_cache:
            return 0
        return max(0, len(sequence.token_ids) - 1 - sequence.draft_blocks.num_computed_tokens)

    def _is_asked(self, lookup: RowLookup) -> bool:
        """Explorations try other drafts; those of forced tokens are accepted in any case, and stay."""
        return lookup.is_asked and (self.policy.exploration is None or lookup.source.name == "grammar")

    def _look_up(
        self, asked: list[tuple[Row, RowLookup]], plan: Plan, choices: dict[Sequence, DraftChoice]
    ) -> None:
        """Drafts from known text, where they promise more than the draft model's: a row's first that does."""
        read_all([lookup for _, lookup in asked])
        num_rows = plan.shape.num_rows
        answered: Row | None = None
        found: list[tuple[Sequence, DraftChoice]] = []
        total, alone = 0.0, 0.0
        has_free = any(sequence.matcher is None for sequence in self._decoding)
        forced_seconds = 0.0
        for row, lookup in asked:
            if row is answered:
                continue
            sequence, length, source = row.sequence, row.fixed_length, lookup.source.name
            limit = length or min(AUTO_LIMITS[source], sequence.num_speculative_tokens)
            limit = min(limit, sequence.max_num_tokens - len(sequence.token_ids) - 1)
            num_model = choices[sequence].num_tokens
            terms = self._terms_for(row, num_rows, num_model, plan)
            if source == "grammar" and has_free:
                most = max(0.0, FORCED_SHARE * terms.usual - forced_seconds)
                limit = min(limit, bisect_right(terms.seconds, most) - 1)
            expected = row.group.acceptance.expected(num_model)
            saved, token_ids = lookup.ask(limit, terms, expected, is_fixed=length > 0)
            if length and len(sequence.sources) == 1 and lookup.pending is not None:
                saved, token_ids = terms.alone, lookup.pending[1]  # whatever it is worth
            if source == "grammar":
                choice = choices[sequence]
                if token_ids:
                    choice = DraftChoice(source, len(token_ids), draft_ids=token_ids)
                choices[sequence] = replace(
                    choice, max_forced=min(limit, MAX_FORCED), num_model_tokens=num_model
                )
                forced_seconds += terms.seconds[limit]
            elif token_ids:
                found.append((sequence, DraftChoice(source, len(token_ids), draft_ids=token_ids)))
                total, alone = total + saved, terms.alone
            if token_ids:
                answered = row
        if found and total >= alone:
            choices.update(found)
            self._is_mixed = self._is_known = True

    def _terms_for(self, row: Row, num_rows: int, length: int, plan: Plan) -> Terms:
        """``length`` tokens of the draft model are what the row would draft otherwise; the others' are those
        of ``plan``, if it drafts none."""
        if self._terms_of != self.policy.num_replans:
            self._terms.clear()
            self._terms_of = self.policy.num_replans
        key = row.group, num_rows, length, plan.length
        if key not in self._terms:
            if length or not plan.length:
                num_drafting = sum([row.uses_model for row in self._chosen]) if length else 0
                plan = self.policy.fixed(num_rows, Counter({row.group: num_drafting}), length)
            self._terms[key] = make_terms(self.costs, plan, max(AUTO_LIMITS.values()), drafts=length > 0)
        return self._terms[key]

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Verdicts and times are kept and learned at the next replan, all together: between two passes
        Python is several times slower than in a loop."""
        rounds, rows = result.rounds, plan.rows
        if not self._chosen or not rounds:
            return
        if self._asked:
            self._judge(rows, rounds)
        is_timed = plan.is_decode_only and len(rows) == len(self._decoding)
        assert self.policy.best is not None
        option = MIXED if self._is_mixed else self.policy.plan.shape.option
        self._observed.append(
            Observed(plan, result, is_timed, option, self.policy.best, self.policy.exploration)
        )
        seconds = result.seconds
        self._now += seconds
        self.policy.observe(len(rounds), seconds + result.host_seconds)

    def _learn_all(self) -> None:
        """What has been observed since the last replan."""
        for step in self._observed:
            first, later = None, list[float]()
            if step.is_timed:
                first, *later = [sum(one.seconds) for one in step.result.rounds]
                rows = step.plan.rows
                if sum([part.num_catch_up_tokens for part in rows]) > 2 * len(rows):
                    first = None  # more than the token that an accepted draft leaves behind
            self.policy.learn(step, self._learn(step), first, later)
        self._observed.clear()
        for sequence in self._ended:
            self._rows.pop(sequence, None)
        self._ended.clear()

    def _learn(self, step: Observed) -> Shape:
        """Verdicts on the draft model; returns the rounds' shape as they were planned, with the drafts that
        were forced in them. A row that only caught up has drafted nothing, and teaches nothing."""
        rows, rounds, option = step.plan.rows, step.result.rounds, step.option
        if not any(part.max_num_drafts for part in rows):
            return Shape(len(rows), option)
        drafting: list[tuple[int, float]] = []  # tokens of the draft model, and in which share of the rounds
        num_known = 0.0
        verdicts: dict[Group, Counter[tuple[int, int]]] = {}
        for place, part in enumerate(rows):
            drafts = [(one.num_drafted[place], one.num_accepted[place]) for one in rounds]
            by_model = drafts if part.source == "draft_model" else []
            if rounds[0].sources is not None:
                by_model = [
                    draft
                    for draft, one in zip(drafts, rounds, strict=True)
                    if one.source(place, part) == "draft_model"
                ]
            if len(by_model) < len(drafts):
                known = sum([num for num, _ in drafts]) - sum([num for num, _ in by_model])
                num_known += known / len(rounds)
            drafting.append((part.model_tokens, len(by_model) / len(rounds)))
            if part.model_tokens and (row := self._rows.get(part.sequence)) is not None:
                verdicts.setdefault(row.group, Counter()).update(by_model)
        for group, counts in verdicts.items():
            group.acceptance.learn_all(counts)
        longest = max([length for length, _ in drafting])
        sizes = [sum([share for length, share in drafting if length > i]) for i in range(longest)]
        return Shape(len(rows), MIXED if num_known else option, sum(sizes) + num_known, tuple(sizes))

    def _judge(self, rows: list[ScheduledSequence], rounds: list[Round]) -> None:
        """Verdicts on what look-ups have offered."""
        offered = drafted = accepted = 0
        for place, part in enumerate(rows):
            row = self._rows.get(part.sequence)
            for lookup in row.lookups if row is not None else ():
                if lookup.pending is not None:
                    lookup.judge([token_id for one in rounds for token_id in one.emitted[place]])
                    offered += 1
            if part.draft_ids:
                drafted += rounds[0].num_drafted[place]
                accepted += rounds[0].num_accepted[place]
        self._lookup_report.add(len(self._asked), offered, drafted, accepted)

    def state(self) -> dict[str, object]:
        self._learn_all()
        sources = {f"draft_model, {group.name}": group.acceptance for group in self._groups.values()}
        for group in self._groups.values():
            for (source, strength), acceptance in sorted(group.lookups.items()):
                sources[f"{source} after {1 << strength >> 1} tokens, {group.name}"] = acceptance
        state: dict[str, object] = {"policy": "fixed"}
        if self.costs.is_calibrated:
            state = {"policy": "auto", **self.policy.state()}
            best = self.policy.best
            if best is not None and not best.groups:
                lookups = [lookup for row in self._chosen for lookup in row.lookups]
                free = self._free_seconds(best.plain.shape.num_rows)
                state["on"], state["why"] = self._lookup_report.is_on_and_why(lookups, free)
        rates = {name: acceptance.state() for name, acceptance in sources.items()}
        return {**state, "sources": {name: known for name, known in rates.items() if known}}

"""Chooses before a step who drafts for each sequence, and how much; learns after it what came of that.

``Policy`` decides how much the draft model drafts, for all rows alike; ``lookups`` which rows draft something
from known text instead. The planner knows sequences and steps, and puts the two together.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from truedraft.engine.core.planning import (
    MAX_FORCED,
    KeepingLookup,
    Lookup,
    ReadingLookup,
    StepChoice,
)
from truedraft.engine.core.proposer import Proposer
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import (
    AUTO_LIMITS,
    NO_DRAFT,
    DraftChoice,
    Known,
    Round,
    ScheduledSequence,
    StepPlan,
    StepResult,
    auto_limit,
)
from truedraft.engine.messages import Source
from truedraft.engine.speculation.acceptance import Acceptance, Group
from truedraft.engine.speculation.costs import MAX_ROUNDS, MIXED, Costs, Shape
from truedraft.engine.speculation.lookups import (
    LookupReport,
    Offer,
    RowLookup,
    Terms,
    free_seconds,
    make_terms,
    read_all,
    start_if_it_pays,
    start_some,
)
from truedraft.engine.speculation.policy import Batch, Choice, Explorer, Policy, Timing

# Share of a round that free rows wait for tokens which grammars force on others.
FORCED_SHARE = 0.02


@dataclass(slots=True, eq=False)
class Row:
    """Holds what the planner keeps of a sequence. ``fixed_length`` is 0 where the policy decides."""

    sequence: Sequence
    group: Group
    proposers: tuple[str, ...]  # one of them drafts in a round
    fixed_length: int
    lookups: list[RowLookup] = field(default_factory=list)

    @property
    def is_exclusive(self) -> bool:
        """Tells whether the request names one source and one length: it is drafted whatever that brings."""
        return self.fixed_length > 0 and len(self.sequence.sources) == 1

    def limit(self, source: Source) -> int:
        """Returns the most tokens that a look-up may draft now."""
        sequence = self.sequence
        limit = self.fixed_length or min(auto_limit(source), sequence.num_speculative_tokens)
        return min(limit, sequence.max_num_tokens - len(sequence.token_ids) - 1)


@dataclass(slots=True)
class Option:
    """Holds what was chosen for a step: it travels in the step's plan, and comes back to be learned from.

    ``rows`` may draft, among those of ``drafts``; ``choice`` is the policy's. ``is_mixed``: not all drafts
    are the policy's. ``is_known``: some came from look-ups, whose next ones are other ones. ``num_asked``
    look-ups were asked, and have made ``offers``.
    """

    rows: list[Row]
    drafts: dict[Sequence, DraftChoice]
    choice: Choice
    is_mixed: bool = False
    is_known: bool = False
    num_asked: int = 0
    offers: dict[Sequence, list[Offer]] = field(default_factory=dict)

    @property
    def costs_as(self) -> int:
        """Returns the option of which the step's rounds tell the costs."""
        return MIXED if self.is_mixed else self.choice.plan.shape.option


class Observed(NamedTuple):
    """Keeps a step that is still to be learned from."""

    option: Option
    plan: StepPlan
    result: StepResult
    experts: float | None = None  # the number that a layer of the target read in a pass


@dataclass(slots=True)
class Findings:
    """Collects what the look-ups of a step come to. ``drafts`` of known text save ``saved`` seconds together;
    they want a round for themselves, which takes ``alone`` seconds longer than one among others.

    Tokens that grammars force take ``forced_seconds`` of every round, for which ``has_free`` rows wait.
    """

    has_free: bool
    forced_seconds: float = 0.0
    drafts: dict[Sequence, DraftChoice] = field(default_factory=dict)
    saved: float = 0.0
    alone: float = 0.0

    def force(self, limit: int, terms: Terms) -> int:
        """Returns how many tokens one more row may be forced to draft, and counts them."""
        if self.has_free:
            most = max(0.0, FORCED_SHARE * terms.usual - self.forced_seconds)
            limit = min(limit, bisect_right(terms.seconds, most) - 1)
        self.forced_seconds += terms.seconds[limit]
        return limit


class SpeculationPlanner:
    """Implements ``core.planning.Planner``.

    ``lookups`` are the sources that need no model; ``proposers`` draft with one: the first of them does.
    ``is_fixed``: the settings name a length.
    """

    def __init__(
        self,
        costs: Costs,
        lookups: Sequences[Lookup] = (),
        proposers: Sequences[Proposer] = (),
        is_fixed: bool = False,
    ) -> None:
        self.costs = costs
        self.is_fixed = is_fixed
        self.policy = Policy(costs)
        self.proposers = {proposer.name: proposer for proposer in proposers}
        self._followers = [proposer.name for proposer in proposers if proposer.lets_go]
        self._sources: dict[str, Lookup] = {lookup.name: lookup for lookup in lookups}
        self._keepers = [lookup for lookup in lookups if isinstance(lookup, KeepingLookup)]
        self._explorer = Explorer()  # its options are texts that may repeat themselves
        self._now = 0.0  # seconds of all steps
        self._groups: dict[str, Group] = {}
        self._rows: dict[Sequence, Row] = {}
        self._observed: list[Observed] = []  # since the last replan, like those that have ended
        self._ended: list[Sequence] = []
        self._terms: dict[object, Terms] = {}  # since the last replan
        self._terms_of = 0
        self._lookup_report = LookupReport()
        # The last choice is kept: most steps while drafting is off would find the same.
        self._decoding: list[Sequence] = []
        self._last = StepChoice({})
        self._option: Option | None = None
        self._num_chosen = 0

    @property
    def num_speculative_tokens(self) -> float:
        return self._num_chosen / max(1, len(self._decoding))

    def choose(self, decoding: list[Sequence]) -> StepChoice:
        if decoding == self._decoding and self._stays():
            return self._last
        num_rows = len(decoding)
        rows = [
            self._rows.get(sequence) or self._add(sequence, num_rows)
            for sequence in decoding
            if sequence.sources
        ]
        self._decoding = decoding
        if rows:
            self._last = self._choose(rows)
        else:
            self._learn_all()  # nothing is kept of sequences that have ended
            self._option, self._last = None, StepChoice(dict.fromkeys(decoding, NO_DRAFT), MAX_ROUNDS)
        self._num_chosen = sum([draft.num_first_drafts for draft in self._last.drafts.values()])
        return self._last

    def _stays(self) -> bool:
        """Tells whether the last choice holds for the same sequences, as it neither drafts nor asks."""
        if (option := self._option) is None or self.policy.is_due():
            return False
        return not (self._num_chosen or option.num_asked or option.choice.exploration)

    def _choose(self, rows: list[Row]) -> StepChoice:
        num_rows = len(self._decoding)
        self.costs.stored_per_row = sum([len(sequence.token_ids) for sequence in self._decoding]) / num_rows
        if self.policy.is_due():
            self._learn_all()
            idle = [lookup for row in rows for lookup in row.lookups if not lookup.is_asked]
            start_some(idle, self._free_seconds(num_rows), self._explorer, self._now)
        batch = self._batch(rows)
        drafts = dict.fromkeys(self._decoding, NO_DRAFT)
        self._option = option = Option(rows, drafts, self.policy.choose(batch))
        self._draft_with_model(option)
        self._look_up(option)
        max_rounds = self.policy.max_rounds
        if option.is_known or self.costs.step_seconds == 0:
            max_rounds = 1  # the next round has other drafts, or rounds do not share steps
        return StepChoice(drafts, max_rounds, option)

    def _batch(self, rows: list[Row]) -> Batch:
        """Returns what the policy decides about: rows whose length is open, by their proposers."""
        open_rows = [row for row in rows if not row.fixed_length]
        by_source = {
            name: {row.sequence: row.group for row in open_rows if name in row.proposers}
            for name in self.proposers
        }
        followed = {
            name: [sequence for sequence in rows if sequence.is_followed_by(name)]
            for name, rows in by_source.items()
        }

        def missing(source: str) -> list[int]:
            return [self.proposers[source].num_missing(sequence) for sequence in followed[source]]

        return Batch(len(self._decoding), by_source, followed, missing)

    def _draft_with_model(self, option: Option) -> None:
        plan, drafting = option.choice.plan, option.choice.drafting
        if plan.length:
            for sequence in drafting:
                option.drafts[sequence] = self._draft(sequence, plan.source, plan.length)
        for row in option.rows:
            if row.fixed_length and row.proposers:
                source = self._best_source(row, row.proposers, len(option.drafts))
                option.drafts[row.sequence] = self._draft(row.sequence, source, row.fixed_length)
                option.is_mixed = True

    def _best_source(self, row: Row, sources: Sequences[str], num_rows: int) -> str:
        """Returns the proposer that promises most for a row whose length is fixed."""
        if len(sources) == 1:
            return sources[0]
        group = Counter({row.group: num_rows})
        plans = [self.policy.fixed(num_rows, group, source, row.fixed_length) for source in sources]
        return max(plans, key=lambda plan: plan.rate).source

    def choose_for_prompt(self, sequence: Sequence) -> DraftChoice:
        if not sequence.fixed_draft_length:
            return NO_DRAFT
        num_rows = 1 + len(self._decoding)
        row = self._rows.get(sequence) or self._add(sequence, num_rows)
        # Who cannot lag has seen nothing of the sequence yet.
        sources = [source for source in row.proposers if self.proposers[source].can_lag]
        if not sources:
            return NO_DRAFT
        return self._draft(sequence, self._best_source(row, sources, num_rows), row.fixed_length)

    def lagging(self, sequence: Sequence) -> list[str]:
        if sequence.fixed_draft_length:
            return []
        return [source for source in self.proposers if not self._keeps_up(source, sequence)]

    def _keeps_up(self, source: str, sequence: Sequence) -> bool:
        if source in self._followers:
            return self.policy.wants(source) or sequence.insists_on(source)
        return self.policy.expects(source)

    def forget(self, sequence: Sequence) -> None:
        if sequence in self._rows:
            self._ended.append(sequence)  # its last verdicts are still to be learned
            if sequence.finish_reason is not None:
                for lookup in self._keepers:
                    if lookup.name in sequence.sources:
                        lookup.keep(sequence)

    def forget_texts(self) -> None:
        for lookup in self._keepers:
            lookup.forget_texts()

    def _free_seconds(self, num_rows: int) -> float:
        """Returns what asking for a row may take in a step without drafts."""
        return free_seconds(self.costs, Shape(num_rows, 0))

    def _add(self, sequence: Sequence, num_rows: int) -> Row:
        name = group_name(sequence)
        group = self._groups.setdefault(name, Group(name))
        length = sequence.num_speculative_tokens if sequence.fixed_draft_length else 0
        proposers = tuple([source for source in sequence.sources if source in self.proposers])
        row = self._rows[sequence] = Row(sequence, group, proposers, length)
        for source_name in sequence.sources:
            if (source := self._sources.get(source_name)) is not None:
                always = row.is_exclusive or not isinstance(source, ReadingLookup)
                row.lookups.append(lookup := RowLookup(sequence, group, source, always, is_asked=always))
                if not always:
                    start_if_it_pays(lookup, self._free_seconds(num_rows))
        return row

    def _draft(self, sequence: Sequence, source: str, length: int) -> DraftChoice:
        """Returns a draft of a proposer, as far as it may go: a round emits one token more."""
        proposer = self.proposers[source]
        room = min(sequence.max_num_tokens - 1, proposer.max_len) - len(sequence.token_ids)
        num_tokens = min(length, room)
        if num_tokens <= 0:
            return NO_DRAFT
        return DraftChoice(source, num_tokens, proposer.num_missing(sequence))

    def _look_up(self, option: Option) -> None:
        """Drafts from known text what promises more than the draft model's: a row's first that does."""
        # Explorations try other drafts, but forced tokens, which are accepted in any case, stay.
        exploring = option.choice.exploration is not None
        asked = [
            (row, lookups)
            for row in option.rows
            if (lookups := [one for one in row.lookups if one.is_asked and (one.in_round or not exploring)])
        ]
        if not asked:
            return
        option.num_asked = sum([len(lookups) for _, lookups in asked])
        read_all([lookup for _, lookups in asked for lookup in lookups])
        findings = Findings(has_free=any(sequence.matcher is None for sequence in option.drafts))
        for row, lookups in asked:
            self._look_up_for(row, lookups, option, findings)
        if findings.drafts and findings.saved >= findings.alone:
            option.drafts.update(findings.drafts)
            option.is_mixed = option.is_known = True

    def _look_up_for(self, row: Row, lookups: list[RowLookup], option: Option, findings: Findings) -> None:
        """Asks one look-up after the other, until one has a draft that pays."""
        sequence, draft = row.sequence, option.drafts[row.sequence]
        length = draft.num_tokens
        terms = self._terms_for(row, draft.source, length, option)
        expected = row.group.acceptance(draft.source).expected(length) if length else 0.0
        for lookup in lookups:
            limit = row.limit(lookup.source.name)
            if lookup.in_round is not None:
                limit = findings.force(limit, terms)
            offer = lookup.ask(limit, terms, expected, is_fixed=row.fixed_length > 0)
            known, saved = None, 0.0
            if offer is not None:
                option.offers.setdefault(sequence, []).append(offer)
                token_ids, saved = (offer.token_ids, terms.alone) if row.is_exclusive else offer.worth
                known = Known(lookup.source.name, token_ids) if token_ids else None
            if lookup.in_round is not None:
                in_round = lookup.in_round.in_round(sequence, min(limit, MAX_FORCED))
                num_missing = 0 if known else draft.num_missing  # the model does not draft at first
                option.drafts[sequence] = replace(
                    draft, num_missing=num_missing, known=known, in_round=in_round
                )
            elif known is not None:
                findings.drafts[sequence] = DraftChoice(known=known)
                findings.saved, findings.alone = findings.saved + saved, terms.alone
            if known is not None:
                return

    def _terms_for(self, row: Row, source: str, length: int, option: Option) -> Terms:
        """Returns the terms of a row for which ``source`` would draft ``length`` tokens otherwise; the
        others' drafts are those of the policy's plan, if the row has none."""
        if self._terms_of != self.policy.num_replans:
            self._terms.clear()
            self._terms_of = self.policy.num_replans
        plan, num_rows = option.choice.plan, len(option.drafts)
        key = row.group, num_rows, source, length, plan.source, plan.length
        if key not in self._terms:
            if length or not plan.length:
                num_drafting = sum([source in row.proposers for row in option.rows]) if length else 0
                plan = self.policy.fixed(num_rows, Counter({row.group: num_drafting}), source, length)
            self._terms[key] = make_terms(self.costs, plan, max(AUTO_LIMITS.values()), drafts=length > 0)
        return self._terms[key]

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Keeps verdicts and times, to be learned at the next replan, all together: between two passes Python
        is several times slower than in a loop."""
        routing, option = self.costs.routing, plan.option
        experts = None if routing is None else routing.take()
        if option is None or not result.rounds:
            return
        assert isinstance(option, Option)
        if option.num_asked:
            self._judge(option, plan.rows, result.rounds)
        self._observed.append(Observed(option, plan, result, experts))
        self._now += result.seconds
        self.policy.observe(len(result.rounds), result.seconds + result.host_seconds)

    def _learn_all(self) -> None:
        """Learns from what has been observed since the last replan."""
        for step in self._observed:
            shape = self._learn_verdicts(step)
            if self.costs.routing is not None and step.experts is not None and step.plan.is_decode_only:
                self.costs.routing.observe(shape.num_rows, shape.num_drafted, step.experts)
            self.policy.learn(step.option.choice, step.plan, step.result, timing(step, shape))
        self._observed.clear()
        for sequence in self._ended:
            self._rows.pop(sequence, None)
        self._ended.clear()

    def _learn_verdicts(self, step: Observed) -> Shape:
        """Learns from verdicts on proposers; returns the rounds' shape as they were planned, with the drafts
        that were forced in them. A row that only caught up has drafted nothing and teaches nothing."""
        rows, rounds, costs_as = step.plan.rows, step.result.rounds, step.option.costs_as
        if not any(part.draft.max_num_drafts for part in rows):
            return self._plain_shape(step)
        drafting: list[tuple[int, float]] = []  # tokens of a proposer, and in which share of the rounds
        num_known = 0.0
        verdicts: dict[tuple[Group, str], Counter[tuple[int, int]]] = {}
        for place, part in enumerate(rows):
            length = part.draft.num_tokens
            by_model, num_others = by_proposer(place, part, rounds)
            num_known += num_others / len(rounds)
            drafting.append((length, len(by_model) / len(rounds)))
            if length and (row := self._rows.get(part.sequence)) is not None:
                verdicts.setdefault((row.group, part.draft.source), Counter()).update(by_model)
        for (group, source), counts in verdicts.items():
            group.acceptance(source).learn_all(counts)
        longest = max([length for length, _ in drafting], default=0)
        sizes = [sum([share for length, share in drafting if length > i]) for i in range(longest)]
        option = MIXED if num_known else costs_as
        # Where several proposers draft, which only rows with fixed lengths do, all passes count as one's.
        sources = [part.draft.source for part in rows if part.draft.num_tokens]
        source = step.option.choice.plan.source or next(iter(sources), "")
        return Shape(len(rows), option, sum(sizes) + num_known, tuple(sizes), source)

    def _plain_shape(self, step: Observed) -> Shape:
        """Returns the shape of rounds without drafts, in which a proposer may have followed rows."""
        rows, source = step.plan.rows, step.option.choice.plan.source
        told = {name: sum([part.sequence.is_followed_by(name) for part in rows]) for name in self._followers}
        source = max(told, key=told.__getitem__, default=source)
        return Shape(len(rows), step.option.costs_as, source=source, num_told=told.get(source, 0))

    def _judge(self, option: Option, rows: list[ScheduledSequence], rounds: list[Round]) -> None:
        """Learns from the verdicts on what look-ups have offered."""
        offered = drafted = accepted = 0
        for place, part in enumerate(rows):
            offers = option.offers.get(part.sequence, ())
            offered += len(offers)
            for offer in offers:
                offer.judge([token_id for one in rounds for token_id in one.emitted[place]])
            if part.draft.known:
                drafted += rounds[0].num_drafted[place]
                accepted += rounds[0].num_accepted[place]
        self._lookup_report.add(option.num_asked, offered, drafted, accepted)

    def state(self) -> dict[str, object]:
        self._learn_all()
        sources: dict[str, Acceptance] = {}
        for group in self._groups.values():
            for source, acceptance in group.acceptances.items():
                sources[f"{source}, {group.name}"] = acceptance
        for group in self._groups.values():
            for (source, strength), acceptance in sorted(group.lookups.items()):
                sources[f"{source} after {1 << strength >> 1} tokens, {group.name}"] = acceptance
        state: dict[str, object] = {"policy": "fixed"}
        if not self.is_fixed:
            state = {"policy": "auto", **self.policy.state()}
            last = self.policy.last
            if last is not None and not last.best.may_draft:
                rows = [] if self._option is None else self._option.rows
                lookups = [lookup for row in rows for lookup in row.lookups]
                free = self._free_seconds(last.best.plain.shape.num_rows)
                state["on"], state["why"] = self._lookup_report.is_on_and_why(lookups, free)
        rates = {name: acceptance.state() for name, acceptance in sources.items()}
        return {**state, "sources": {name: known for name, known in rates.items() if known}}


def group_name(sequence: Sequence) -> str:
    """Returns the name of the sequences that are expected to be drafted for alike."""
    temperature = 0.0 if sequence.greedy else sequence.params.temperature
    name = "greedy" if temperature == 0 else "up to 0.8" if temperature <= 0.8 else "above 0.8"
    if temperature and sequence.verification == "coupled":
        name += ", coupled"
    if sequence.drafts_greedily != sequence.greedy:
        name += ", greedy drafts" if sequence.drafts_greedily else ", random drafts"
    if sequence.matcher is not None:
        name += ", constrained"
    return name


def timing(step: Observed, shape: Shape) -> Timing:
    """Returns what a step says about the seconds of rounds of ``shape``: nothing unless it is of its rows
    alone."""
    rows = step.plan.rows
    if not step.plan.is_decode_only or len(rows) != len(step.option.drafts):
        return Timing(shape, None, [])
    first, *later = [sum(one.seconds) for one in step.result.rounds]
    if sum([part.num_catch_up_tokens for part in rows]) > 2 * len(rows):
        return Timing(shape, None, later)  # more than the token that an accepted draft leaves behind
    return Timing(shape, first, later)


def by_proposer(
    place: int, part: ScheduledSequence, rounds: list[Round]
) -> tuple[list[tuple[int, int]], int]:
    """Returns a row's verdicts (drafted, accepted) of the rounds in which its proposer drafted for it, and
    how many tokens other sources drafted in the others."""
    verdicts, num_others = [], 0
    for one in rounds:
        if one.source(place, part) == part.draft.source:
            verdicts.append((one.num_drafted[place], one.num_accepted[place]))
        else:
            num_others += one.num_drafted[place]
    return verdicts, num_others

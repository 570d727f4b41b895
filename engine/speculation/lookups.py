"""Decides which rows look something up in known text, and whether what they find is drafted.

Looking up takes Python time for every token of a row. Where that is less than ``ASK_SHARE`` of the row's
rounds, as for all but small models, n-grams are read and asked whatever they bring: a text may begin to
repeat itself at any place. Elsewhere they are where it pays. Rows and groups have a balance in seconds: what
drafts after a match are expected to save, less what reading and asking takes beyond that share. A row is
asked as long as its balance is positive; others start as long as their group's is, and else a small share of
the time goes to one of them now and then. A prediction is free: it is always asked.

Whatever is offered is compared with the tokens that follow, drafted or not: a sampled token equals the
offered one with the probability with which a draft of it is accepted. So no round is spent on offers that do
not pay.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from truedraft.engine.core import sequence as core
from truedraft.engine.core.planning import InRoundLookup, Lookup, ReadingLookup
from truedraft.engine.speculation.acceptance import Acceptance, Group
from truedraft.engine.speculation.costs import MIXED, Costs, Shape
from truedraft.engine.speculation.policy import OPTION_SHARE, Explorer, Plan

# Python seconds of reading a token, and of asking once, about.
READ_SECONDS, ASK_SECONDS = 5e-6, 5e-5
# Share of its rounds that looking something up for a row may take, whatever it brings, and the rounds for
# which a text is read.
ASK_SHARE, ASK_ROUNDS = 0.01, 64
# Tokens that all rows together read in a step, about ten milliseconds: a prompt may be long.
MAX_READ = 2048
# Balance that a row starts with, in tokens to read, and the most that one can have.
START_BALANCE, MAX_BALANCE = 96, 1024
# Decay per step of the sums that are reported, and what sources are called there.
REPORT_DECAY = 0.98
NAMES = {"ngram": "n-grams", "prediction": "predictions", "grammar": "grammars"}
# Strengths of a match: the number of bits of its length, up to this one (16 tokens and more).
MAX_STRENGTH = 5


class Terms(NamedTuple):
    """Holds what a draft from known text is measured by: the ``rate`` without it, in tokens per second; the
    seconds of a round, ``usual``, and those that a draft of each length adds; what a round adds that is
    ``alone`` in its step; and the seconds of a step that asking for a row may take for nothing, ``free``."""

    rate: float
    usual: float
    seconds: list[float]
    alone: float
    free: float


def make_terms(costs: Costs, plan: Plan, longest: int, drafts: bool) -> Terms:
    """Returns the terms of a row in a batch that drafts as in ``plan``, itself only if it ``drafts``."""
    num_rows, num_drafted, sizes = plan.shape.num_rows, plan.shape.num_drafted, plan.shape.draft_sizes
    mixed = plan.shape._replace(option=MIXED)
    before = costs.model_seconds(mixed)
    if drafts:
        num_drafted, sizes = num_drafted - plan.length, tuple(size - 1 for size in sizes)
    seconds = [
        costs.model_seconds(mixed._replace(num_drafted=num_drafted + length, draft_sizes=sizes)) - before
        for length in range(longest + 1)
    ]
    rounds = costs.rounds_per_step(costs.model_seconds(plan.shape), num_rows)
    alone = costs.overhead(num_rows) * (1 - 1 / rounds)
    return Terms(plan.rate, before, seconds, alone, free_seconds(costs, plan.shape))


def free_seconds(costs: Costs, shape: Shape) -> float:
    """Returns what asking for a row may take in a step of rounds of ``shape``, whatever it brings."""
    rounds = costs.rounds_per_step(costs.model_seconds(shape), shape.num_rows)
    return ASK_SHARE * rounds * costs.seconds(shape) / shape.num_rows


class Offer(NamedTuple):
    """Holds what a source has found for a row: ``token_ids``, of which the first ``num_worth`` are to be
    drafted, as that saves the most seconds, ``saved``. ``acceptance`` is that of matches as strong."""

    acceptance: Acceptance
    token_ids: list[int]
    num_worth: int
    saved: float

    @property
    def worth(self) -> tuple[list[int], float]:
        """Returns the tokens that are to be drafted, and the seconds that this saves."""
        return self.token_ids[: self.num_worth], self.saved

    def judge(self, emitted: Sequence[int]) -> None:
        """Compares what was offered with what followed, drafted or not."""
        equal = [offered == token_id for offered, token_id in zip(self.token_ids, emitted, strict=False)]
        num_accepted = equal.index(False) if False in equal else len(equal)
        for table in (self.acceptance, self.acceptance.group):
            if table is not None:
                table.learn(len(equal), num_accepted)


@dataclass(slots=True, eq=False)
class RowLookup:
    """Follows one sequence in one source. ``always``: it is asked whatever that brings."""

    sequence: core.Sequence
    group: Group
    source: Lookup
    always: bool
    is_asked: bool
    balance: float = 0.0
    length: int = 0  # the text's, when it was last asked
    retry_at: int = 0  # length of the text from which on it may start
    wait: int = START_BALANCE  # tokens from a stop to the next start
    reader: ReadingLookup | None = field(init=False)  # the source, if it reads
    in_round: InRoundLookup | None = field(init=False)  # the source, if it follows the rounds of a step
    _tables: dict[tuple[str, int], Acceptance] = field(default_factory=dict)  # keys: where, strength

    def __post_init__(self) -> None:
        self.reader = self.source if isinstance(self.source, ReadingLookup) else None
        self.in_round = self.source if isinstance(self.source, InRoundLookup) else None

    @property
    def num_unread(self) -> int:
        """Returns how many tokens the source has yet to read of the sequence."""
        return 0 if self.reader is None else self.reader.num_unread(self.sequence)

    def start(self) -> float:
        """Is asked from now on; returns the seconds that it takes to find out whether that pays."""
        self.is_asked, self.balance = True, START_BALANCE * READ_SECONDS
        self.length = len(self.sequence.token_ids)
        return (self.num_unread + START_BALANCE) * READ_SECONDS

    def costs_little(self, free: float) -> bool:
        """Tells whether asking takes less in a step than is ``free``, with what is to be read first."""
        return ASK_SECONDS + READ_SECONDS * (1 + self.num_unread / ASK_ROUNDS) <= free

    def ask(self, limit: int, terms: Terms, model_tokens: float, is_fixed: bool) -> Offer | None:
        """Returns what the source has found, judged against the draft model's ``model_tokens`` (expected to
        be accepted); None if it has found nothing."""
        match_length, token_ids, where = self.source.offers(self.sequence, limit)
        if self.sequence.matcher is not None:
            token_ids = self.sequence.matcher.allowed(token_ids)
        offer = None
        if token_ids:
            acceptance = self._table(where, min(match_length.bit_length(), MAX_STRENGTH))
            saved, best = 0.0, 0
            for length in range(len(token_ids) if is_fixed else 1, len(token_ids) + 1):
                gain = acceptance.expected(length) - model_tokens
                if (net := gain / terms.rate - terms.seconds[length]) > saved:
                    saved, best = net, length
            offer = Offer(acceptance, token_ids, best, saved)
        if not self.always:
            self._settle(0.0 if offer is None else offer.saved, terms.free)
        return offer

    def _table(self, where: str, strength: int) -> Acceptance:
        if (where, strength) not in self._tables:
            name = f"{self.source.name} of {where}" if where else self.source.name
            group = self.group.lookups.setdefault((name, strength), Acceptance())
            self._tables[where, strength] = Acceptance(group)
        return self._tables[where, strength]

    def _settle(self, saved: float, free: float) -> None:
        """Counts what asking has saved in this step, and cost beyond what is ``free``."""
        length = len(self.sequence.token_ids)
        value = saved - max(0.0, ASK_SECONDS + READ_SECONDS * (length - self.length) - free)
        self.length = length
        self.balance = min(self.balance + value, MAX_BALANCE * READ_SECONDS)
        _charge(self.group, -value)
        if self.balance < 0:
            self.is_asked, self.retry_at, self.wait = False, length + self.wait, 2 * self.wait


@dataclass(slots=True)
class LookupReport:
    """Sums up what looking up has come to lately, in decaying sums: rows that were asked, those that had
    something to offer, tokens drafted of that and accepted."""

    asked: float = 0.0
    offered: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0

    def add(self, asked: int, offered: int, drafted: int, accepted: int) -> None:
        self.asked = REPORT_DECAY * self.asked + asked
        self.offered = REPORT_DECAY * self.offered + offered
        self.drafted = REPORT_DECAY * self.drafted + drafted
        self.accepted = REPORT_DECAY * self.accepted + accepted

    def is_on_and_why(self, lookups: Sequence[RowLookup], free: float) -> tuple[bool, str]:
        """Says whether the ``lookups`` of the last step draft, and what decides that, in a sentence."""
        names = " and ".join(sorted({NAMES[lookup.source.name] for lookup in lookups}))
        if not names:
            return False, "off: no row may draft"
        without = "off: no row drafts with a draft model, and"
        if not any(lookup.is_asked for lookup in lookups):
            return False, (
                f"{without} looking up {names} takes {1000 * ASK_SECONDS:.2g} ms, more than the "
                f"{1000 * free:.2g} ms that it may take for each row of a step where it brings nothing"
            )
        if self.offered < 0.01 * self.asked:
            return False, f"{without} {names} find nothing: the texts do not repeat themselves"
        if self.drafted < 0.01 * self.asked:
            return False, (
                f"{without} what {names} find in {self.offered / self.asked:.0%} of the steps would be "
                "accepted too seldom to pay"
            )
        return True, (
            f"on: {names} draft {self.drafted / self.asked:.2g} tokens for each row of a step, of which "
            f"{self.accepted / self.drafted:.0%} are accepted"
        )


def start_if_it_pays(lookup: RowLookup, free: float) -> bool:
    """Starts what is idle if it costs little or its group's balance allows it; tells whether it did."""
    if lookup.costs_little(free):
        lookup.start()
        return True
    if lookup.group.lookup_balance <= 0 or lookup.retry_at > len(lookup.sequence.token_ids):
        return False
    _charge(lookup.group, lookup.start())
    return True


def start_some(idle: Iterable[RowLookup], free: float, explorer: Explorer, now: float) -> None:
    """Starts at a replan all that cost little or whose group pays, and one now and then to explore."""
    for lookup in idle:
        if start_if_it_pays(lookup, free) or lookup.retry_at > len(lookup.sequence.token_ids):
            continue
        if explorer.next({lookup.source.name: 0.0}, now) is not None:
            explorer.charge(lookup.source.name, lookup.start() / OPTION_SHARE, now)


def _charge(group: Group, seconds: float) -> None:
    group.lookup_balance = min(max(group.lookup_balance - seconds, 0.0), MAX_BALANCE * READ_SECONDS)


def read_all(asked: Iterable[RowLookup]) -> None:
    """Reads the texts of those that are asked, as far as a step's share of tokens goes."""
    left = MAX_READ
    for lookup in asked:
        if lookup.reader is not None and left > 0:
            left -= lookup.reader.read(lookup.sequence, left)

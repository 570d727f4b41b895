"""Which rows look something up in known text, and whether what they find is drafted.

Looking up takes Python time for every token of a row, so an n-gram is read and asked only where that pays.
Rows and groups have a balance in seconds: what drafts after a match are expected to save, less what reading
and asking takes. A row is asked as long as its balance is positive; others start as long as their group's is,
and else a small share of the time goes to one of them now and then. A prediction is free: it is always asked.

Whatever is offered is compared with the tokens that follow, drafted or not: a sampled token equals the
offered one as likely as a draft of it is accepted. So no round is spent on offers that do not pay.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from truedraft.engine.core import sequence as core
from truedraft.engine.core.planning import Lookup
from truedraft.engine.speculation.acceptance import Acceptance
from truedraft.engine.speculation.costs import MIXED, Costs, Shape
from truedraft.engine.speculation.explore import OPTION_SHARE, Explorer
from truedraft.engine.speculation.policy import Group, Plan

# Python seconds of reading a token, and of asking once, about.
READ_SECONDS, ASK_SECONDS = 5e-6, 5e-5
# Tokens that all rows together read in a step, about ten milliseconds: a prompt may be long.
MAX_READ = 2048
# Balance that a row starts with, in tokens to read, and the most that one can have.
START_BALANCE, MAX_BALANCE = 96, 1024
# Strengths of a match: the number of bits of its length, up to this one (16 tokens and more).
MAX_STRENGTH = 5


class Terms(NamedTuple):
    """What a draft from known text is measured by: the ``rate`` without it, in tokens per second; the seconds
    of a round, ``usual``, and those that one of each length adds; and what a round adds that is ``alone`` in
    its step."""

    rate: float
    usual: float
    seconds: list[float]
    alone: float


def make_terms(costs: Costs, plan: Plan, longest: int, drafts: bool) -> Terms:
    """For a row in a batch that drafts as in ``plan``, itself only if it ``drafts``."""
    num_rows, _, num_drafted, sizes = plan.shape
    before = costs.model_seconds(Shape(num_rows, MIXED, num_drafted, sizes))
    if drafts:
        num_drafted, sizes = num_drafted - plan.length, tuple(size - 1 for size in sizes)
    seconds = [
        costs.model_seconds(Shape(num_rows, MIXED, num_drafted + length, sizes)) - before
        for length in range(longest + 1)
    ]
    rounds = costs.rounds_per_step(costs.model_seconds(plan.shape), num_rows)
    return Terms(plan.rate, before, seconds, costs.overhead(num_rows) * (1 - 1 / rounds))


@dataclass(slots=True, eq=False)
class RowLookup:
    """One sequence's part in one source. ``always``: it is asked whatever that brings."""

    sequence: core.Sequence
    group: Group
    source: Lookup
    always: bool
    is_asked: bool
    balance: float = 0.0
    length: int = 0  # of the text when it was last asked
    retry_at: int = 0  # length of the text from which on it may start
    wait: int = START_BALANCE  # tokens from a stop to the next start
    pending: tuple[Acceptance, list[int]] | None = None  # what was offered in this step
    _tables: dict[int, Acceptance] = field(default_factory=dict)  # by strength

    def start(self) -> float:
        """Be asked from now on; return the seconds that it takes to find out whether that pays."""
        self.is_asked, self.balance = True, START_BALANCE * READ_SECONDS
        self.length = len(self.sequence.token_ids)
        return (self.source.num_unread(self.sequence) + START_BALANCE) * READ_SECONDS

    def ask(self, limit: int, terms: Terms, model_tokens: float, is_fixed: bool) -> tuple[float, list[int]]:
        """What to draft instead of the draft model's ``model_tokens`` (expected to be accepted), and the
        seconds that this saves; nothing if it saves none."""
        match_length, token_ids = self.source.offers(self.sequence, limit)
        if self.sequence.matcher is not None:
            token_ids = self.sequence.matcher.allowed(token_ids)
        saved, best = 0.0, 0
        if token_ids:
            acceptance = self._table(min(match_length.bit_length(), MAX_STRENGTH))
            self.pending = acceptance, token_ids
            for length in range(len(token_ids) if is_fixed else 1, len(token_ids) + 1):
                gain = acceptance.expected(length) - model_tokens
                if (net := gain / terms.rate - terms.seconds[length]) > saved:
                    saved, best = net, length
        if not self.always:
            self._settle(saved)
        return saved, token_ids[:best]

    def _table(self, strength: int) -> Acceptance:
        if strength not in self._tables:
            group = self.group.lookups.setdefault((self.source.name, strength), Acceptance())
            self._tables[strength] = Acceptance(group)
        return self._tables[strength]

    def _settle(self, saved: float) -> None:
        """Count what asking has saved and cost in this step."""
        length = len(self.sequence.token_ids)
        value = saved - ASK_SECONDS - READ_SECONDS * (length - self.length)
        self.length = length
        self.balance = min(self.balance + value, MAX_BALANCE * READ_SECONDS)
        _charge(self.group, -value)
        if self.balance < 0:
            self.is_asked, self.retry_at, self.wait = False, length + self.wait, 2 * self.wait

    def judge(self, emitted: Sequence[int]) -> None:
        """Compare what was offered with what followed."""
        if self.pending is None:
            return
        acceptance, token_ids = self.pending
        self.pending = None
        equal = [offered == token_id for offered, token_id in zip(token_ids, emitted, strict=False)]
        num_accepted = equal.index(False) if False in equal else len(equal)
        for table in (acceptance, acceptance.group):
            if table is not None:
                table.learn(len(equal), num_accepted)


def start_if_it_pays(lookup: RowLookup) -> bool:
    """Start what is idle if its group's balance allows it; whether it did."""
    if lookup.group.lookup_balance <= 0:
        return False
    _charge(lookup.group, lookup.start())
    return True


def start_some(idle: Iterable[RowLookup], explorer: Explorer, now: float) -> None:
    """At a replan: start all of a group that pays, and one now and then to explore."""
    for lookup in idle:
        if lookup.retry_at > len(lookup.sequence.token_ids) or start_if_it_pays(lookup):
            continue
        if explorer.next([lookup.source.name], now) is not None:
            explorer.charge(lookup.source.name, lookup.start(), OPTION_SHARE, now)


def _charge(group: Group, seconds: float) -> None:
    group.lookup_balance = min(max(group.lookup_balance - seconds, 0.0), MAX_BALANCE * READ_SECONDS)


def read_all(asked: Iterable[RowLookup]) -> None:
    """Read the texts of those that are asked, as far as a step's share of tokens goes."""
    left = MAX_READ
    for lookup in asked:
        if left > 0:
            left -= lookup.source.read(lookup.sequence, left)

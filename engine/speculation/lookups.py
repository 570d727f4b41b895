"""Which rows look something up in known text, and whether what they find is drafted.

Looking up takes Python time for every token of a row, so an n-gram is read and asked only where that pays.
Rows and groups have a balance in seconds: what drafts after a match are expected to save, less what reading
and asking takes. A row is asked as long as its balance is positive; others start as long as their group's is,
and else a small share of the time goes to one of them now and then. A prediction is free: it is always asked.

Whatever is offered is compared with the tokens that follow, drafted or not: a sampled token equals the
offered one as likely as a draft of it is accepted. So no round is spent on offers that do not pay.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.core.planning import AUTO_LIMITS, Lookup
from engine.core.sequence import Sequence
from engine.speculation.acceptance import Acceptance
from engine.speculation.costs import LOOKUP, Costs, Shape
from engine.speculation.explore import Budget
from engine.speculation.policy import Group

# Python seconds of reading a token or of asking once, about.
READ_SECONDS = 5e-6
# Tokens that all rows together read in a step, about ten milliseconds: a prompt may be long.
MAX_READ = 2048
# Balance that a row starts with, and the most of a row and of a group, in tokens to read.
START_BALANCE, MAX_BALANCE, MAX_GROUP_BALANCE = 48, 256, 2048
# Strengths of a match: its length's number of bits, up to this one (16 tokens and more).
MAX_STRENGTH = 5


class Terms(NamedTuple):
    """What a row's draft is measured by: the ``rate`` of the active option, in tokens per second; the
    ``seconds`` that a draft of each number of tokens adds to a round, instead of the draft model's; and those
    that a round takes longer if it has its step for itself."""

    rate: float
    seconds: list[float]
    alone: float


def make_terms(costs: Costs, rate: float, num_rows: int, num_drafting: int, length: int) -> Terms:
    """For a row among ``num_drafting`` whose draft model would draft ``length`` tokens otherwise."""
    num_model, sizes = num_drafting * length, (num_drafting,) * length
    before = costs.model_seconds(Shape(num_rows, LOOKUP, num_model, sizes))
    rest = (num_drafting - 1,) * length
    seconds = [
        costs.model_seconds(Shape(num_rows, LOOKUP, num_model - length + added, rest)) - before
        for added in range(max(AUTO_LIMITS.values()) + 1)
    ]
    rounds = costs.rounds_per_step(costs.model_seconds(Shape(num_rows, length, num_model, sizes)))
    return Terms(rate, seconds, costs.overhead(num_rows) * (1 - 1 / rounds))


@dataclass(slots=True, eq=False)
class RowLookup:
    """One sequence's part in one source. ``always``: it is asked whatever that brings."""

    sequence: Sequence
    group: Group
    proposer: Lookup
    always: bool
    is_asked: bool
    balance: float = 0.0
    length: int = 0  # of the text when it was last asked
    retry_at: int = 0  # length of the text from which on it may start
    wait: int = START_BALANCE  # tokens from a stop to the next start
    tables: dict[int, Acceptance] = field(default_factory=dict)  # by strength
    pending: tuple[Acceptance, list[int]] | None = None  # what was offered in this step

    def start(self) -> float:
        """Be asked from now on; return the seconds that it takes to find out whether that pays."""
        self.is_asked, self.balance = True, START_BALANCE * READ_SECONDS
        self.length = len(self.sequence.token_ids)
        return (self.proposer.num_unread(self.sequence) + START_BALANCE) * READ_SECONDS

    def offer(self, limit: int) -> list[int]:
        """Tokens that may be drafted, remembered until they are judged."""
        match_length, token_ids = self.proposer.offers(self.sequence, limit)
        self.pending = None
        if token_ids:
            self.pending = self.table(min(match_length.bit_length(), MAX_STRENGTH)), token_ids
        return token_ids

    def table(self, strength: int) -> Acceptance:
        if strength not in self.tables:
            group = self.group.lookups.setdefault((self.proposer.name, strength), Acceptance())
            self.tables[strength] = Acceptance(group)
        return self.tables[strength]

    def best_length(self, terms: Terms, model_tokens: float) -> tuple[int, float]:
        """How much of the pending offer to draft instead of the draft model's ``model_tokens`` (expected to
        be accepted), and the seconds that this saves; (0, 0.0) if it saves none."""
        if self.pending is None:
            return 0, 0.0
        acceptance, token_ids = self.pending
        best, most = 0, 0.0
        for length in range(1, len(token_ids) + 1):
            saved = (acceptance.expected(length) - model_tokens) / terms.rate - terms.seconds[length]
            if saved > most:
                best, most = length, saved
        return best, most

    def settle(self, saved: float) -> None:
        """Count what asking has saved and cost in this step."""
        length = len(self.sequence.token_ids)
        value = saved - READ_SECONDS * (1 + length - self.length)
        self.length = length
        self.balance = min(self.balance + value, MAX_BALANCE * READ_SECONDS)
        _spend(self.group, -value)
        if self.balance < 0 and not self.always:
            self.is_asked = False
            self.retry_at, self.wait = length + self.wait, 2 * self.wait

    def judge(self, emitted: Sequences[int]) -> None:
        """Compare what was offered with what followed."""
        if self.pending is None:
            return
        acceptance, token_ids = self.pending
        self.pending = None
        num_accepted = 0
        for offered, token_id in zip(token_ids, emitted, strict=False):
            if offered != token_id:
                break
            num_accepted += 1
        num_judged = min(len(token_ids), len(emitted), num_accepted + 1)
        acceptance.learn(num_judged, num_accepted)
        assert acceptance.group is not None
        acceptance.group.learn(num_judged, num_accepted)


def _spend(group: Group, seconds: float) -> None:
    most = MAX_GROUP_BALANCE * READ_SECONDS
    group.lookup_balance = min(max(group.lookup_balance - seconds, 0.0), most)


def start_some(idle: Iterable[RowLookup], budget: Budget) -> None:
    """Start what is idle: all of groups that pay, and one if there is time to explore."""
    for lookup in idle:
        if lookup.retry_at <= len(lookup.sequence.token_ids):
            if lookup.group.lookup_balance > 0:
                _spend(lookup.group, lookup.start())
            elif budget.is_open:
                budget.spend(lookup.start())


def read_all(asked: Iterable[RowLookup]) -> None:
    """Read the texts of those that are asked, as far as a step's share goes."""
    left = MAX_READ
    for lookup in asked:
        if left > 0 and lookup.proposer.reads:
            left -= lookup.proposer.read(lookup.sequence, left)

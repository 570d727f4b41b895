"""Decides which proposer drafts, and how much: what promises the most tokens per second, for all rows.

Lengths are 0 (none) to 8. A replan forgets which of them was best; the next step of each number of rows
finds it again and later ones use what was found, so that rows may come and go. A little time explores other
lengths, and other proposers.

Exactness: ``choose`` knows earlier rounds and the clock, and nothing of the round that it decides about.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, TypeVar

from truedraft.engine.core import sequence as core
from truedraft.engine.core.step import StepPlan, StepResult
from truedraft.engine.speculation.acceptance import Group
from truedraft.engine.speculation.costs import MAX_LENGTH, MAX_ROUNDS, Costs, Shape

# Seconds between replans. At first, and after a large change, they come after 4, 8, 16, ... rounds.
REPLAN_SECONDS, FEW_ROUNDS = 0.2, 4
# Least rounds of an exploration: a single one is timed to a tenth only. Where a proposer starts, what is
# accepted is to be learned, too.
EXPLORED_ROUNDS, STARTED_ROUNDS = 2, 4
# Factor that drafting must gain over the rate of none, since a busy front end costs it more than rounds say,
# and another length over that of the active one.
LEAST_GAIN = 1.01
# Rounds in which starting to draft must earn what it takes to bring the draft model's cache up to date, and
# the most that explore whether it would.
CATCH_UP_ROUNDS = 64
# Replans for which a proposer that cannot lag still follows sequences after it has drafted.
FOLLOWING_REPLANS = 3
# Decay per step of the sums from which rates are reported, and of those of prompts and emitted tokens.
REPORT_DECAY = 0.98
# Standard deviations by which an option that never ran may be faster than is expected.
DOUBT = 2.0
# The option that is explored while drafting is off: whether drafting pays again, with whatever length.
PAUSED = -1
# Share of the time that may be lost by exploring one option, reading texts that may repeat themselves
# included; and by trying whether drafting pays while it is off.
OPTION_SHARE, PAUSED_SHARE = 0.0015, 0.005
# Seconds between two explorations of the same option, at least.
MIN_WAIT = 0.25

Name = TypeVar("Name")


@dataclass(slots=True)
class Batch:
    """A step's ``num_rows`` rows, and by proposer those ``rows`` for which it may draft, each of a group.

    A proposer that cannot lag drafts for none but those ``followed``; plans count the others, too, as all are
    followed some time after such a plan is chosen. ``missing`` counts the tokens that a proposer's cache
    misses of the followed ones, one by one, the pending ones apart.
    """

    num_rows: int
    rows: Mapping[str, Mapping[core.Sequence, Group]]
    followed: Mapping[str, Collection[core.Sequence]]
    missing: Callable[[str], list[int]]

    @property
    def key(self) -> tuple[int, ...]:
        """Returns what batches have in common that share a plan."""
        return self.num_rows, *map(len, self.rows.values())

    @property
    def sources(self) -> list[str]:
        """Returns the proposers that may draft."""
        return [source for source, rows in self.rows.items() if rows]

    def groups(self, source: str) -> Counter[Group]:
        """Returns how many rows of each group may draft with a proposer."""
        return Counter(self.rows.get(source, {}).values())


class Plan(NamedTuple):
    """Drafts ``length`` tokens: all rows are expected to emit ``tokens`` in the ``seconds`` of a round."""

    shape: Shape
    length: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def source(self) -> str:
        """Returns the name of the proposer that drafts, empty if none does."""
        return self.shape.source


class Best(NamedTuple):
    """The active plan, the best one that drafts, and none: all the same where no row may draft. ``others``
    are the best ones of the proposers that do not draft."""

    active: Plan
    drafting: Plan
    plain: Plan
    others: tuple[Plan, ...] = ()

    @property
    def may_draft(self) -> bool:
        return self.drafting is not self.plain


@dataclass(slots=True)
class Exploration:
    """Some rounds with another length than the active plan's, or another proposer, for all rows, or for the
    ``scouts`` if there are any. They have lost ``lost`` seconds against the active plan."""

    option: int | str
    source: str
    length: int
    scouts: frozenset[core.Sequence] | None
    rounds_left: int
    num_rounds: int = 0
    lost: float = 0.0


class Choice(NamedTuple):
    """Says what a step drafts with the model: ``plan``, if it has drafts, for the rows in ``drafting``. It is
    the active one of ``best``, or that of the ``exploration``."""

    plan: Plan
    drafting: Collection[core.Sequence]
    best: Best
    exploration: Exploration | None


class Timing(NamedTuple):
    """Holds the seconds of a step's ``first`` round, None if it did something else, too, and of the ``later``
    ones: as far as they say something about rounds of this ``shape``."""

    shape: Shape
    first: float | None
    later: Sequence[float]


@dataclass(slots=True)
class Report:
    """Keeps decaying sums of what steps have achieved lately: emitted ``tokens``, their ``seconds``, those of
    plain rounds instead, rows of rounds, and drafted tokens."""

    tokens: float = 0.0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    rows: float = 0.0
    drafted: float = 0.0

    def add(self, tokens: int, seconds: float, plain_seconds: float, rows: int, drafted: int) -> None:
        self.tokens = REPORT_DECAY * self.tokens + tokens
        self.seconds = REPORT_DECAY * self.seconds + seconds
        self.plain_seconds = REPORT_DECAY * self.plain_seconds + plain_seconds
        self.rows = REPORT_DECAY * self.rows + rows
        self.drafted = REPORT_DECAY * self.drafted + drafted

    def rates(self) -> dict[str, float]:
        """Returns tokens per second: those achieved, and those of plain rounds, one token for each row."""
        return {
            "achieved": round(self.tokens / self.seconds, 1) if self.seconds else 0.0,
            "plain": round(self.rows / self.plain_seconds, 1) if self.plain_seconds else 0.0,
        }


class Explorer:
    """Knows when each option is due. One that was never explored is due as if it had been at the start."""

    def __init__(self) -> None:
        self.num_explored = 0
        self._due: dict[object, float] = {}

    def next(self, waits: Mapping[Name, float], now: float) -> Name | None:
        """Returns the option that has been due for longest; None if none is. ``waits`` are the seconds from
        the start after which those are due that were never explored."""
        due = {name: self._due.get(name, wait) for name, wait in waits.items()}
        earliest = min(due, key=due.__getitem__, default=None)
        return earliest if earliest is not None and due[earliest] <= now else None

    def charge(self, name: object, wait: float, now: float, *, first_is_free: bool = False) -> None:
        """Notes that an option was explored: it is due again after ``wait`` seconds, or soon if its first
        time ``first_is_free``."""
        is_free = first_is_free and name not in self._due
        self._due[name] = now + max(MIN_WAIT, 0.0 if is_free else wait)
        self.num_explored += 1


class Policy:
    """Makes plans of the past alone: the same past gives the same plans."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.explorer = Explorer()
        self.exploration: Exploration | None = None
        self.num_replans = 0
        self.last: Choice | None = None
        self._active: Plan | None = None  # the last step's with rows that may draft
        self._wanted_until: dict[str, int] = {}  # keys: proposers; replans
        self._best_by_rows: dict[tuple[int, ...], Best] = {}
        self._now = 0.0  # seconds of all steps
        self._num_rounds, self._seconds = 0, 0.0  # since the last replan
        self._interval = FEW_ROUNDS  # rounds until the next one
        self._report = Report()
        self._num_prompt_tokens = self._num_emitted = 0.0

    def choose(self, batch: Batch) -> Choice:
        """Chooses for a step: replans if that is due, and else goes on with what was found for such steps."""
        if self.is_due():
            if self.exploration is not None:
                self._settle(self.exploration)
            self._replan(batch)
        best = self._best_by_rows.get(batch.key)
        if best is None:
            best = self._best_by_rows[batch.key] = self._find_best(batch)
        if best.active.length and not self.expects(best.active.source):
            best = best._replace(active=self._without_start(best))
        self._use(best)
        if (exploration := self.exploration) is None:
            self.last = Choice(*self._followed(best, batch), best, None)
        else:
            self.last = Choice(*self._explored(exploration, best, batch), best, exploration)
        return self.last

    def _followed(self, best: Best, batch: Batch) -> tuple[Plan, Collection[core.Sequence]]:
        """Returns the active plan, and the rows that draft. Where its proposer does not follow all of them
        yet, it drafts for the others as far as that pays."""
        source = best.active.source
        rows, followed = batch.rows.get(source, {}), batch.followed.get(source, ())
        if len(followed) == len(rows):
            return best.active, followed
        groups = Counter([rows[row] for row in followed])
        plan = self.fixed(batch.num_rows, groups, source, best.active.length)
        return (plan, followed) if plan.rate > best.plain.rate else (best.plain, ())

    @property
    def max_rounds(self) -> int:
        """Returns for how many rounds the plan stands. Replans may come late, explorations end in time."""
        return MAX_ROUNDS if self.exploration is None else self.exploration.rounds_left

    def _without_start(self, best: Best) -> Plan:
        """Returns the best plan of the proposer that drafts already, if it drafts for such steps.

        Between replans drafting ends but does not start: else, as rows come and go, a proposer's cache would
        be brought up to date for a few rounds at a time.
        """
        plans = (plan for plan in best.others if self.expects(plan.source))
        return max(plans, default=best.plain, key=lambda plan: plan.rate)

    def expects(self, source: str) -> bool:
        """Tells whether a proposer should compute prompts along with the target."""
        return self._active is None or self._active.source == source

    def wants(self, source: str) -> bool:
        """Tells whether a proposer that cannot lag should follow sequences: it drafts, has done so lately, or
        is to be tried. Observing costs time, too, and sequences that it has not observed go on without it."""
        return self.num_replans < self._wanted_until.get(source, FOLLOWING_REPLANS)

    def _want(self, source: str, num_replans: int) -> None:
        until = max(self._wanted_until.get(source, FOLLOWING_REPLANS), self.num_replans + num_replans)
        self._wanted_until[source] = until

    def is_due(self) -> bool:
        """Tells whether ``choose`` replans."""
        if self._num_rounds >= FEW_ROUNDS and self._seconds >= REPLAN_SECONDS:
            return True
        if self.exploration is not None:
            return self.exploration.rounds_left <= 0
        return self._num_rounds >= self._interval

    def _replan(self, batch: Batch) -> None:
        before = self._active
        self._best_by_rows.clear()
        best = self._best_by_rows[batch.key] = self._find_best(batch)
        self._use(best)
        is_large = _is_large_change(before, self._active)
        self._interval = FEW_ROUNDS if is_large else 2 * self._interval
        self._num_rounds, self._seconds = 0, 0.0
        self.num_replans += 1
        if batch.sources:
            self.exploration = self._explore(best, batch)

    def _use(self, best: Best) -> None:
        if best.may_draft:
            self._active = best.active
            if best.active.length:
                self._want(best.active.source, FOLLOWING_REPLANS)

    def _find_best(self, batch: Batch) -> Best:
        """Finds the plan with the highest rate; that of the last step stays if it is about as good."""
        plain = self.fixed(batch.num_rows, Counter(), "", 0)
        plans, best_of = [plain], list[Plan]()
        for source in batch.sources:
            groups = batch.groups(source)
            own = [self.fixed(batch.num_rows, groups, source, n) for n in range(1, MAX_LENGTH + 1)]
            plans += own
            best_of.append(max(own, key=lambda plan: plan.rate))
        if not best_of:
            return Best(plain, plain, plain)
        drafting = max(best_of, key=lambda plan: plan.rate)
        rates = [plan.rate for plan in plans]
        rates[0] *= LEAST_GAIN
        found = max(range(len(plans)), key=rates.__getitem__)
        before = next((i for i, plan in enumerate(plans) if _is_same_draft(plan, self._active)), 0)
        needed = LEAST_GAIN * rates[before]
        if (source := plans[found].source) != plans[before].source:
            num_missing = sum(batch.missing(source)) if source else 0
            catch_up = self.costs.catch_up_seconds(source, num_missing) / CATCH_UP_ROUNDS
            needed *= 1 + catch_up / plans[found].seconds
        active = plans[found if rates[found] > needed else before]
        drawing = active.source or drafting.source
        return Best(active, drafting, plain, tuple(plan for plan in best_of if plan.source != drawing))

    def fixed(
        self,
        num_rows: int,
        groups: Counter[Group],
        source: str,
        length: int,
        num_scouts: int | None = None,
    ) -> Plan:
        """Makes the plan in which ``source`` drafts ``length`` tokens for all rows of ``groups``, or for
        ``num_scouts`` of them. For as many tokens as a round emits, other requests bring prompts, which the
        proposer computes."""
        source = source if length else ""
        num_drafting = groups.total() if num_scouts is None else num_scouts
        shape = Shape(num_rows, length, num_drafting * length, (num_drafting,) * length, source)
        accepted = 0.0
        if length:
            accepted = sum(
                [count * group.acceptance(source).expected(length) for group, count in groups.items()]
            )
        return self._plan(shape, length, accepted)

    def _plan(self, shape: Shape, length: int, accepted: float) -> Plan:
        num_tokens, seconds = shape.num_rows + accepted, self.costs.seconds(shape)
        if length and self._num_emitted:
            num_prompt_tokens = num_tokens * self._num_prompt_tokens / self._num_emitted
            seconds += self.costs.draft_prompt_seconds(shape.source, num_prompt_tokens)
        return Plan(shape, length, num_tokens, seconds)

    def _explore(self, best: Best, batch: Batch) -> Exploration | None:
        """Returns what to explore from now on, if something is due."""
        length, source = best.active.length, best.active.source
        # A longer draft teaches most: how far drafts are accepted.
        lengths = [length + 1, length - 1, 0]
        if length == MAX_LENGTH:
            lengths.remove(length + 1)
        groups, options = batch.groups(source), dict[int | str, Plan]()
        if length:
            options |= {n: self.fixed(batch.num_rows, groups, source, n) for n in lengths}
        else:
            options[PAUSED] = best.drafting
        options |= {plan.source: plan for plan in best.others}
        waits = {option: self._first_wait(option, plan, best.active) for option, plan in options.items()}
        option = self.explorer.next(waits, self._now)
        while option is not None and _is_start(option) and not batch.followed[options[option].source]:
            # It is tried with new sequences, which it follows from now on.
            self._want(options[option].source, 1)
            del waits[option]
            option = self.explorer.next(waits, self._now)
        if option is None:
            return None
        starting, scouts, catch_up = None, None, 0.0
        if isinstance(option, int) and not _is_start(option):
            length = option
        else:
            starting = options[option]
            source, length = starting.source, starting.length
            scouts, catch_up = self._scouts(best, batch, source)
        least = _least_rounds(option)
        if followed := batch.followed.get(source):
            # The fewer drafts a round verifies, the more rounds it takes to learn as much.
            least *= math.ceil(len(batch.rows[source]) / len(followed))
        exploration = Exploration(option, source, length, scouts, least)
        plan, _ = self._explored(exploration, best, batch)
        # It takes a whole step: later rounds of a step are faster, and the active plan has those.
        num_rounds = self.costs.rounds_per_step(self.costs.model_seconds(plan.shape), plan.shape.num_rows)
        if starting is not None:
            # It ends when it has lost as much again as bringing caches up to date takes, which so teaches
            # more.
            lost = plan.seconds - plan.tokens / best.active.rate
            is_close = lost * CATCH_UP_ROUNDS <= catch_up
            num_rounds = max(num_rounds, CATCH_UP_ROUNDS if is_close else catch_up / lost)
        exploration.rounds_left = max(least, int(num_rounds))
        return exploration

    def _first_wait(self, option: int | str, plan: Plan, active: Plan) -> float:
        """Returns the seconds from the start after which an option that never ran may be explored: none if it
        may be better than the ``active`` plan."""
        doubt = DOUBT * self.costs.uncertainty(plan.shape)
        lost = plan.seconds - plan.tokens * math.exp(doubt) / active.rate
        return max(0.0, _least_rounds(option) * lost) / _share(option)

    def _scouts(self, best: Best, batch: Batch, source: str) -> tuple[frozenset[core.Sequence], float]:
        """Returns who explores a proposer that does not draft, and the seconds that bringing their caches up
        to date takes: the rows for which that is about a round, or the nearest one."""
        for group in batch.groups(source):
            group.acceptance(source).forget()
        scouts, seconds, num_missing = list[core.Sequence](), 0.0, 0
        for num, row in sorted(
            zip(batch.missing(source), batch.followed[source], strict=True), key=itemgetter(0)
        ):
            num_missing += num
            longer = self.costs.catch_up_seconds(source, num_missing)
            if scouts and longer > best.plain.seconds:
                break
            scouts.append(row)
            seconds = longer
        return frozenset(scouts), seconds

    def _explored(
        self, exploration: Exploration, best: Best, batch: Batch
    ) -> tuple[Plan, Collection[core.Sequence]]:
        """Returns the plan that is explored for this batch, and the rows that draft."""
        scouts = batch.followed.get(exploration.source, ())
        if exploration.scouts is not None:
            scouts = exploration.scouts.intersection(scouts)
        if not scouts:
            exploration.rounds_left = 1  # all have ended: the last round
            return self._followed(best, batch)
        self._want(exploration.source, 1)
        groups = batch.groups(exploration.source)
        plan = self.fixed(batch.num_rows, groups, exploration.source, exploration.length, len(scouts))
        return plan, scouts

    def observe(self, num_rounds: int, seconds: float) -> None:
        """Counts the rounds and seconds of a step, which has run."""
        self._now += seconds
        self._num_rounds += num_rounds
        self._seconds += seconds
        if self.exploration is not None:
            self.exploration.rounds_left -= num_rounds

    def learn(self, choice: Choice, plan: StepPlan, result: StepResult, timing: Timing) -> None:
        """Learns from a step since the last replan, before the next one, in which ``choice`` was made."""
        seconds = result.seconds + result.host_seconds
        num_tokens = sum([sum(map(len, one.emitted)) for one in result.rounds])
        num_prompt_tokens = sum([part.num_tokens for part in plan.prompts])
        self._num_prompt_tokens = REPORT_DECAY * self._num_prompt_tokens + num_prompt_tokens
        self._num_emitted = REPORT_DECAY * self._num_emitted + num_tokens
        shape, first, later = timing
        if first is not None or later:
            self.costs.observe_step(shape, first, later, result.host_seconds)
            self._count(choice.best, result, shape, num_tokens, seconds)
        if (exploration := choice.exploration) is not None:
            usual = choice.best.active
            exploration.num_rounds += len(result.rounds)
            exploration.lost += seconds - num_tokens * self.costs.seconds(usual.shape) / usual.tokens

    def _count(self, best: Best, result: StepResult, shape: Shape, num_tokens: int, seconds: float) -> None:
        """Adds a step of rounds of ``shape`` to the report, and as many plain ones."""
        num_drafted = sum([sum(one.num_drafted) for one in result.rounds])
        plain_seconds = seconds
        if num_drafted:
            plain_seconds *= self.costs.seconds(best.plain.shape) / self.costs.seconds(shape)
        rows = len(result.rounds) * shape.num_rows
        self._report.add(num_tokens, seconds, plain_seconds, rows, num_drafted)

    def _settle(self, exploration: Exploration) -> None:
        """Ends an exploration: charges what it lost."""
        self.exploration = None
        if self.last is None or exploration.num_rounds == 0:
            return
        # At most what the rounds would have taken otherwise: what a busy moment spoils is soon tried again.
        lost = min(exploration.lost, exploration.num_rounds * self.last.best.active.seconds)
        option = exploration.option
        self.explorer.charge(option, lost / _share(option), self._now, first_is_free=_is_start(option))

    def _experts_in_words(self, best: Best) -> str:
        """Returns what a round with drafts reads of a target with experts, to follow ``why``."""
        if (routing := self.costs.routing) is None or not best.may_draft:
            return ""
        shape = (best.active if best.active.length else best.drafting).shape
        plain, drafting = routing.experts(shape.num_rows), routing.experts(shape.num_rows, shape.num_drafted)
        return f"; {drafting:.3g} experts of each layer are read instead of {plain:.3g}"

    def state(self) -> dict[str, object]:
        """Returns builtins for ``GET /speculation``."""
        if self.last is None:
            return {"on": None, "why": "no step has run yet"}
        best, report = self.last.best, self._report
        recent_mean = round(report.drafted / max(report.rows, 1), 2)
        return {
            "on": best.active.length > 0,
            "why": why(best) + self._experts_in_words(best),
            "draft_length": {"last": self.last.plan.length, "recent_mean": recent_mean},
            "predicted_speedup": round(best.active.rate / best.plain.rate, 3),
            "tokens_per_second": report.rates(),
            "costs": self.costs.state(),
            "explorations": self.explorer.num_explored,
        }


def _is_start(option: int | str) -> bool:
    """Tells whether exploring the option starts a proposer that does not draft."""
    return option == PAUSED or isinstance(option, str)


def _least_rounds(option: int | str) -> int:
    """Returns how many rounds an exploration has at least."""
    return STARTED_ROUNDS if _is_start(option) else EXPLORED_ROUNDS


def _share(option: int | str) -> float:
    """Returns the share of the time that exploring an option may lose."""
    return PAUSED_SHARE if _is_start(option) else OPTION_SHARE


def _is_same_draft(plan: Plan, other: Plan | None) -> bool:
    if other is None or plan.source != other.source:
        return False
    return plan.length == other.length


def _is_large_change(before: Plan | None, now: Plan | None) -> bool:
    """Tells whether another proposer drafts, or the length is another by more than one."""
    lengths = [plan.length if plan is not None else 0 for plan in (before, now)]
    sources = {plan.source if plan is not None else "" for plan in (before, now)}
    return len(sources) > 1 or abs(lengths[1] - lengths[0]) > 1


def why(best: Best) -> str:
    """Says in a sentence what drafting with a proposer is expected to bring."""
    if not best.may_draft:
        return "off: no row drafts with the draft model"
    plan = best.active if best.active.length else best.drafting
    num_rows, length = plan.shape.num_rows, plan.shape.num_drafted / plan.shape.num_rows
    tokens, seconds = plan.tokens / best.plain.tokens, plan.seconds / best.plain.seconds
    rows = "one sequence" if num_rows == 1 else f"each of {num_rows} sequences"
    return (
        f"{'on' if best.active.length else 'off, since it would not pay'}: drafting {length:.2g} "
        f"token{'' if length == 1 else 's'} for {rows} is expected to give {tokens:.2f} times the tokens of "
        f"a round without drafts in {seconds:.2f} times its time, so {tokens / seconds:.2f} times the speed"
    )

"""How much the draft model drafts: the length with the most expected tokens per second, for all rows alike.

Lengths are 0 (none) to 8. A replan forgets which of them was best; the next step of each number of rows
finds it again and later ones use what was found, so that rows may come and go. A little time explores other
lengths.

Exactness: ``choose`` knows earlier rounds and the clock, and nothing of the round that it decides about.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from truedraft.engine.core import sequence as core
from truedraft.engine.core.step import StepPlan, StepResult
from truedraft.engine.speculation.acceptance import Acceptance
from truedraft.engine.speculation.costs import MAX_LENGTH, MAX_ROUNDS, Costs, Shape
from truedraft.engine.speculation.explore import OPTION_SHARE, PAUSED_SHARE, Explorer

# Seconds between replans, and rounds of an exploration: a single one is timed to a tenth only, and the first
# of a step finds cold caches. At first, and after a large change, replans come after 4, 8, 16, ... rounds.
REPLAN_SECONDS, FEW_ROUNDS = 0.2, 4
# Factor that drafting must gain over the rate of none, since a busy front end costs it more than rounds say,
# and another length over that of the active one.
LEAST_GAIN = 1.01
# Rounds in which starting to draft must earn what it takes to bring the draft model's cache up to date, and
# the most that explore whether it would.
CATCH_UP_ROUNDS = 64
# Decay per step of the sums behind the reported rates, and of those of prompts and emitted tokens.
REPORT_DECAY = 0.98
# The option that is explored while drafting is off: whether drafting pays again, with whatever length.
PAUSED = -1


class Group:
    """What is known of the sequences of a temperature class."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.acceptance = Acceptance()  # of the draft model
        self.lookups: dict[tuple[str, int], Acceptance] = {}  # by source and strength of the match
        self.lookup_balance = 0.0  # seconds that look-ups have saved lately


# Sequences that may draft, and what is known of their like.
Rows = Mapping[core.Sequence, Group]


class Plan(NamedTuple):
    """``length`` tokens for each row that may draft, or for the ``scouts`` alone. Expected are ``tokens`` of
    all rows in the ``seconds`` of a round."""

    shape: Shape
    length: int
    tokens: float
    seconds: float
    scouts: frozenset[core.Sequence] | None = None

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Best(NamedTuple):
    """The active plan, the best one that drafts, and none."""

    active: Plan
    drafting: Plan
    plain: Plan
    groups: Counter[Group]


@dataclass(slots=True)
class Exploration:
    """Some rounds with another length than the active plan's, for all rows or the ``scouts``. They have lost
    ``lost`` seconds against the active plan."""

    option: int
    length: int
    scouts: frozenset[core.Sequence] | None
    rounds_left: int
    num_rounds: int = 0
    lost: float = 0.0


class Observed(NamedTuple):
    """A step that is still to be learned from. ``is_timed``: its rounds tell what rounds of its rows cost.
    ``option``, ``best`` and ``exploration`` as they were."""

    plan: StepPlan
    result: StepResult
    is_timed: bool
    option: int
    best: Best
    exploration: Exploration | None


class Policy:
    """Deterministic: the same past gives the same plans."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.explorer = Explorer()
        self.best: Best | None = None  # of the last step
        self.plan: Plan  # of the last step: the active one of ``best``, or what is explored
        self._length: int | None = None  # of the active plan of the last step with rows that may draft
        self.exploration: Exploration | None = None
        self.num_replans = 0
        self._best_by_rows: dict[tuple[int, int], Best] = {}
        self._now = 0.0  # seconds of all steps
        self._num_rounds, self._seconds = 0, 0.0  # since the last replan
        self._interval = FEW_ROUNDS  # rounds until the next one
        # Emitted tokens and their seconds, those of plain rounds instead, rows, and drafted tokens.
        self._report = [0.0] * 6
        self._num_prompt_tokens = self._num_emitted = 0.0

    def choose(self, num_rows: int, rows: Rows, missing: Callable[[], list[int]]) -> Plan:
        """For a step of ``num_rows``. The draft model may draft for ``rows``, each of a group; ``missing``
        counts the tokens that its cache misses of them, the pending ones apart."""
        key = num_rows, len(rows)
        if self.is_due():
            if self.exploration is not None:
                self._settle(self.exploration)
            self._replan(key, rows, missing)
        best = self._best_by_rows.get(key)
        if best is None:
            best = self._best_by_rows[key] = self._find_best(num_rows, Counter(rows.values()), missing)
        if best.active.length and self._length == 0:
            # Between replans drafting ends but does not start: else, as rows come and go, the draft model's
            # cache would be brought up to date for a few rounds at a time.
            best = best._replace(active=best.plain)
        self._use(best)
        self.plan = best.active if self.exploration is None else self._explored(self.exploration, best, rows)
        return self.plan

    @property
    def max_rounds(self) -> int:
        """Rounds for which the plan stands. Replans may come some rounds late, explorations end in time."""
        return MAX_ROUNDS if self.exploration is None else self.exploration.rounds_left

    @property
    def expects_drafts(self) -> bool:
        """Whether the draft model should compute prompts along with the target."""
        return self._length != 0

    def is_due(self) -> bool:
        """Whether ``choose`` replans."""
        if self._num_rounds >= FEW_ROUNDS and self._seconds >= REPLAN_SECONDS:
            return True
        if self.exploration is not None:
            return self.exploration.rounds_left <= 0
        return self._num_rounds >= self._interval

    def _replan(self, key: tuple[int, int], rows: Rows, missing: Callable[[], list[int]]) -> None:
        before = self._length or 0
        self._best_by_rows.clear()
        best = self._best_by_rows[key] = self._find_best(key[0], Counter(rows.values()), missing)
        self._use(best)
        now = self._length or 0
        is_large = abs(now - before) > 1 or (now == 0) != (before == 0)
        self._interval = FEW_ROUNDS if is_large else 2 * self._interval
        self._num_rounds, self._seconds = 0, 0.0
        self.num_replans += 1
        if rows:
            self.exploration = self._explore(best, rows, missing)

    def _use(self, best: Best) -> None:
        self.best = best
        if best.groups:
            self._length = best.active.length

    def _find_best(self, num_rows: int, groups: Counter[Group], missing: Callable[[], list[int]]) -> Best:
        """The plan with the highest rate; the length of the step before stays if it is about as good."""
        plain = self.fixed(num_rows, groups, 0)
        if not groups:
            return Best(plain, plain, plain, groups)
        plans = [plain, *(self.fixed(num_rows, groups, length) for length in range(1, MAX_LENGTH + 1))]
        drafting = max(plans[1:], key=lambda plan: plan.rate)
        before = self._length or 0
        rates = [LEAST_GAIN * plain.rate, *(plan.rate for plan in plans[1:])]
        found = max(range(len(plans)), key=rates.__getitem__)
        needed = LEAST_GAIN * rates[before]
        if before == 0:
            catch_up = self.costs.catch_up_seconds(sum(missing())) / CATCH_UP_ROUNDS
            needed *= 1 + catch_up / plans[found].seconds
        return Best(plans[found if rates[found] > needed else before], drafting, plain, groups)

    def fixed(
        self, num_rows: int, groups: Counter[Group], length: int, num_scouts: int | None = None
    ) -> Plan:
        """All rows of ``groups``, or ``num_scouts`` of them, draft ``length`` tokens. For as many tokens as a
        round emits, other requests bring prompts, which the draft model computes, too."""
        num_drafting = groups.total() if num_scouts is None else num_scouts
        shape = Shape(num_rows, length, num_drafting * length, (num_drafting,) * length)
        accepted = sum([count * group.acceptance.expected(length) for group, count in groups.items()])
        num_tokens, seconds = num_rows + accepted, self.costs.seconds(shape)
        if length and self._num_emitted:
            num_prompt_tokens = num_tokens * self._num_prompt_tokens / self._num_emitted
            seconds += self.costs.draft_prompt_seconds(num_prompt_tokens)
        return Plan(shape, length, num_tokens, seconds)

    def _explore(self, best: Best, rows: Rows, missing: Callable[[], list[int]]) -> Exploration | None:
        """What to explore from now on, if something is due."""
        length = best.active.length
        options = [0, length + 1, length - 1] if length else [PAUSED]
        if length == MAX_LENGTH:
            options.remove(length + 1)
        place = self.explorer.next(options, self._now)
        if place is None:
            return None
        option, scouts, catch_up = options[place], None, 0.0
        if not length:
            scouts, catch_up = self._scouts(best, rows, missing())
        exploration = Exploration(option, option if length else best.drafting.length, scouts, FEW_ROUNDS)
        plan = self._explored(exploration, best, rows)
        # A whole step: rounds behind the first ones of a step are faster, and the active plan has those.
        num_rounds = self.costs.rounds_per_step(self.costs.model_seconds(plan.shape), plan.shape.num_rows)
        if not length:
            # Until it has lost as much again as it takes to bring caches up to date, which so teaches more.
            lost = plan.seconds - plan.tokens / best.plain.rate
            is_close = lost * CATCH_UP_ROUNDS <= catch_up
            num_rounds = max(num_rounds, CATCH_UP_ROUNDS if is_close else catch_up / lost)
        exploration.rounds_left = max(FEW_ROUNDS, int(num_rounds))
        return exploration

    def _scouts(self, best: Best, rows: Rows, missing: list[int]) -> tuple[frozenset[core.Sequence], float]:
        """While drafting is off: the rows whose caches are up to date within about a round, or the nearest
        one; and seconds that this takes."""
        for group in best.groups:
            group.acceptance.forget()
        scouts, seconds, num_missing = list[core.Sequence](), 0.0, 0
        for num, row in sorted(zip(missing, rows, strict=True), key=itemgetter(0)):
            num_missing += num
            longer = self.costs.catch_up_seconds(num_missing)
            if scouts and longer > best.plain.seconds:
                break
            scouts.append(row)
            seconds = longer
        return frozenset(scouts), seconds

    def _explored(self, exploration: Exploration, best: Best, rows: Rows) -> Plan:
        """What is explored, for these ``rows``."""
        scouts = frozenset(rows if exploration.scouts is None else exploration.scouts.intersection(rows))
        if not scouts:
            exploration.rounds_left = 1  # all have ended: the last round
            return best.active
        plan = self.fixed(best.plain.shape.num_rows, best.groups, exploration.length, len(scouts))
        return plan._replace(scouts=scouts)

    def observe(self, num_rounds: int, seconds: float) -> None:
        """A step of the plan has run."""
        self._now += seconds
        self._num_rounds += num_rounds
        self._seconds += seconds
        if self.exploration is not None:
            self.exploration.rounds_left -= num_rounds

    def learn(self, step: Observed, shape: Shape, first: float | None, later: Sequence[float]) -> None:
        """From a step since the last replan, before the next one. Seconds of its ``first`` round and of the
        ``later`` ones, if they say something about rounds of this ``shape``."""
        rounds, host_seconds = step.result.rounds, step.result.host_seconds
        seconds = step.result.seconds + host_seconds
        num_tokens = sum([sum(map(len, one.emitted)) for one in rounds])
        num_prompt_tokens = sum([part.num_tokens for part in step.plan.prompts])
        self._num_prompt_tokens = REPORT_DECAY * self._num_prompt_tokens + num_prompt_tokens
        self._num_emitted = REPORT_DECAY * self._num_emitted + num_tokens
        if first is not None or later:
            self.costs.observe_step(shape, first, later, host_seconds)
            self._count(step, shape, num_tokens, seconds)
        if (exploration := step.exploration) is not None:
            usual = step.best.active
            exploration.num_rounds += len(rounds)
            exploration.lost += seconds - num_tokens * self.costs.seconds(usual.shape) / usual.tokens

    def _count(self, step: Observed, shape: Shape, num_tokens: int, seconds: float) -> None:
        """For the report: a step of rounds of ``shape``, and as many plain ones."""
        num_drafted = sum([sum(one.num_drafted) for one in step.result.rounds])
        rows = len(step.result.rounds) * shape.num_rows
        plain_seconds = seconds
        if num_drafted:
            plain_seconds *= self.costs.seconds(step.best.plain.shape) / self.costs.seconds(shape)
        now = num_tokens, seconds, rows, plain_seconds, rows, num_drafted
        self._report = [
            REPORT_DECAY * before + value for before, value in zip(self._report, now, strict=True)
        ]

    def _settle(self, exploration: Exploration) -> None:
        """An exploration has ended: charge what it lost."""
        self.exploration = None
        if self.best is None or exploration.num_rounds == 0:
            return
        # At most what the rounds would have taken otherwise: what a busy moment spoils is soon tried again.
        lost = min(exploration.lost, exploration.num_rounds * self.best.active.seconds)
        share = PAUSED_SHARE if exploration.option == PAUSED else OPTION_SHARE
        self.explorer.charge(exploration.option, lost, share, self._now)

    def state(self) -> dict[str, object]:
        """For ``GET /speculation``: builtins."""
        best = self.best
        if best is None:
            return {"on": None, "why": "no step has run yet"}
        tokens, seconds, plain_tokens, plain_seconds, rows, drafted = self._report
        return {
            "on": best.active.length > 0,
            "why": why(best),
            "draft_length": {"last": self.plan.length, "recent_mean": round(drafted / max(rows, 1), 2)},
            "predicted_speedup": round(best.active.rate / best.plain.rate, 3),
            "tokens_per_second": {
                "achieved": round(tokens / seconds, 1) if seconds else 0.0,
                "plain": round(plain_tokens / plain_seconds, 1) if plain_seconds else 0.0,
            },
            "costs": self.costs.state(),
            "explorations": self.explorer.num_explored,
        }


def why(best: Best) -> str:
    """Says in a sentence what drafting with the draft model is expected to bring."""
    plan = best.active if best.active.length else best.drafting
    if plan is best.plain:
        return "off: no row drafts with the draft model"
    return (
        f"{'on' if best.active.length else 'off: the best draft does not pay'}: drafting "
        f"{plan.shape.num_drafted:.3g} tokens for {plan.shape.num_rows} rows is expected to give "
        f"{plan.tokens / best.plain.tokens:.2f} times the tokens of a plain round in "
        f"{plan.seconds / best.plain.seconds:.2f} times its time"
    )

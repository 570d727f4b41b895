"""How much the draft model drafts: the option with the most expected tokens per second, for all rows alike.

Options are the draft lengths 0 to 8 and early exit. A replan forgets which of them was best; the next step of
each number of rows finds it again, and later ones use what was found, so that rows may come and go. A little
time explores other options.

Exactness: ``choose`` knows earlier rounds and the clock, and nothing of the round that it decides about.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median
from typing import NamedTuple, Protocol

from engine.speculation.acceptance import Acceptance
from engine.speculation.costs import EARLY_EXIT, MAX_LENGTH, Costs, Shape, even_shape
from engine.speculation.early_exit import ConfidenceTable
from engine.speculation.explore import (
    LENGTH_SHARE,
    MAX_EXPLORED_ROUNDS,
    MIN_EXPLORED_ROUNDS,
    Budget,
    Explorer,
)

# Seconds between replans; at first, and after a large change, they come after 4, 8, 16, ... rounds.
REPLAN_SECONDS, FIRST_ROUNDS = 0.2, 4
# Another option must promise so much more than the active one, and drafting so much more than none.
CHANGE_GAIN, START_GAIN = 1.005, 1.02
# Rounds in which starting to draft must earn what it takes to bring the draft cache up to date.
CATCH_UP_ROUNDS = 128
# Verdicts that what is known of acceptance is worth once drafting is off: the text changes.
PAUSED_VERDICTS = 12.0
# Tokens by which a draft with early exit may be longer than the best fixed length.
EXTRA_LENGTH = 3
# A draft model that takes less than this share of the target's time for a prompt's chunk always computes it.
CHEAP_DRAFT, CHUNK = 0.1, 64
# Decay per step of the sums behind the reported rates.
REPORT_DECAY = 0.98


class Group:
    """What is known of sequences whose drafts are accepted alike: those of a temperature class."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.acceptance = Acceptance()
        self.confidence = ConfidenceTable()
        self.lookups: dict[tuple[str, int], Acceptance] = {}  # by source and strength of the match
        self.lookup_balance = 0.0  # seconds that look-ups have saved lately


class DraftRow(Protocol):
    """A row that may draft with the draft model."""

    group: Group

    def num_missing(self) -> int:
        """Tokens that the draft model's cache misses, the pending one apart."""


class Estimate(NamedTuple):
    """Expected tokens, of all rows, and seconds of a kind of round."""

    shape: Shape
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Decision(NamedTuple):
    """Rows draft up to ``length`` tokens; with early exit, if there is a ``threshold``; only the ``scouts``
    (places among the rows that may draft), if there are any."""

    option: int
    length: int
    threshold: float | None = None
    scouts: frozenset[int] | None = None


class Best(NamedTuple):
    """The active option, the best one that drafts and none, for a number of rows and their ``groups``."""

    decision: Decision
    active: Estimate
    drafting: Estimate
    plain: Estimate
    groups: Counter[Group]
    early_exit: tuple[Decision, Estimate] | None = None


@dataclass(slots=True)
class Exploration:
    """Some rounds of another option than the active one. ``name`` is what its back-off is known by."""

    key: tuple[int, int]
    name: tuple[int, int]
    decision: Decision
    shape: Shape
    num_drafting: int
    catch_up_seconds: float
    rounds_left: int
    num_rounds: int = 0
    num_tokens: int = 0
    is_timed: bool = False


@dataclass(slots=True)
class Report:
    """Decayed sums over timed steps; ``plain_seconds`` are those of as many rounds without drafts."""

    tokens: float = 0.0
    seconds: float = 0.0
    plain_tokens: float = 0.0
    plain_seconds: float = 0.0
    rows: float = 0.0
    drafted: float = 0.0

    def add(self, *values: float) -> None:
        for name, value in zip(self.__slots__, values, strict=True):
            setattr(self, name, REPORT_DECAY * getattr(self, name) + value)


# The option of an exploration while drafting is off, for its back-off: whichever length it is.
ANY_LENGTH = -1


@dataclass(eq=False)
class Policy:
    """Deterministic: the same past gives the same decisions."""

    costs: Costs
    has_early_exit: bool = True
    budget: Budget = field(default_factory=lambda: Budget(LENGTH_SHARE))
    explorer: Explorer = field(default_factory=Explorer)
    report: Report = field(default_factory=Report)

    def __post_init__(self) -> None:
        self.now = 0.0  # seconds of steps so far
        self.best: Best | None = None  # of the last step
        self.exploration: Exploration | None = None
        self._best_by_rows: dict[tuple[int, int], Best] = {}
        self._timed_option: int | None = None  # of the last timed rounds that were no exploration
        self._num_rounds, self._seconds = 0, 0.0  # since the last replan
        self._interval = FIRST_ROUNDS  # rounds until the next one
        self._is_due = self._repeats = False

    def choose(self, num_rows: int, rows: Sequence[DraftRow]) -> Decision:
        """For a step of ``num_rows``; ``rows`` may draft with the draft model."""
        key = num_rows, len(rows)
        if self.exploration is not None and self.exploration.key != key:
            self.exploration = None
        if self.exploration is None and self._replan_is_due():
            self._replan(key, rows)
        best = self._best_by_rows.get(key)
        if best is None:
            best = self._best_by_rows[key] = self._find_best(num_rows, rows)
        self.best = best
        return best.decision if self.exploration is None else self.exploration.decision

    @property
    def shape(self) -> Shape:
        """Of the rounds that the last decision makes."""
        assert self.best is not None
        return self.best.active.shape if self.exploration is None else self.exploration.shape

    @property
    def rounds_left(self) -> int:
        """Rounds for which the last decision stands."""
        if self.exploration is not None:
            return self.exploration.rounds_left
        left = self._interval - self._num_rounds
        if self._num_rounds >= FIRST_ROUNDS:
            left = min(left, int((REPLAN_SECONDS - self._seconds) * self._num_rounds / self._seconds) + 1)
        return max(1, left)

    def prefills_draft(self) -> bool:
        """Whether drafts are expected soon, or computing a prompt for them costs next to nothing."""
        if self.best is None or self.best.decision.option:
            return True
        return self.costs.draft(CHUNK) < CHEAP_DRAFT * self.costs.score(CHUNK)

    def _replan_is_due(self) -> bool:
        if self._is_due or self._num_rounds >= self._interval:
            return True
        return self._num_rounds >= FIRST_ROUNDS and self._seconds >= REPLAN_SECONDS

    def _replan(self, key: tuple[int, int], rows: Sequence[DraftRow]) -> None:
        before = self.best.decision.option if self.best is not None else 0
        self._best_by_rows.clear()
        self.best = best = self._best_by_rows[key] = self._find_best(key[0], rows)
        option = best.decision.option
        is_large = abs(option - before) > 1 or (option == 0) != (before == 0)
        self._interval = FIRST_ROUNDS if is_large else 2 * self._interval
        self._num_rounds, self._seconds, self._is_due = 0, 0.0, False
        if rows:
            self.exploration = self._next_exploration(key, best, rows)

    def _find_best(self, num_rows: int, rows: Sequence[DraftRow]) -> Best:
        """The option with the highest rate; the one before stays if it is about as good."""
        groups = Counter(row.group for row in rows)
        plain = self.estimate(num_rows, groups, 0)
        if not rows:
            return Best(Decision(0, 0), plain, plain, plain, groups)
        before = self.best.decision.option if self.best is not None else 0
        catch_up = 0.0
        if before == 0:
            num_missing = sum(row.num_missing() for row in rows)
            catch_up = self.costs.catch_up_seconds(num_missing) / CATCH_UP_ROUNDS
        lengths = [self.estimate(num_rows, groups, length) for length in range(1, MAX_LENGTH + 1)]
        drafting = max(lengths, key=lambda estimate: estimate.rate)
        early_exit = self._early_exit(drafting, groups) if self.has_early_exit else None
        options = {estimate.shape.option: estimate for estimate in (plain, *lengths)}
        if early_exit is not None and self.costs.is_measured(num_rows, EARLY_EXIT):
            options[EARLY_EXIT] = early_exit[1]
        active = max(options.values(), key=lambda estimate: estimate.rate)
        rival = options.get(before, plain)
        gain = CHANGE_GAIN if rival.shape.option else START_GAIN
        if active.tokens / (active.seconds + catch_up) <= gain * rival.rate:
            active = rival
        option = active.shape.option
        decision = Decision(option, option)
        if option == EARLY_EXIT and early_exit is not None:
            decision = early_exit[0]
        return Best(decision, active, drafting, plain, groups, early_exit)

    def estimate(self, num_rows: int, groups: Counter[Group], length: int) -> Estimate:
        """Expected of a round in which the rows of ``groups`` draft ``length`` tokens each."""
        accepted = sum(count * group.acceptance.expected(length) for group, count in groups.items())
        shape = even_shape(num_rows, groups.total(), length)
        return Estimate(shape, num_rows + accepted, self.costs.seconds(shape))

    def _early_exit(self, drafting: Estimate, groups: Counter[Group]) -> tuple[Decision, Estimate]:
        """Drafts up to some tokens longer than the best fixed length. A token is worth drafting if the chance
        that it is accepted is at least the number of tokens that are emitted in the time it takes a row."""
        num_rows, length = drafting.shape.num_rows, drafting.shape.option
        longer = self.estimate(num_rows, groups, length + 1)
        seconds_per_token = (longer.seconds - drafting.seconds) / groups.total()
        threshold = ConfidenceTable.rounded(max(0.0, drafting.rate * seconds_per_token))
        length = min(length + EXTRA_LENGTH, MAX_LENGTH)
        tokens, num_drafted = float(num_rows - groups.total()), 0.0
        passes: list[float] = []
        for group, count in groups.items():
            estimate = group.confidence.estimate(length, threshold)
            tokens += count * group.confidence.ratio * (1 + estimate.accepted)
            num_drafted += count * estimate.drafted
            passes = [a + count * b for a, b in zip_longest(passes, estimate.passes, fillvalue=0.0)]
        shape = Shape(num_rows, EARLY_EXIT, num_drafted, tuple(passes))
        return Decision(EARLY_EXIT, length, threshold), Estimate(shape, tokens, self.costs.seconds(shape))

    def _next_exploration(
        self, key: tuple[int, int], best: Best, rows: Sequence[DraftRow]
    ) -> Exploration | None:
        """What to explore from now on, if there is time for it."""
        num_rows, num_drafting = key
        options = self._neighbours(best)
        name = self.explorer.next([(self.costs.bucket(num_rows), option) for option in options], self.now)
        if self._repeats:
            name = self.costs.bucket(num_rows), ANY_LENGTH
        if name is None or not (self._repeats or self.budget.is_open or self.explorer.is_new(name)):
            return None
        option = best.drafting.shape.option if name[1] == ANY_LENGTH else name[1]
        decision, shape, catch_up = Decision(option, option), even_shape(num_rows, num_drafting, option), 0.0
        if option == EARLY_EXIT and best.early_exit is not None:
            decision, shape = best.early_exit[0], best.early_exit[1].shape
        if name[1] == ANY_LENGTH:
            places, catch_up = self._scouts(num_rows, rows, best)
            if len(places) < num_drafting:
                num_drafting = len(places)
                decision = Decision(option, option, scouts=frozenset(places))
                shape = even_shape(num_rows, num_drafting, option)
            for group in best.groups:
                group.acceptance.cap(PAUSED_VERDICTS)
        num_rounds = int(self.costs.rounds_per_step(self.costs.model_seconds(shape)))
        num_rounds = max(MIN_EXPLORED_ROUNDS, min(num_rounds, MAX_EXPLORED_ROUNDS))
        return Exploration(key, name, decision, shape, num_drafting, catch_up, num_rounds)

    def _neighbours(self, best: Best) -> list[int]:
        """Options to explore beside the active one."""
        option = best.decision.option
        if option == 0:
            return [ANY_LENGTH]
        early_exit = [EARLY_EXIT] if best.early_exit is not None else []
        if option == EARLY_EXIT:
            return [best.drafting.shape.option, 0]
        return [0, *(length for length in (option + 1, option - 1) if 1 <= length <= MAX_LENGTH), *early_exit]

    def _scouts(self, num_rows: int, rows: Sequence[DraftRow], best: Best) -> tuple[list[int], float]:
        """Places of the rows that draft while drafting is off, and the seconds of catching up: all of them as
        long as nothing is known of the costs, else those whose caches are brought up to date in a round."""
        missing = [row.num_missing() for row in rows]
        places = sorted(range(len(rows)), key=missing.__getitem__)
        num_missing, num_scouts = 0, 0
        is_known = self.costs.is_measured(num_rows, best.drafting.shape.option)
        for place in places:
            longer = num_missing + missing[place]
            if num_scouts and is_known and self.costs.catch_up_seconds(longer) > best.plain.seconds:
                break
            num_missing, num_scouts = longer, num_scouts + 1
        return places[:num_scouts], self.costs.catch_up_seconds(num_missing)

    def observe(
        self,
        num_rounds: int,
        num_tokens: int,
        num_drafted: int,
        round_seconds: list[float] | None,
        host_seconds: float,
        seconds: float,
        shape: Shape | None = None,
    ) -> None:
        """A step of ``num_rounds`` has emitted ``num_tokens`` in ``seconds``.

        ``round_seconds``: wall time of each round, None if they were not as decided; ``host_seconds``: the
        rest of the step. ``shape``: of the rounds, if look-ups have drafted.
        """
        best = self.best
        if best is None:
            return
        self.now += seconds
        self._num_rounds += num_rounds
        self._seconds += seconds
        exploration = self.exploration
        if round_seconds is not None:
            self._observe_seconds(best, round_seconds, host_seconds, shape)
            plain_seconds = self.costs.seconds(best.plain.shape)
            num_rows = best.plain.shape.num_rows
            self.report.add(
                num_tokens,
                sum(round_seconds) + host_seconds,
                num_rounds * num_rows,
                num_rounds * plain_seconds,
                num_rounds * num_rows,
                num_drafted,
            )
        if exploration is None:
            self.budget.save(seconds, best.active.seconds)
            return
        exploration.num_rounds += num_rounds
        exploration.num_tokens += num_tokens
        exploration.is_timed |= round_seconds is not None
        exploration.rounds_left -= num_rounds
        if exploration.rounds_left <= 0:
            self._settle(exploration, best)

    def _observe_seconds(
        self, best: Best, round_seconds: list[float], host_seconds: float, shape: Shape | None
    ) -> None:
        first, *others = round_seconds
        usual = median(others) if others else first
        # The first round of several finds the caches full of what the host did: that is the step's overhead.
        self.costs.observe_overhead(best.plain.shape.num_rows, host_seconds + max(0.0, first - usual))
        exploration = self.exploration
        if shape is not None:
            self.costs.observe(shape, usual, is_same=False)
        elif exploration is not None:
            if exploration.decision.scouts is None:
                self.costs.observe(exploration.shape, usual, is_same=False)
        else:
            option = best.decision.option
            self.costs.observe(best.active.shape, usual, is_same=self._timed_option in (None, option))
            self._timed_option = option

    def _settle(self, exploration: Exploration, best: Best) -> None:
        """Pay for an exploration that has ended, and see what came of it."""
        num_rows, num_rounds = best.plain.shape.num_rows, exploration.num_rounds
        active = best.active.tokens / self.costs.seconds(best.active.shape)
        seconds = self.costs.seconds(exploration.shape)
        lost = num_rounds * seconds + exploration.catch_up_seconds - exploration.num_tokens / active
        self.budget.spend(lost)
        self._repeats = False
        if exploration.name[1] == ANY_LENGTH:
            # What a row that drafts must emit for all of them together to be faster than without drafts.
            num_plain = num_rows - exploration.key[1]
            full = self.costs.seconds(even_shape(*exploration.key, exploration.decision.length))
            needed = (active * full - num_plain) / exploration.key[1]
            num_scouts = exploration.num_drafting
            emitted = exploration.num_tokens - num_rounds * (num_rows - num_scouts)
            self._repeats = emitted > num_rounds * num_scouts * needed
            self.explorer.settle(exploration.name, self._repeats, self.now)
        elif exploration.is_timed:
            option = exploration.decision.option
            if option == EARLY_EXIT and best.early_exit is not None:
                rate = best.early_exit[1].tokens / seconds
            else:
                rate = self.estimate(num_rows, best.groups, option).rate
            self.explorer.settle(exploration.name, rate > active, self.now)
        self.exploration = None
        self._is_due = True

    def state(self) -> dict[str, object]:
        """For ``GET /speculation``: builtins."""
        best, report = self.best, self.report
        if best is None:
            return {"on": None, "why": "no step has run yet"}
        return {
            "on": best.decision.option > 0,
            "why": why(best),
            "draft_length": {
                "last": best.decision.length,
                "recent_mean": round(report.drafted / report.rows, 2) if report.rows else 0.0,
            },
            "early_exit": {
                "on": best.decision.option == EARLY_EXIT,
                "acceptance": {group.name: group.confidence.state() for group in best.groups},
            },
            "predicted_speedup": round(best.active.rate / best.plain.rate, 3),
            "tokens_per_second": {
                "achieved": _rate(report.tokens, report.seconds),
                "plain": _rate(report.plain_tokens, report.plain_seconds),
            },
            "costs": self.costs.state(),
            "explorations": self.explorer.num_run,
        }


def why(best: Best) -> str:
    """What drafting is expected to bring, in a sentence."""
    drafting = best.active if best.decision.option else best.drafting
    if drafting is best.plain:
        return "off: no row may draft with the draft model"
    verdict = "on" if best.decision.option else "off: the best draft does not pay"
    num_rows, drafted = drafting.shape.num_rows, drafting.shape.num_drafted
    return (
        f"{verdict}: drafting {drafted:.3g} tokens for {num_rows} rows is expected to give "
        f"{drafting.tokens / best.plain.tokens:.2f} times the tokens of a plain round in "
        f"{drafting.seconds / best.plain.seconds:.2f} times its time"
    )


def _rate(tokens: float, seconds: float) -> float:
    return round(tokens / seconds, 1) if seconds else 0.0

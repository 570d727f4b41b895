"""Rounds that try something else, so that a decision once made can be undone by what they find.

Probes are paid from an account. Every round adds a small share of its time; a probe is charged what it
really lost against the plan in force: its time, the host's own for it included, less the time in which the
plan emits as many tokens. A probe that paid for itself, catching up apart, or was accepted to its end is
repeated at once, so that drafting is back within a few rounds after the text got easy; the others wait.
Whatever the text does, probing costs no more than its share.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from engine.draft_length.learning import Round
from engine.draft_length.plan import Plan, Search

# Share of the time for probes while drafting is off and while it is on, when every round tells how far drafts
# survive; and for how many rounds it is saved up.
SHARE, SHARE_ON = 0.005, 0.004
SAVED_ROUNDS, SAVED_ROUNDS_ON = 192, 512
# A probe is saved for if it is to lose at most this share of that.
SAVEABLE = 0.75
# What the account starts with: nothing is known about the text yet.
START_ROUNDS = 4
# Rounds between probes that did not pay, and a few of them: after good signs, or where little can be lost.
INTERVAL = 64
RETRY = 8
# While drafting is on, what is left to learn are the costs of other lengths, which change slowly: after so
# many probes next to the same plan they come seldom. Where rounds are short, every so many seconds: a probe
# begins with a look.
NEW_PROBES, SOON, SELDOM = 16, 32, 128
SOON_SECONDS, INTERVAL_SECONDS = 0.3, 1.0
# Tokens that a probe drafts for rows that are off. Two: the second token tells whether it is worth getting
# past the first.
PROBE_LENGTH = 2

# Drafting that is expected to lose less than this is tried again soon: it costs next to nothing, and an
# unlucky run of rejections must not switch off what is really a gain. Every time that it loses again, the
# next one waits twice as long.
CLOSE = 0.9
MAX_REPEATS = 4
# What succeeded so often in a row has changed the estimates, or is not worth more.
MAX_SUCCESSES = 6
MOSTLY = 0.7

# A longer draft is tried by one token, whose costs are needed, and by two, which tell how far drafts survive.
KINDS = ("longer", "shorter", "further", "longer", "shorter", "plain", "rest")

# A probe of so short rounds has two of them: the first finds the processor's caches full of what the host did
# in between. So has one of plain rounds, if they are so short that they share steps. What loses little has
# more, as many as fit a step: its second round alone tells times to a tenth, and lengths differ by less.
SHORT_ROUND, PROBE_ROUNDS, MOST_PROBE_ROUNDS = 0.005, 2, 8

# What promises less than this many times the rate of plain steps needs so many of those to compare with.
LITTLE, ENOUGH_PLAIN = 1.3, 4


class Probes:
    def __init__(self) -> None:
        self.credit: float | None = None  # until the first round has been measured
        self.num_run = 0
        self._running: Plan | None = None
        self._begun = 0  # round
        self._seconds_again = 0.0
        self._missing: float | None = None  # of the cheapest that was not affordable
        self._close_wait = RETRY  # rounds
        self._repeat: list[int] = []  # lengths to try once more
        self._succeeded = False
        self._next_round = self._next_close = RETRY
        self._kind = 0
        self._repeats = self._successes = 0
        # Probes by rows and length of the plan in force; plain ones by rows.
        self._num_beside: Counter[tuple[int, int]] = Counter()
        self._num_plain: Counter[int] = Counter()

    @property
    def is_running(self) -> bool:
        """Whether the last rounds, since it began, have tried something else."""
        return self._running is not None

    def next_round(self, found: Search) -> int:
        """From which round on something else may be tried."""
        return min(self._next_round, self._next_close) if is_close(found) else self._next_round

    def candidates(
        self, found: Search, limits: list[int], ages: list[int], lags: list[int]
    ) -> Iterator[list[int]]:
        """What to try, the most telling first. ``ages``: rounds since a row, or all like it, drafted.
        ``lags``: tokens that its draft cache misses."""
        lengths = found.best.lengths
        if len(self._repeat) == len(lengths) and (self._repeats or not any(lengths)):
            yield [min(length, limit) for length, limit in zip(self._repeat, limits, strict=True)]
        if not any(lengths):
            if found.best_drafting is not None and is_close(found):
                yield found.best_drafting.lengths
            yield from _wake(lengths, limits, ages, lags)
            return
        if self._kind % 2 and self._needs_plain(found):
            yield [0] * len(lengths)
        for turn in range(len(KINDS)):
            kind = KINDS[(self._kind + turn) % len(KINDS)]
            if kind == "rest":
                yield from _wake(lengths, limits, ages, lags)
            elif kind in ("longer", "further"):
                added = 1 if kind == "longer" else PROBE_LENGTH
                longer = [
                    max(length, min(length + added, limit)) if length else 0
                    for length, limit in zip(lengths, limits, strict=True)
                ]
                if longer != lengths:
                    yield longer
            elif kind == "shorter":
                if max(lengths) > 1:
                    yield [max(1, length - 1) if length else 0 for length in lengths]
            else:
                yield [0] * len(lengths)

    def can_afford(self, plan: Plan, again: Plan, best: Plan, num_rounds: int = 1) -> bool:
        """Whether the account covers what ``plan`` may lose in so many rounds, of which all but the first are
        as ``again``; or it has just succeeded."""
        on_credit = self._succeeded and plan.lengths == self._repeat
        loss = plan.seconds + (num_rounds - 1) * again.seconds - num_rounds * plan.tokens / best.rate
        if self.credit is not None and (loss <= self.credit or on_credit):
            return True
        missing = loss - (self.credit or 0.0)
        self._missing = missing if self._missing is None else min(missing, self._missing)
        return False

    def num_rounds(self, plan: Plan, best: Plan, sharing: int) -> int:
        """How many rounds a probe of ``plan`` has, if ``sharing`` of them fit a step."""
        most = min(sharing, MOST_PROBE_ROUNDS)
        if most > PROBE_ROUNDS and any(best.lengths):
            _, full = self._saving(best)
            if most * (plan.seconds - plan.tokens / best.rate) < SAVEABLE * full:
                return most
        is_short = best.seconds < SHORT_ROUND or (sharing > 1 and not any(plan.lengths))
        return PROBE_ROUNDS if is_short else 1

    @staticmethod
    def _saving(best: Plan) -> tuple[float, float]:
        """Seconds that every round adds, and the most that is saved."""
        is_on = any(best.lengths)
        seconds = (SHARE_ON if is_on else SHARE) * best.seconds
        return seconds, (SAVED_ROUNDS_ON if is_on else SAVED_ROUNDS) * seconds

    def interval(self, found: Search) -> int:
        """Rounds from one probe to the next while drafting is on."""
        if self._needs_plain(found):
            return RETRY
        if self._num_beside[_beside(found)] < NEW_PROBES:
            return max(SOON, int(SOON_SECONDS / found.best.seconds))
        return max(INTERVAL, int(INTERVAL_SECONDS / found.best.seconds))

    def _needs_plain(self, found: Search) -> bool:
        """A gain that is not large is only as real as the plain step that it is compared with, which is
        measured by nothing but probes while drafting is on."""
        is_little = found.best.rate < LITTLE * found.plain.rate
        return is_little and self._num_plain[len(found.best.lengths)] < ENOUGH_PLAIN

    def begin(self, plan: Plan, seconds_again: float, current_round: int) -> None:
        """Run ``plan`` from this round on. ``seconds_again``: what it would take the next time, with nothing
        to catch up with."""
        self._running, self._seconds_again, self._missing = plan, seconds_again, None
        self._begun = current_round
        self.num_run += 1

    def postpone(self, current_round: int, found: Search) -> None:
        """Nothing was affordable: not before the account has saved enough."""
        # While drafting is off nothing else would notice that times have changed.
        is_on = any(found.best.lengths)
        share, most = (SHARE_ON, SAVED_ROUNDS) if is_on else (SHARE, INTERVAL)
        wait = INTERVAL if self._missing is None else int(self._missing / (share * found.best.seconds))
        least = self.interval(found) if is_on else 2 * RETRY
        self._next_round = self._next_close = current_round + max(least, min(wait, most))
        self._missing = None

    def stop(self) -> None:
        """Nothing came of the probe that was running: its rows have left."""
        self._running = None

    def save(self, found: Search, num_rounds: int) -> None:
        """After some rounds."""
        seconds, full = self._saving(found.best)
        if self.credit is None:
            self.credit = START_ROUNDS * found.best.seconds
        elif self.credit < full:
            self.credit = min(self.credit + num_rounds * seconds, full)

    def settle(self, current_round: int, found: Search, rounds: Sequence[Round], usual_host: float) -> None:
        """Pay for the probe that the last ``rounds`` were, up to ``current_round``. Others take the host
        ``usual_host`` seconds each."""
        best = found.best
        assert self._running is not None
        assert self.credit is not None
        num_rounds, num_emitted = len(rounds), sum(one.num_emitted for one in rounds)
        extra, last = 0.0, rounds[-1].seconds
        if last is not None:
            # No more than a round: a machine that was busy for a moment is not the probe's fault.
            extra = min(max(num_rounds * (last.host - usual_host), 0.0), best.seconds)
        seconds_again = num_rounds * self._seconds_again
        seconds = self._running.seconds - self._seconds_again + seconds_again
        worth = num_emitted / best.rate
        lengths = self._running.lengths
        is_off = not any(best.lengths)
        # While drafting is on it is known what they emit, but for luck.
        usual = worth if is_off else num_rounds * self._running.tokens / best.rate
        self.credit -= seconds + extra - usual
        self._num_beside[_beside(found)] += 1
        self._num_plain[len(best.lengths)] += not any(lengths)
        # A lone row's draft seldom pays for what it does to the others, but says that times have changed.
        all_accepted = num_emitted == num_rounds * (len(lengths) + sum(lengths)) > num_rounds * len(lengths)
        self._succeeded = worth > seconds_again or (is_off and all_accepted)
        self._running, self._repeat = None, []
        self._repeats += 1
        self._successes += self._succeeded
        # While drafting is on, every round tells how far drafts survive, and costs are learned as well later.
        most = MAX_SUCCESSES if self._succeeded and is_off else MAX_REPEATS if is_close(found) else 0
        if self._repeats < most:
            # Bringing the draft's cache up to date was the expensive part; another round is cheap now.
            self._next_round = current_round + 1
            self._repeat = lengths
        else:
            # One that mostly succeeds while drafting is off goes on soon, as far as the account pays for it.
            goes_on = is_off and self._successes >= MOSTLY * self._repeats
            self._close_wait = RETRY if goes_on or not is_off else min(2 * self._close_wait, SELDOM)
            if is_off:
                self._next_round = current_round + (RETRY if goes_on else INTERVAL)
            else:
                wait = self.interval(found) if self.credit > 0.0 else SELDOM
                self._next_round = max(self._begun + wait, current_round + 1)
            self._repeat = lengths if goes_on else []
            self._succeeded = False
            self._successes = 0
            self._next_close = current_round + self._close_wait
            self._kind = 0 if is_off else self._kind + 1
            self._repeats = 0

    def state(self) -> dict[str, object]:
        return {"num_run": self.num_run, "credit_ms": round(1000 * (self.credit or 0.0), 3)}


def _beside(found: Search) -> tuple[int, int]:
    """The plan in force, as probes next to it are counted."""
    return len(found.best.lengths), max(found.best.lengths)


def is_close(found: Search) -> bool:
    """Whether drafting is off, but about as good as on."""
    drafting = found.best_drafting
    return found.best is found.plain and drafting is not None and drafting.rate > CLOSE * found.plain.rate


def _wake(lengths: list[int], limits: list[int], ages: list[int], lags: list[int]) -> Iterator[list[int]]:
    """Short drafts for rows that have been off for long: all of them, or one. The one with the least to catch
    up with, which thus never has much: a scout that stays affordable however long drafting has been off."""
    due = [
        i
        for i, (length, limit, age) in enumerate(zip(lengths, limits, ages, strict=True))
        if length == 0 and limit > 0 and age >= INTERVAL
    ]
    for length in (PROBE_LENGTH, 1):
        if due:
            yield _with(lengths, due, length, limits)
    if len(due) > 1:
        scout = [min(due, key=lambda i: lags[i])]
        for length in (PROBE_LENGTH, 1):
            yield _with(lengths, scout, length, limits)


def _with(lengths: list[int], rows: list[int], length: int, limits: list[int]) -> list[int]:
    changed = list(lengths)
    for row in rows:
        changed[row] = min(length, limits[row])
    return changed

"""Rounds that try something else, so that a decision once made can be undone by what they find.

Probes are paid from an account. Every round adds a small share of its time; a probe is charged what it
really lost against the plan in force: its time, less the time in which the plan emits as many tokens. A
probe that paid for itself, catching up apart, or was accepted to its end is repeated at once, so that
drafting is back within a few rounds after the text got easy; the others wait. Whatever the text does, probing
costs no more than its share.
"""

from collections.abc import Iterator

from engine.draft_length.plan import Plan, Search

# Share of the time for probes, and for how many rounds it is saved up.
SHARE = 0.012
SAVED_ROUNDS = 128
# Rounds between probes that did not pay, and until one that is too expensive is looked at again.
INTERVAL = 64
RETRY = 8
# While drafting is on, every round tells how far drafts survive. What is left to learn are the costs of other
# lengths, which change slowly: after so many probes they come seldom.
NEW_PROBES, SELDOM = 8, 128
# Tokens that a probe drafts for rows that are off, and adds for rows that are on. Two: the second token
# tells whether it is worth getting past the first.
PROBE_LENGTH = 2

# Drafting that is expected to lose less than this is tried again soon: it costs next to nothing, and an
# unlucky run of rejections must not switch off what is really a gain.
CLOSE = 0.9
MAX_REPEATS = 4
# What succeeded so often in a row has changed the estimates, or is not worth more.
MAX_SUCCESSES = 6

KINDS = ("rest", "longer", "plain")


class Probes:
    def __init__(self) -> None:
        self.credit: float | None = None  # full at first: nothing is known about the text yet
        self.num_run = 0
        self._running: Plan | None = None
        self._seconds_again = 0.0
        self._repeat: list[int] = []  # lengths to try once more
        self._succeeded = False
        self._next_round, self._last_round = RETRY, 0
        self._kind = 0
        self._repeats = 0

    @property
    def is_running(self) -> bool:
        """Whether this round tries something else."""
        return self._running is not None

    def may_run(self, current_round: int, found: Search) -> bool:
        if is_close(found):
            return current_round >= min(self._next_round, self._last_round + RETRY)
        return current_round >= self._next_round

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
        for turn in range(len(KINDS)):
            kind = KINDS[(self._kind + turn) % len(KINDS)]
            if kind == "rest":
                yield from _wake(lengths, limits, ages, lags)
            elif kind == "longer":
                longer = [
                    max(length, min(length + PROBE_LENGTH, limit)) if length else 0
                    for length, limit in zip(lengths, limits, strict=True)
                ]
                if longer != lengths:
                    yield longer
            else:
                yield [0] * len(lengths)

    def begin(self, plan: Plan, seconds_again: float, best: Plan) -> bool:
        """Run ``plan`` this round if the account covers what it is expected to lose, or if it has just
        succeeded. ``seconds_again``: what it would take the next time, with nothing to catch up with."""
        on_credit = self._succeeded and plan.lengths == self._repeat
        if self.credit is None or (plan.seconds - plan.tokens / best.rate > self.credit and not on_credit):
            return False
        self._running, self._seconds_again = plan, seconds_again
        self.num_run += 1
        return True

    def postpone(self, current_round: int) -> None:
        """Nothing was affordable."""
        self._next_round = current_round + RETRY
        self._last_round = current_round

    def settle(self, current_round: int, found: Search, num_emitted: int) -> None:
        """After every round: save, and pay for the probe if this was one."""
        best = found.best
        full = SHARE * SAVED_ROUNDS * best.seconds
        self.credit = full if self.credit is None else min(self.credit + SHARE * best.seconds, full)
        if self._running is None:
            return
        worth = num_emitted / best.rate
        self.credit -= self._running.seconds - worth
        lengths = self._running.lengths
        # A lone row's draft seldom pays for what it does to the others, but says that times have changed.
        is_off = not any(best.lengths)
        all_accepted = num_emitted == len(lengths) + sum(lengths) > len(lengths)
        self._succeeded = worth > self._seconds_again or (is_off and all_accepted)
        self._running, self._repeat = None, []
        self._last_round = current_round
        self._repeats += 1
        if self._repeats < (MAX_SUCCESSES if self._succeeded else MAX_REPEATS if is_close(found) else 0):
            # Bringing the draft's cache up to date was the expensive part; another round is cheap now.
            self._next_round = current_round + 1
            self._repeat = lengths
        else:
            # One that keeps succeeding while drafting is off goes on soon, as far as the account pays for it.
            goes_on = self._succeeded and is_off
            is_seldom = not is_off and self.num_run >= NEW_PROBES
            self._next_round = current_round + (RETRY if goes_on else SELDOM if is_seldom else INTERVAL)
            self._repeat = lengths if goes_on else []
            self._succeeded = False
            self._kind += 1
            self._repeats = 0

    def state(self) -> dict[str, object]:
        return {"num_run": self.num_run, "credit_ms": round(1000 * (self.credit or 0.0), 3)}


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
        yield _with(lengths, [min(due, key=lambda i: lags[i])], PROBE_LENGTH, limits)


def _with(lengths: list[int], rows: list[int], length: int, limits: list[int]) -> list[int]:
    changed = list(lengths)
    for row in rows:
        changed[row] = min(length, limits[row])
    return changed

"""When to try something else: a small share of the time, less often the longer it loses.

An exploration is charged what it lost: its time, less the time in which the active option emits as many
tokens. The next one waits until the budget has been saved again, and until its own back-off is over.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

# Share of the time for draft lengths that are not active, and for reading texts that may repeat themselves.
LENGTH_SHARE, LOOKUP_SHARE = 0.004, 0.002
# A budget starts with so many rounds' worth of time, and saves no more than that.
SAVED_ROUNDS = 8
# Seconds until an option that has lost is tried again: doubled every time up to the last one.
FIRST_WAIT, LAST_WAIT = 0.25, 4.0
# Rounds of an exploration: the first ones find cold caches, and one alone is timed to a tenth.
MIN_EXPLORED_ROUNDS, MAX_EXPLORED_ROUNDS = 2, 8


Name = tuple[int, int]


class Budget:
    """Seconds, a ``share`` of all. It may be overdrawn by one exploration, which the next ones then pay."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.seconds: float | None = None

    @property
    def is_open(self) -> bool:
        return self.seconds is not None and self.seconds > 0

    def save(self, seconds: float, round_seconds: float) -> None:
        """``seconds`` have passed in rounds of ``round_seconds`` each."""
        full = SAVED_ROUNDS * round_seconds
        before = full if self.seconds is None else self.seconds
        self.seconds = min(before + self.share * seconds, max(full, before))

    def spend(self, seconds: float) -> None:
        self.seconds = (self.seconds or 0.0) - seconds


@dataclass
class Explorer:
    """Back-off of each option, by number of rows (their bucket) and option."""

    num_run: int = 0
    _due: dict[Name, float] = field(default_factory=dict)
    _wait: dict[Name, float] = field(default_factory=dict)

    def next(self, names: Iterable[Name], now: float) -> Name | None:
        """The one that has waited longest, of those that are due."""
        due, _, name = min((self._due.get(name, 0.0), place, name) for place, name in enumerate(names))
        return name if due <= now else None

    def is_new(self, name: Name) -> bool:
        """Whether it was never explored."""
        return name not in self._due

    def settle(self, name: Name, succeeded: bool, now: float) -> None:
        self.num_run += 1
        wait = FIRST_WAIT if succeeded else min(2 * self._wait.get(name, FIRST_WAIT / 2), LAST_WAIT)
        self._wait[name] = wait
        self._due[name] = now if succeeded else now + wait

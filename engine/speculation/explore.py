"""When to try something else: a small share of the time, and less often the longer it loses."""

from collections.abc import Iterable

# The share of time of each budget: one is for other draft lengths, one for reading texts that may repeat
# themselves. It starts with so many rounds' worth of time, and saves no more than that.
SHARE, SAVED_ROUNDS = 0.004, 8
# Seconds until an option that has lost is explored again: doubled every time up to the last one, if it has
# less than this share of the active option's rate.
FIRST_WAIT, LAST_WAIT, CLOSE = 0.25, 4.0, 0.9

Name = tuple[int, int]  # bucket of rows, option


class Budget:
    """Seconds to explore. An exploration is charged what it lost; one may overdraw the budget, which the next
    ones have to wait for."""

    def __init__(self) -> None:
        self.seconds: float | None = None

    @property
    def is_open(self) -> bool:
        return self.seconds is not None and self.seconds > 0

    def save(self, seconds: float, round_seconds: float) -> None:
        """``seconds`` have passed in rounds of ``round_seconds`` each."""
        full = SAVED_ROUNDS * round_seconds
        self.seconds = min(full if self.seconds is None else self.seconds + SHARE * seconds, full)

    def spend(self, seconds: float) -> None:
        self.seconds = (self.seconds or 0.0) - seconds


class BackOff:
    """Which options may be explored when."""

    def __init__(self) -> None:
        self.num_settled = 0
        self._due: dict[Name, float] = {}
        self._wait: dict[Name, float] = {}

    def next(self, names: Iterable[Name], now: float) -> Name | None:
        """The one that has waited longest, of those that are due."""
        name = min(names, key=lambda name: self._due.get(name, 0.0))
        return name if self._due.get(name, 0.0) <= now else None

    def is_new(self, name: Name) -> bool:
        return name not in self._due

    def settle(self, name: Name, ratio: float, now: float) -> None:
        """An exploration has ended; ``ratio``: the option's rate over the active one's."""
        self.num_settled += 1
        wait = 0.0 if ratio > 1 else FIRST_WAIT
        if ratio < CLOSE:
            wait = min(2 * self._wait.get(name, 0.0) or FIRST_WAIT, LAST_WAIT)
        self._wait[name], self._due[name] = wait, now + wait

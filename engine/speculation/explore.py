"""Says when to try another plan than the active one: each option gets a share of time that it may lose."""

from collections.abc import Sequence

# Share of the time that may be lost by exploring one option, reading texts that may repeat themselves
# included; and by trying whether drafting pays while it is off.
OPTION_SHARE, PAUSED_SHARE = 0.0015, 0.005
# Seconds between two explorations of the same option, at least.
MIN_WAIT = 0.25


class Explorer:
    """Knows when each option is due. One that was never explored is due at once, its first time is free."""

    def __init__(self) -> None:
        self.num_explored = 0
        self._due: dict[object, float] = {}

    def next(self, names: Sequence[object], now: float) -> int | None:
        """Returns the index of the option that has been due for longest; None if none is."""
        due = [self._due.get(name, 0.0) for name in names]
        earliest = min(due)
        return due.index(earliest) if earliest <= now else None

    def charge(self, name: object, lost: float, share: float, now: float) -> None:
        """Notes that exploring has cost ``lost`` seconds: the option is due again when that is its
        ``share``."""
        wait = lost / share if name in self._due else 0.0
        self._due[name] = now + max(MIN_WAIT, wait)
        self.num_explored += 1

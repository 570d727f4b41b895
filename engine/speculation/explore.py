"""Says when to try another plan than the active one: each option gets a share of time that it may lose."""

from collections.abc import Mapping
from typing import TypeVar

# Share of the time that may be lost by exploring one option, reading texts that may repeat themselves
# included; and by trying whether drafting pays while it is off.
OPTION_SHARE, PAUSED_SHARE = 0.0015, 0.005
# Seconds between two explorations of the same option, at least.
MIN_WAIT = 0.25

Name = TypeVar("Name")


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

"""Decides who goes next where work has to wait: work is bounded, and the line is fair between keys.

Knows nothing of what the work is. Used for the front end's threads and for grammars that are compiled.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from truedraft.server.errors import QueueFullError


@dataclass(eq=False, slots=True)
class _Waiter:
    weight: int
    place: int  # what its line will have been served when it goes, if nothing lighter comes
    charge: int  # what its line is served with it
    granted: asyncio.Future[None]


@dataclass(slots=True)
class _Line:
    """Each key has a line. ``served`` is the weight of its work so far, by which lines are compared, and
    ``num_at_work`` how many pieces of it have not ended, wanted or not."""

    key: str
    served: int = 0
    num_at_work: int = 0
    waiting: list[_Waiter] = field(default_factory=list)

    def next_waiter(self) -> _Waiter:
        return min(self.waiting, key=lambda each: each.place)


class Turns:
    """Work begins while what is at work weighs ``capacity`` at most and is ``parallel`` pieces at most.

    What weighs more than most of that counts as most of it, so that small work still fits in. The line
    of the key that was served least goes first, and in it the lightest; what waits gets lighter as others of
    its line are served: so a small piece waits for none of the large ones before it, and a large one not
    for ever. What goes on with work that has had its turn is not charged again. A key with work that has not
    ended leaves the last of ``parallel`` and a part of ``capacity`` to keys that have none. ``max_waiting``
    bounds the lines together; a key within its even share of that is let in anyhow.
    """

    def __init__(self, what: str, capacity: int, parallel: int, max_waiting: int) -> None:
        self._what = what
        self._capacity = capacity
        self._parallel = parallel
        self._max_waiting = max_waiting
        self._lines: dict[str, _Line] = {}
        self._now = 0  # ``served`` of the line that went last
        self.weight_at_work = 0
        self.num_at_work = 0

    @property
    def num_waiting(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    async def begin(
        self, weight: int, key: str = "", *, may_refuse: bool = True, goes_on: bool = False
    ) -> "Turn":
        """Wait for the turn, which has to be ended; ``QueueFullError`` if too much waits. What ``goes_on``
        has had a turn before: it is not charged or refused."""
        weight = min(weight, self._most_for_one_key)
        line = self._lines.setdefault(key, _Line(key))
        if not line.waiting:
            line.served = max(line.served, self._now)
        granted = asyncio.get_running_loop().create_future()
        waiter = _Waiter(weight, line.served + weight, 0 if goes_on else weight, granted)
        line.waiting.append(waiter)
        self._go_on()
        try:
            if may_refuse and not goes_on and not waiter.granted.done():
                self._check_room(line)
            await waiter.granted
        except BaseException:
            if waiter in line.waiting:
                line.waiting.remove(waiter)
                self._go_on()
            elif waiter.granted.done() and not waiter.granted.cancelled():
                self._end(line, weight)
            raise
        return Turn(lambda: self._end(line, weight))

    @property
    def _most_for_one_key(self) -> int:
        return self._capacity * 3 // 4

    def _check_room(self, line: _Line) -> None:
        num_lines = sum(bool(each.waiting) for each in self._lines.values())
        if self.num_waiting > self._max_waiting and len(line.waiting) * num_lines > self._max_waiting:
            raise QueueFullError(
                f"{self.num_waiting - 1} requests wait for {self._what} (max_queued_sequences). "
                "Try again later."
            )

    def _go_on(self) -> None:
        while (line := self._next_line()) is not None:
            waiter = line.next_waiter()
            line.waiting.remove(waiter)
            self._now = line.served
            line.served += waiter.charge
            if waiter.granted.done():
                continue  # given up a moment ago
            self.weight_at_work += waiter.weight
            self.num_at_work += 1
            line.num_at_work += 1
            waiter.granted.set_result(None)

    def _next_line(self) -> _Line | None:
        """Returns the line whose first piece can begin now. A key without any work that does not fit holds up
        all others, so that what it waits for becomes free; one with some only itself."""
        lines = [line for line in self._lines.values() if line.waiting]
        for line in sorted(lines, key=lambda each: each.served):
            capacity, parallel = self._capacity, self._parallel
            if line.key and line.num_at_work:
                capacity, parallel = self._most_for_one_key, max(1, parallel - 1)
            fits = self.weight_at_work + line.next_waiter().weight <= capacity
            if fits and self.num_at_work < parallel:
                return line
            if not line.num_at_work:
                return None
        return None

    def _end(self, line: _Line, weight: int) -> None:
        self.weight_at_work -= weight
        self.num_at_work -= 1
        line.num_at_work -= 1
        if not self.num_at_work and not self.num_waiting:
            self._lines.clear()
            self._now = 0
        self._go_on()


class Turn:
    """Has to be ended once, in the event loop's thread."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.end()

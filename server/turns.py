"""Decides who goes next where work has to wait: work is bounded, and the line is fair between keys.

Knows nothing of what the work is. Used for the front end's threads and for grammars that are compiled.
"""

import asyncio
from dataclasses import dataclass, field

from truedraft.server.errors import QueueFullError


@dataclass(eq=False, slots=True)
class _Waiter:
    weight: int
    place: int  # what its line will have been served when it goes, if nothing lighter comes
    granted: asyncio.Future[None]


@dataclass(slots=True)
class _Line:
    """Each key has a line. ``served`` is the weight of its work so far, by which lines are compared."""

    served: int = 0
    waiting: list[_Waiter] = field(default_factory=list)


class Turns:
    """Work begins while what is at work weighs ``capacity`` at most and is ``parallel`` pieces at most.

    What weighs more than most of that counts as most of it, so that small work still fits in. The line
    of the key that was served least goes first, and in it the lightest; what waits gets lighter as others of
    its line are served: so a small piece waits for none of the large ones before it, and a large one not
    for ever. ``max_waiting`` bounds the lines together; a key within its even share of that is let in anyhow.
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

    async def begin(self, weight: int, key: str = "", *, may_refuse: bool = True) -> "Turn":
        """Wait for the turn, which has to be ended; ``QueueFullError`` if too much waits."""
        weight = min(weight, self._capacity * 3 // 4)
        line = self._lines.setdefault(key, _Line())
        if not line.waiting:
            line.served = max(line.served, self._now)
        waiter = _Waiter(weight, line.served + weight, asyncio.get_running_loop().create_future())
        line.waiting.append(waiter)
        self._go_on()
        try:
            if may_refuse and not waiter.granted.done():
                self._check_room(line)
            await waiter.granted
        except BaseException:
            if waiter in line.waiting:
                line.waiting.remove(waiter)
                self._go_on()
            elif waiter.granted.done() and not waiter.granted.cancelled():
                self._end(weight)
            raise
        return Turn(self, weight)

    def _check_room(self, line: _Line) -> None:
        num_lines = sum(bool(each.waiting) for each in self._lines.values())
        if self.num_waiting > self._max_waiting and len(line.waiting) * num_lines > self._max_waiting:
            raise QueueFullError(
                f"{self.num_waiting - 1} requests wait for {self._what} (max_queued_sequences). "
                "Try again later."
            )

    def _go_on(self) -> None:
        while lines := [line for line in self._lines.values() if line.waiting]:
            line = min(lines, key=lambda each: each.served)
            waiter = min(line.waiting, key=lambda each: each.place)
            is_full = self.weight_at_work + waiter.weight > self._capacity
            if is_full or self.num_at_work >= self._parallel:
                return
            line.waiting.remove(waiter)
            self._now = line.served
            line.served += waiter.weight
            if waiter.granted.done():
                continue  # given up a moment ago
            self.weight_at_work += waiter.weight
            self.num_at_work += 1
            waiter.granted.set_result(None)

    def _end(self, weight: int) -> None:
        self.weight_at_work -= weight
        self.num_at_work -= 1
        if not self.num_at_work and not self.num_waiting:
            self._lines.clear()
            self._now = 0
        self._go_on()


class Turn:
    """Has to be ended once, in the event loop's thread."""

    def __init__(self, turns: Turns, weight: int) -> None:
        self._turns = turns
        self._weight = weight

    def end(self) -> None:
        self._turns._end(self._weight)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.end()

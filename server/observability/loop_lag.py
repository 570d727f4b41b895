"""Measures how late the event loop is, and names the function that holds it.

A thread asks the loop for a sign of life, again and again. Each one tells how long the loop took to get to
it: that is how long a request that came then had to wait. While one is overdue, the thread looks at what
the loop's thread executes. It knows nothing of requests.
"""

import asyncio
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

logger = logging.getLogger("truedraft.loop")

# Seconds between two signs of life.
PERIOD = 0.1
# Seconds between two looks at the stack while a sign of life is overdue.
LOOK_PERIOD = 0.02
# Functions of a stack that are named, the innermost first.
NUM_NAMED = 4
PACKAGE = str(Path(__file__).parents[2])
# Functions of asyncio's that run everything else.
LOOP_FILE = asyncio.base_events.__file__


class Lag(NamedTuple):
    """Says how late the loop was with one sign of life.

    ``cpu_seconds`` is the part in which its thread computed: the rest went to other threads and processes.
    ``where`` names the functions that were seen most often at work meanwhile, the innermost first; it is
    empty for a short lag.
    """

    seconds: float
    cpu_seconds: float
    where: str = ""


class LoopMonitor:
    """``start`` it on the loop that it watches, and ``stop`` it there.

    ``report`` gets every lag, short ones too, on the loop. ``on_late`` is called by the monitor's own
    thread, while the loop is still held: after ``late_after`` seconds, and whenever that time has doubled.
    """

    def __init__(
        self,
        report: Callable[[Lag], None] | None = None,
        *,
        late_after: float = 0.05,
        on_late: Callable[[Lag], None] | None = None,
        period: float = PERIOD,
    ) -> None:
        self._report = report
        self._late_after = late_after
        self._on_late = on_late
        self._period = period
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        loop, watched = asyncio.get_running_loop(), threading.get_ident()
        self._thread = threading.Thread(
            target=self._watch, args=(loop, watched), name="loop lag", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """The thread may end a little later: it is not waited for."""
        self._has_ended.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, watched: int) -> None:
        clock = time.pthread_getcpuclockid(watched)
        while not self._has_ended.wait(self._period):
            sign = _Sign(self._report, clock)
            try:
                loop.call_soon_threadsafe(sign.give)
            except RuntimeError:
                return  # the loop is closed
            self._await(sign, watched)

    def _await(self, sign: "_Sign", watched: int) -> None:
        late_after = self._late_after
        if sign.given.wait(late_after / 2):
            return
        while not sign.given.wait(LOOK_PERIOD) and not self._has_ended.is_set():
            sign.seen[_stack_of(watched)] += 1
            lag = sign.lag()
            if self._on_late is not None and lag.seconds >= late_after:
                late_after *= 2
                self._on_late(lag)


class _Sign:
    """One sign of life that the loop was asked for."""

    def __init__(self, report: Callable[[Lag], None] | None, clock: int) -> None:
        self._report = report
        self._clock = clock
        self._asked = time.monotonic()
        self._cpu_asked = time.clock_gettime(clock)
        self.seen: Counter[str] = Counter()
        self.given = threading.Event()

    def give(self) -> None:
        self.given.set()
        if self._report is not None:
            self._report(self.lag())

    def lag(self) -> Lag:
        cpu_seconds = time.clock_gettime(self._clock) - self._cpu_asked
        ((where, _),) = self.seen.most_common(1) or (("", 0),)
        return Lag(time.monotonic() - self._asked, cpu_seconds, where)


def log_late(lag: Lag) -> None:
    """Warns of a loop that is held, which ``on_late`` is for."""
    fields = {"seconds": round(lag.seconds, 3), "cpu_seconds": round(lag.cpu_seconds, 3), "where": lag.where}
    logger.warning(
        "Nothing was answered for %.1f s (%.1f s of it the event loop computed), in %s",
        lag.seconds,
        lag.cpu_seconds,
        lag.where or "no function that could be seen",
        extra={"fields": fields},
    )


def _stack_of(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    return " < ".join(_named(frame)) if frame is not None else ""


def _named(frame: FrameType | None) -> Iterator[str]:
    """Yields the innermost function and its callers in this package, up to what the event loop calls."""
    is_innermost, left = True, NUM_NAMED
    while frame is not None and frame.f_code.co_filename != LOOP_FILE and left:
        name = frame.f_code.co_filename
        if is_innermost or name.startswith(PACKAGE):
            yield f"{_short(name)}:{frame.f_code.co_firstlineno} {frame.f_code.co_qualname}"
            left -= 1
        is_innermost, frame = False, frame.f_back


def _short(path: str) -> str:
    """Returns a file's path within the package, or within what it was installed with."""
    if path.startswith(PACKAGE):
        return path[len(PACKAGE) + 1 :]
    return "/".join(Path(path).parts[-2:])

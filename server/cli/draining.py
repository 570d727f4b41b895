"""The end of a server, as a small state machine: it only goes forward, and in bounded time.

The first signal lets running requests finish, the second one does not, a third one leaves at once. uvicorn's
own graceful shutdown closes the port at once: a load balancer would see refused connections instead of a
``/ready`` that says no. Here the port stays open while requests are running, and new ones get their 503. Used
by ``server.cli.launch``.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable
from enum import IntEnum
from queue import Empty, SimpleQueue
from threading import Thread
from types import FrameType

import uvicorn

from truedraft.server.services import Services

logger = logging.getLogger("truedraft.server")

# What connections get to send their last bytes, once every request has ended.
CLOSING_SECONDS = 2
# The end after the drain may take this long, workers included. What takes longer is abandoned.
END_SECONDS = 4.8
POLL_SECONDS = 0.05


class Phase(IntEnum):
    """The steps of a server's end. One signal asks for each."""

    SERVING = 0
    DRAINING = 1  # running requests finish, new ones are refused
    CLOSING = 2  # connections and workers end
    LEAVING = 3  # nothing is waited for


class Server(uvicorn.Server):
    """Ends by phases. SIGINT is like SIGTERM."""

    def __init__(
        self, config: uvicorn.Config, drain_timeout: float, leave: Callable[[int], None] = os._exit
    ) -> None:
        """``leave`` ends the process with an exit code, whatever its threads are doing."""
        super().__init__(config)
        self.phase = Phase.SERVING
        self.num_signals = 0
        self.last_signal = 0
        self._drain_timeout = drain_timeout
        self._leave = leave
        self._changed = asyncio.Event()
        self._limits: SimpleQueue[float | None] = SimpleQueue()
        Thread(target=self._leave_in_time, name="end", daemon=True).start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Counts a signal. uvicorn's own would remember it and raise it again after an orderly end.

        It interrupts the program anywhere, so the phase changes in the loop, and what the thread hears comes
        through a queue that allows that.
        """
        self.num_signals += 1
        self.last_signal = sig
        self._limits.put(END_SECONDS + (self._drain_timeout if self.num_signals == 1 else 0))
        asyncio.get_running_loop().call_soon_threadsafe(self._obey)

    def advance(self, phase: Phase) -> None:
        """Goes on to ``phase``, unless it has been reached: nothing takes an end back."""
        if phase <= self.phase:
            return
        self.phase = phase
        if phase >= Phase.CLOSING:
            self.should_exit = True
            self._limits.put(END_SECONDS)
        if phase >= Phase.LEAVING:
            self.force_exit = True
        self._changed.set()

    async def reach(self, phase: Phase) -> None:
        """Waits until the end has come to ``phase``."""
        while self.phase < phase:
            self._changed.clear()
            await self._changed.wait()

    def has_ended(self) -> None:
        """Stops the clock: all that could hang is over."""
        self._limits.put(None)

    @property
    def exit_code(self) -> int:
        """0 after an orderly end, which one signal asks for; a second one kills, as shells write it."""
        return 0 if self.num_signals < 2 else 128 + self.last_signal

    @property
    def num_running(self) -> int:
        """The number of HTTP requests that have no complete answer yet."""
        return len(self.server_state.tasks)

    def _obey(self) -> None:
        self.advance(Phase(min(self.num_signals, Phase.LEAVING)))

    def _leave_in_time(self) -> None:
        """Leaves the process when the end has taken its time: the loop or another thread may be stuck."""
        end = math.inf
        while True:
            try:
                limit = self._limits.get(
                    timeout=None if end == math.inf else max(0.0, end - time.monotonic())
                )
            except Empty:
                # A stuck thread may hold the log's lock.
                saying = Thread(
                    target=logger.critical, args=("The end took too long: leaving now.",), daemon=True
                )
                saying.start()
                saying.join(0.2)
                self._leave(self.exit_code or 1)
                return
            if limit is None:
                return
            end = min(end, time.monotonic() + limit)


async def drain_on_signal(server: Server, services: Services) -> None:
    """Waits for the signal, then for the running requests, until the next one or for ``drain_timeout``."""
    await server.reach(Phase.DRAINING)
    services.drain()
    timeout = services.settings.drain_timeout
    if server.num_running and server.phase == Phase.DRAINING:
        logger.info("Shutting down: waiting up to %g s for %d requests.", timeout, server.num_running)
    try:
        async with asyncio.timeout(timeout):
            while server.num_running and server.phase == Phase.DRAINING:
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        logger.warning("Stopping with %d unfinished requests.", server.num_running)
    services.models.abandon()
    server.advance(Phase.CLOSING)

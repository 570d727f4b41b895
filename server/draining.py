"""An orderly end: the first signal lets running requests finish, the second one does not.

uvicorn's own graceful shutdown closes the port at once, so that a load balancer would see refused connections
instead of a ``/ready`` that says no. Here the port stays open while requests are running: new ones get their
503. Used by ``server.launch``.
"""

import asyncio
import logging
from types import FrameType

import uvicorn

from truedraft.server.services import Services

logger = logging.getLogger("truedraft.server")

# What connections get to send their last bytes, once every request has ended.
CLOSING_SECONDS = 2
POLL_SECONDS = 0.05


class Server(uvicorn.Server):
    """Counts signals, for ``drain_on_signal``; a third one ends it at once. SIGINT is like SIGTERM."""

    num_signals = 0
    last_signal = 0

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_signal = asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's own would remember the signal and raise it again after an orderly end."""
        self.num_signals += 1
        self.last_signal = sig
        self.should_exit = self.force_exit = self.num_signals > 2
        asyncio.get_running_loop().call_soon_threadsafe(self.has_signal.set)  # wakes a loop that waits

    @property
    def exit_code(self) -> int:
        """0 after an orderly end, which one signal asks for; a second one kills, as shells write it."""
        return 0 if self.num_signals < 2 else 128 + self.last_signal

    @property
    def num_running(self) -> int:
        """HTTP requests that have no complete answer yet."""
        return len(self.server_state.tasks)


async def drain_on_signal(server: Server, services: Services) -> None:
    """Wait for the signal, then for the running requests, until the next one or for ``drain_timeout``."""
    await server.has_signal.wait()
    services.drain()
    timeout = services.settings.drain_timeout
    logger.info("Shutting down: waiting up to %g s for %d requests.", timeout, server.num_running)
    try:
        async with asyncio.timeout(timeout):
            while server.num_running and server.num_signals == 1:
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        logger.warning("Stopping with %d unfinished requests.", server.num_running)
    services.engine.abandon()
    server.should_exit = True

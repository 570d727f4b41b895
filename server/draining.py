"""An orderly end: the first signal lets running requests finish, the second one does not.

uvicorn's own graceful shutdown closes the port at once, so that a load balancer would see refused connections
instead of a ``/ready`` that says no. Here the port stays open while requests are running: new ones get their
503. Used by ``server.launch``.
"""

import asyncio
import logging
from types import FrameType

import uvicorn

from server.services import Services

logger = logging.getLogger("foretoken.server")

# What connections get to send their last bytes, once every request has ended.
CLOSING_SECONDS = 2
POLL_SECONDS = 0.05


class Server(uvicorn.Server):
    """Counts signals, for ``drain_when_told``; a third one is obeyed on the spot. SIGINT is like SIGTERM."""

    num_signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.num_signals += 1
        self.should_exit = self.force_exit = self.num_signals > 2

    @property
    def num_running(self) -> int:
        """HTTP requests that have no complete answer yet."""
        return len(self.server_state.tasks)


async def drain_when_told(server: Server, services: Services) -> None:
    """Wait for the signal, then for the running requests, until the next one or for ``drain_timeout``."""
    while not server.num_signals:
        await asyncio.sleep(POLL_SECONDS)
    services.drain()
    timeout = services.settings.drain_timeout
    logger.info("Told to stop. %d requests get %g s to finish.", server.num_running, timeout)
    try:
        async with asyncio.timeout(timeout):
            while server.num_running and server.num_signals == 1:
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        logger.warning("Stopping with %d unfinished requests.", server.num_running)
    services.engine.abandon()
    server.should_exit = True

"""Lets the event loop attend to others within work that goes on for long."""

import asyncio
import time

# Seconds of work in a row after which others get their turn.
SLICE = 0.001


class Pauses:
    """``due`` is awaited between two pieces of work; ``restart`` says that there has just been a pause."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._began = time.perf_counter()

    async def due(self) -> None:
        if time.perf_counter() - self._began >= SLICE:
            await asyncio.sleep(0)
            self.restart()

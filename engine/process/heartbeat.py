"""Tells the front end, every second, that the worker lives and for how long its loop has been in one step.

A thread of its own sends it: a long step does not look like a dead process, and a stopped process is silent
whatever its loop was doing. Started by ``worker``; watched by ``server.workers.worker_process``.
"""

import threading
import time

from truedraft.engine.messages import Heartbeat
from truedraft.engine.process.connection import Connection

INTERVAL_SECONDS = 1.0


class Heartbeats:
    """``beat`` at every turn of the loop. Before the first one, while models load, no step is counted."""

    def __init__(self) -> None:
        self._last_beat: float | None = None

    def beat(self) -> None:
        self._last_beat = time.monotonic()

    def start(self, connection: Connection) -> None:
        """Send as long as the process lives."""
        threading.Thread(target=self._send, args=(connection,), name="heartbeat", daemon=True).start()

    def _send(self, connection: Connection) -> None:
        while True:
            last = self._last_beat
            connection.send(Heartbeat(0.0 if last is None else time.monotonic() - last))
            time.sleep(INTERVAL_SECONDS)

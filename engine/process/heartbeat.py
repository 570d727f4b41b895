"""Tells the front end, every second, that the worker lives and for how long its loop has been in one step.

A thread of its own sends it: a long step does not look like a dead process, and a stopped process is silent
whatever its loop was doing. It also looks after the files that are mapped, and ends the process if one has
changed: what it computes from then on would be wrong. Started by ``worker``; watched by
``server.workers.worker_process``.
"""

import os
import threading
import time
from collections.abc import Callable

from truedraft.engine.messages import WEIGHTS_CHANGED, Failed, Heartbeat
from truedraft.engine.process.connection import Connection
from truedraft.engine.process.mapped_files import MappedFiles

INTERVAL_SECONDS = 1.0
# The exit code of a worker whose files have changed.
CHANGED_EXIT_CODE = 3
# The exit code of a worker that has lost another rank.
LOST_RANK_EXIT_CODE = 4


class Heartbeats:
    """Sends heartbeats. The loop calls ``beat`` at every turn; before the first one, while models load, no
    step is counted."""

    def __init__(self) -> None:
        self._last_beat: float | None = None
        self.files = MappedFiles()
        # Says which other rank of the target has ended, if one has.
        self.ranks: Callable[[], str | None] = lambda: None

    def beat(self) -> None:
        self._last_beat = time.monotonic()

    def start(self, connection: Connection) -> None:
        """Sends heartbeats for as long as the process lives."""
        threading.Thread(target=self._send, args=(connection,), name="heartbeat", daemon=True).start()

    def _send(self, connection: Connection) -> None:
        while True:
            if fault := self.files.fault():
                connection.send(Failed(request_id="", code=WEIGHTS_CHANGED, message=fault))
                os._exit(CHANGED_EXIT_CODE)
            if fault := self.ranks():
                connection.send(lost_rank(fault))
                os._exit(LOST_RANK_EXIT_CODE)
            last = self._last_beat
            connection.send(Heartbeat(0.0 if last is None else time.monotonic() - last))
            time.sleep(INTERVAL_SECONDS)


def lost_rank(fault: str) -> Failed:
    """Returns the message that a worker cannot go on, because a rank of its target has ended."""
    return Failed(
        request_id="", code="rank_lost", message=f"The worker has lost a process of its own: {fault}."
    )

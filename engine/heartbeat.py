"""Tells the front end, every second, that the worker lives and for how long its loop has been in one step.

A thread of its own sends it: a long step does not look like a dead process, and a stopped process is silent
whatever its loop was doing. Started by ``engine.worker``; watched by ``server.client.worker_process``.
"""

import threading
import time
from contextlib import suppress

import zmq

from engine.messages import Heartbeat, encode, heartbeat_address

INTERVAL_SECONDS = 1.0


class Heartbeats:
    """``beat`` at every turn of the loop. Before the first one, while models load, no step is counted."""

    def __init__(self) -> None:
        self._last_beat: float | None = None

    def beat(self) -> None:
        self._last_beat = time.monotonic()

    def start(self, address: str) -> None:
        """Send to the front end whose socket is at ``address``, as long as the process lives."""
        arguments = (heartbeat_address(address),)
        threading.Thread(target=self._send, args=arguments, name="heartbeat", daemon=True).start()

    def _send(self, address: str) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.linger = 0
        socket.set_hwm(1)  # what the front end did not read a second ago says nothing any more
        socket.connect(address)
        while True:
            last = self._last_beat
            message = Heartbeat(0.0 if last is None else time.monotonic() - last)
            with suppress(zmq.Again):
                socket.send(encode(message), zmq.NOBLOCK)
            time.sleep(INTERVAL_SECONDS)

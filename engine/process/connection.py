"""Is the worker's end of the pair of Unix sockets by which the front end reaches it.

It carries the messages of ``engine.messages``. The front end's end is in ``server.workers.worker_process``.
"""

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from truedraft.engine.messages import FromWorker, Inbox, ToWorker, framed

CHUNK_BYTES = 1 << 18


class Connection:
    """Blocks, unlike the front end's end. Any thread may send; one receives."""

    def __init__(self, descriptor: int) -> None:
        """Takes over the socket ``descriptor``."""
        self._socket = socket.socket(fileno=descriptor)
        self._inbox = Inbox()
        self._sending = threading.Lock()
        self._arrival = select.poll()
        self._arrival.register(self._socket, select.POLLIN)

    def send(self, message: ToWorker | FromWorker) -> None:
        """Sends a message; does nothing once the other side is gone, which ``receive`` reports."""
        with self._sending, suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(framed(message))

    def receive(self, milliseconds: int) -> list[bytes]:
        """Returns the messages that have arrived, after waiting up to ``milliseconds`` if there are none.

        Raises ``EOFError`` once the other side is gone and all that it sent has been returned.
        """
        if milliseconds:
            self._arrival.poll(milliseconds)
        messages: list[bytes] = []
        while not messages:  # A message may be longer than what is received at once.
            try:
                arrived = self._socket.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                arrived = b""
            if not arrived:
                raise EOFError("The front end is gone.")
            messages = self._inbox.add(arrived)
        return messages

    def close(self) -> None:
        self._socket.close()


def drain(connection: Connection, milliseconds: int, handle: Callable[[bytes], None]) -> bool:
    """Handles messages until no more have arrived, after waiting up to ``milliseconds`` for the first;
    returns whether there were any. Raises ``EOFError`` as ``receive`` does."""
    has_any = False
    while arrived := connection.receive(0 if has_any else milliseconds):
        for data in arrived:
            handle(data)
        has_any = True
    return has_any

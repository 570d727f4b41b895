"""The border between front end and worker: a pair of Unix sockets; on these a message follows its length.

The front end makes the pair and gives one of its ends to the process that it starts. What was sent before a
side's end is read before that end is.
"""

import select
import socket
import struct
import threading
from contextlib import suppress

from engine.messages import FromWorker, ToWorker, encode

LENGTH = struct.Struct("<Q")
CHUNK_BYTES = 1 << 18


def framed(message: ToWorker | FromWorker) -> bytes:
    data = encode(message)
    return LENGTH.pack(len(data)) + data


class Inbox:
    """Puts messages together from the bytes that arrive, in whatever pieces."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, arrived: bytes) -> list[bytes]:
        """The messages that are complete with these bytes."""
        self._bytes += arrived
        messages, start = [], 0
        while len(self._bytes) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes, start)
            end = start + LENGTH.size + length
            if end > len(self._bytes):
                break
            messages.append(bytes(self._bytes[start + LENGTH.size : end]))
            start = end
        del self._bytes[:start]
        return messages


class Connection:
    """The worker's end, which waits where the front end's does not. Any thread may send; one receives."""

    def __init__(self, descriptor: int) -> None:
        """Takes ``descriptor`` over."""
        self._socket = socket.socket(fileno=descriptor)
        self._inbox = Inbox()
        self._sending = threading.Lock()
        self._arrival = select.poll()
        self._arrival.register(self._socket, select.POLLIN)

    def send(self, message: ToWorker | FromWorker) -> None:
        """To nobody where the other side is gone, as ``receive`` will tell."""
        with self._sending, suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(framed(message))

    def receive(self, milliseconds: int) -> list[bytes]:
        """What has arrived; where that is nothing, something is waited for so long.

        ``EOFError`` once the other side is gone.
        """
        if milliseconds:
            self._arrival.poll(milliseconds)
        try:
            arrived = self._socket.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            arrived = b""
        if not arrived:
            raise EOFError("The front end is gone.")
        return self._inbox.add(arrived)

    def close(self) -> None:
        self._socket.close()

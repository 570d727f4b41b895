"""A load generator that costs next to nothing: HTTP/1.1 on bare asyncio, no parsing beyond where answers end.

Each connection is kept alive and sends the same request again as soon as it has its answer. Knows whole
answers with a content-length, and chunked event streams; anything but a 200 ends the run. Used by
``benchmarks.front_end``.
"""

import asyncio
import json
import time
from typing import Any, NamedTuple


class Load(NamedTuple):
    """Answers, ``data:`` events in them, and seconds from the first byte sent to the last one read."""

    num_answers: int
    num_events: int
    seconds: float


class LoadError(Exception):
    """The server did not answer as it should; the message has the beginning of its answer."""


def post(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    # The server answers to loopback names alone.
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


class Connection(asyncio.Protocol):
    """Sends ``request`` ``count`` times, one after the other."""

    def __init__(self, request: bytes, count: int) -> None:
        self.num_answers = 0
        self.num_events = 0
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._count = count
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = end_of_answer(self._received)
        if end is None:
            return
        if not self._received.startswith(b"HTTP/1.1 200 ") or end != len(self._received):
            self._fail(bytes(self._received[:300]).decode(errors="replace"))
            return
        self.num_answers += 1
        self.num_events += self._received.count(b"\ndata: {")
        self._received.clear()
        if self.num_answers < self._count:
            self._transport.write(self._request)
        elif not self.finished.done():
            self.finished.set_result(None)
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"The connection was closed: {error}")

    def _fail(self, message: str) -> None:
        if not self.finished.done():
            self.finished.set_exception(LoadError(message))


def end_of_answer(received: bytearray) -> int | None:
    """Length of the first answer once all of it is there."""
    if received.endswith(b"\r\n0\r\n\r\n"):
        return len(received)
    head_end = received.find(b"\r\n\r\n")
    if head_end < 0:
        return None
    head = received[:head_end].lower()
    _, found, length = head.partition(b"\r\ncontent-length:")
    if not found:
        return None  # chunked, and its last chunk has not come
    end = head_end + 4 + int(length.split(b"\r\n")[0])
    return end if len(received) >= end else None


async def run_load(port: int, request: bytes, *, concurrency: int, count: int) -> Load:
    """``count`` requests on each of ``concurrency`` connections."""
    loop = asyncio.get_running_loop()
    start = time.perf_counter()
    connections = [
        (await loop.create_connection(lambda: Connection(request, count), "127.0.0.1", port))[1]
        for _ in range(concurrency)
    ]
    await asyncio.gather(*(connection.finished for connection in connections))
    return Load(
        sum(connection.num_answers for connection in connections),
        sum(connection.num_events for connection in connections),
        time.perf_counter() - start,
    )

"""Closed loops of streamed completions on bare asyncio: how many tokens arrive in a window of time.

Each client has a connection that is kept alive, and sends its next request as soon as the last is finished.
Tokens are counted as they arrive, by the ids that ``return_token_ids`` puts into every chunk: a chunk of a
speculating server has several tokens, and requests that are still running when the window closes count too.
Nothing else of an answer is read, because the generator shares the processors with the server. Requests must
ask for streaming, ``return_token_ids`` and ``ignore_eos``; an answer of another length ends the run.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.http_load import LoadError

TOKEN_IDS = b'"token_ids":['
DONE = b"\ndata: [DONE]\n"
LAST_CHUNK = b"\r\n0\r\n\r\n"


class Request(NamedTuple):
    """All bytes of a request, and how many tokens the answer must have."""

    content: bytes
    num_tokens: int


class Window(NamedTuple):
    """What arrived in ``seconds``, and the generator's own CPU time meanwhile."""

    num_tokens: int
    num_finished: int  # requests
    seconds: float
    generator_seconds: float
    num_tokens_of_block: int  # with those before the window opened

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def generator_share(self) -> float:
        """Returns the generator's share of one processor."""
        return self.generator_seconds / self.seconds


class Client(asyncio.Protocol):
    """Sends ``requests`` one after the other; what goes wrong is the exception of ``failed``."""

    def __init__(self, requests: Iterator[Request], failed: asyncio.Future[None]) -> None:
        self.num_tokens = 0
        self.num_finished = 0
        self._requests = requests
        self._failed = failed
        self._received = b""  # what follows the last whole line

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        request = next(self._requests)
        self._num_expected = self.num_tokens + request.num_tokens
        self._has_status = False
        self._transport.write(request.content)

    def data_received(self, data: bytes) -> None:
        received = self._received + data
        if not self._has_status:
            if not received.startswith(b"HTTP/1.1 200 "):
                self._fail(received[:300].decode(errors="replace"))
                return
            self._has_status = True
        done = received.find(DONE)
        end = done if done >= 0 else received.rfind(b"\n") + 1
        self.num_tokens += count_tokens(received, end)
        self._received = received[end:]
        if done >= 0 and received.endswith(LAST_CHUNK):
            if self.num_tokens != self._num_expected:
                surplus = self.num_tokens - self._num_expected
                self._fail(f"{surplus:+} tokens; the answer ends with {received[-300:]!r}")
                return
            self._received = b""
            self.num_finished += 1
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection was closed: {error}")

    def close(self) -> None:
        """The server then aborts the request that is running."""
        self._transport.abort()

    def _fail(self, message: str) -> None:
        if not self._failed.done():
            self._failed.set_exception(LoadError(message))


def count_tokens(received: bytes, end: int) -> int:
    """In all chunks before ``end``; JSON escapes the quotes of a text that looks like the key."""
    num_tokens = 0
    start = received.find(TOKEN_IDS, 0, end)
    while start >= 0:
        start += len(TOKEN_IDS)
        close = received.index(b"]", start)
        if close > start:
            num_tokens += received.count(b",", start, close) + 1
        start = received.find(TOKEN_IDS, close, end)
    return num_tokens


async def run_block(
    port: int, clients: Sequence[Iterator[Request]], *, ramp_up: float, seconds: float
) -> Window:
    """Runs one client for each iterator; what arrives in the first ``ramp_up`` seconds is not counted."""
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()
    connected: list[Client] = []
    try:
        for requests in clients:
            new_client = partial(Client, requests, failed)
            connected.append((await loop.create_connection(new_client, "127.0.0.1", port))[1])
        await _wait(failed, ramp_up)
        started, cpu, before, finished = _reading(connected)
        after = before
        while after == before:  # a block in which nothing came says nothing
            await _wait(failed, seconds)
            ended, cpu_after, after, finished_after = _reading(connected)
    finally:
        failed.cancel()  # closing is no failure
        for client in connected:
            client.close()
    return Window(after - before, finished_after - finished, ended - started, cpu_after - cpu, after)


async def _wait(failed: asyncio.Future[None], seconds: float) -> None:
    done, _ = await asyncio.wait({failed}, timeout=seconds)
    if done:
        failed.result()


def _reading(clients: Sequence[Client]) -> tuple[float, float, int, int]:
    return (
        time.perf_counter(),
        time.process_time(),
        sum(client.num_tokens for client in clients),
        sum(client.num_finished for client in clients),
    )

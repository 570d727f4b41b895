"""Framing of server-sent events, and the comments that keep an idle connection open."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from server.errors import NotReadyError
from server.schemas.completion import Completion
from server.sse import DONE, chunk_event, error_event, with_pings

PING = b": ping\n\n"


async def slowly(*delays: float) -> AsyncIterator[bytes]:
    for number, delay in enumerate(delays):
        await asyncio.sleep(delay)
        yield f"{number}".encode()


async def test_pings_fill_the_silence_only() -> None:
    events = [event async for event in with_pings(slowly(0, 0, 0.25, 0), interval=0.1)]
    assert events == [b"0", b"1", PING, PING, b"2", b"3"]


async def test_errors_pass_through_pings() -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"0"
        raise NotReadyError("no")

    events = with_pings(failing(), interval=1)
    assert await anext(events) == b"0"
    with pytest.raises(NotReadyError):
        await anext(events)


async def test_source_ends_with_its_reader() -> None:
    ended = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                await asyncio.sleep(0.001)
                yield b"0"
        finally:
            ended.set()

    async def read() -> bytes:
        return await anext(with_pings(endless(), interval=1))

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    reader.cancel()
    async with asyncio.timeout(1):
        await ended.wait()


def test_frames() -> None:
    chunk = Completion(id="cmpl-1", created=1, model="m", choices=[])
    head = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[]'
    assert chunk_event(chunk, with_usage=False) == head + b"}\n\n"
    assert chunk_event(chunk, with_usage=True) == head + b',"usage":null}\n\n'
    assert DONE == b"data: [DONE]\n\n"
    assert error_event(NotReadyError("nö")) == (
        'data: {"error": {"message": "nö", "type": "service_unavailable_error", "param": null, '
        '"code": "not_ready"}}\n\n'.encode()
    )

"""Framing of server-sent events, and the comments that keep an idle connection open."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from tests.server.virtual_time import in_virtual_time
from tests.server.wire import ChatChunk, ChatChunkChoice
from truedraft.server.errors import NotReadyError
from truedraft.server.http.sse import (
    DONE,
    LINE_ENDS,
    EventStreamResponse,
    chunk_event,
    error_event,
    typed_event,
)
from truedraft.server.schemas.chat import Delta
from truedraft.server.schemas.logprobs import ChatLogprobs, ChatTokenLogprob, TopLogprob
from truedraft.server.schemas.tools import FunctionDelta, ToolCallDelta

PING = b": ping\n\n"


async def slowly(*delays: float) -> AsyncIterator[bytes]:
    for number, delay in enumerate(delays):
        await asyncio.sleep(delay)
        yield f"{number}".encode()


async def endless() -> AsyncIterator[bytes]:
    while True:
        await asyncio.sleep(0.001)
        yield b"0"


async def run(
    events: AsyncIterator[bytes], *, ping_seconds: float, leave_after: float = 5.0
) -> tuple[list[Message], int]:
    """Everything that goes over the wire to a client that leaves after a while, and the calls of on_close."""
    sent: list[Message] = []
    closed: list[None] = []

    async def receive() -> Message:
        await asyncio.sleep(leave_after)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    response = EventStreamResponse(events, lambda: closed.append(None), {}, ping_seconds=ping_seconds)
    before = asyncio.all_tasks()
    async with asyncio.timeout(5):
        await response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before, "a task outlived its response"
    return sent, len(closed)


def test_pings_fill_the_silence_only() -> None:
    (start, *messages), num_closed = in_virtual_time(run(slowly(0, 0, 0.25, 0), ping_seconds=0.1))
    assert start["type"] == "http.response.start"
    assert [message["body"] for message in messages] == [b"0", b"1", PING, PING, b"2", b"3", b""]
    assert [message["more_body"] for message in messages] == [True] * 6 + [False]
    assert num_closed == 1


async def left_and_waited() -> tuple[list[Message], int, int]:
    """What was sent, its length when the client left, and how often the response was closed."""
    messages, num_closed = await run(endless(), ping_seconds=0.05, leave_after=0.1)
    length = len(messages)
    await asyncio.sleep(0.15)
    return messages, length, num_closed


def test_nothing_is_sent_to_a_client_that_left() -> None:
    messages, length, num_closed = in_virtual_time(left_and_waited())
    assert num_closed == 1
    assert len(messages) == length
    assert all(message["body"] == b"0" for message in messages[1:])


def test_failing_events_close_the_stream() -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"0"
        raise RuntimeError("no")

    with pytest.RaisesGroup(RuntimeError, allow_unwrapped=True):
        in_virtual_time(run(failing(), ping_seconds=1))


texts = st.text(st.characters(codec="utf-8") | st.sampled_from('"\\/\n\t\x00\x1f\x7f\x85\u2028\u2029é€😀'))
numbers = st.floats(allow_nan=True) | st.sampled_from([0.0, -0.0, 1e-7, 1e16, 1e22, -123456.789])


@given(name=texts, text=texts, number=numbers, reason=st.sampled_from([None, "stop"]))
def test_a_chunk_is_written_as_its_model_would_be(name: str, text: str, number: float, reason: Any) -> None:
    top = [TopLogprob(token=text, logprob=number, bytes=[*text.encode()])]
    tokens = [ChatTokenLogprob(token=text, logprob=number, bytes=None, top_logprobs=top)]
    header = {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": name,
        "system_fingerprint": "fp",
    }
    choice = {"index": 0, "logprobs": ChatLogprobs(content=tokens), "finish_reason": reason}
    calls = [ToolCallDelta(index=0, function=FunctionDelta(arguments=text))]
    choice |= {"stop_reason": text, "delta": Delta(content=text, tool_calls=calls)}
    model = ChatChunk(**header, choices=[ChatChunkChoice(**choice)])
    written = model.model_dump_json().translate(LINE_ENDS)
    assert chunk_event(header | {"choices": [choice], "usage": None}) == f"data: {written}\n\n".encode()


def test_frames() -> None:
    assert chunk_event({"id": "cmpl-1", "choices": []}) == b'data: {"id":"cmpl-1","choices":[]}\n\n'
    assert DONE == b"data: [DONE]\n\n"
    assert error_event(NotReadyError("nö")) == (
        'data: {"error": {"message": "nö", "type": "service_unavailable_error", "param": null, '
        '"code": "not_ready"}}\n\n'.encode()
    )


def test_an_event_has_no_line_end_but_its_own() -> None:
    """Clients that read by lines split at Unicode's, too."""
    text = "a\u2028b\u2029c\x85d\x0be\x1cf\ng\rhé"
    events = [typed_event({"type": "x", "text": text}), error_event(NotReadyError(text))]
    for event in events:
        lines = event.decode().splitlines()
        assert [line.partition(":")[0] for line in lines if line] in (["event", "data"], ["data"])
        data = json.loads(next(line for line in lines if line.startswith("data:"))[5:])
        assert text in (data.get("text"), data.get("error", {}).get("message"))

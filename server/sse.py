"""Server-sent events as OpenAI frames them: ``data:`` lines, ``: ping`` comments, ``data: [DONE]``.

Frames and keeps alive; what an event says is the routes' business. Completions and chats have no named
events, as clients would take them for chunks; ``/v1/responses`` has nothing else, and no ``[DONE]``.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from server.errors import ApiError
from server.schemas.common import Answer

DONE = format_sse_event(data_str="[DONE]")

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def chunk_event(chunk: Answer, *, with_usage: bool) -> bytes:
    """Without ``with_usage`` the key is absent, with it every chunk has it, null until the last."""
    return format_sse_event(data_str=chunk.model_dump_json(exclude=None if with_usage else {"usage"}))


def typed_event(fields: dict[str, Any]) -> bytes:
    """An event of ``/v1/responses``: named, as OpenAI does there, by the type that its data also has."""
    data = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return format_sse_event(data_str=data, event=str(fields["type"]))


def error_event(error: ApiError) -> bytes:
    return format_sse_event(data_str=json.dumps(error.body(), ensure_ascii=False))


async def with_pings(events: AsyncIterator[bytes], interval: float) -> AsyncIterator[bytes]:
    """Pass events on, and send a comment whenever ``interval`` seconds went by without one."""
    upcoming = asyncio.ensure_future(anext(events))
    try:
        while True:
            await asyncio.wait({upcoming}, timeout=interval)
            if not upcoming.done():
                yield KEEPALIVE_COMMENT
                continue
            try:
                event = upcoming.result()
            except StopAsyncIteration:
                return
            yield event
            upcoming = asyncio.ensure_future(anext(events))
    finally:
        upcoming.cancel()


class EventStreamResponse(EventSourceResponse):
    """Streams events and always calls ``on_close``, also when the client has gone away."""

    def __init__(
        self, events: AsyncIterator[bytes], on_close: Callable[[], None], headers: dict[str, str]
    ) -> None:
        super().__init__(events, headers=STREAM_HEADERS | headers)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()

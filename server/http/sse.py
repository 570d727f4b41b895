"""Server-sent events as OpenAI frames them: ``data:`` lines, ``: ping`` comments, ``data: [DONE]``.

Frames and keeps alive; what an event says is the routes' business. Completions and chats have no named
events, as clients would take them for chunks; ``/v1/responses`` and ``/v1/messages`` have nothing else, and
no ``[DONE]``.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from truedraft.server.errors import ApiError

DONE = b"data: [DONE]\n\n"
PING = KEEPALIVE_COMMENT

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


# JSON may have them as they are, but clients in several languages take them for the end of a line.
LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


def chunk_event(chunk: Mapping[str, Any]) -> bytes:
    return _event(to_json(chunk, inf_nan_mode="null"))


def data_event(part: BaseModel) -> bytes:
    return _event(part.model_dump_json().encode())


def typed_event(fields: dict[str, Any]) -> bytes:
    """Returns an event of ``/v1/responses`` or ``/v1/messages``, named by the type that its data also has."""
    data = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return b"event: %b\n%b" % (str(fields["type"]).encode(), _event(data.encode()))


def error_event(error: ApiError) -> bytes:
    return _event(json.dumps(error.body(), ensure_ascii=False).encode())


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % (data if data.isascii() else data.decode().translate(LINE_ENDS).encode())


class EventStreamResponse(EventSourceResponse):
    """Streams events; sends ``ping`` whenever ``ping_seconds`` went by without one, so that proxies wait on.

    Always calls ``on_close``, also when the client has gone away.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_close: Callable[[], None],
        headers: dict[str, str],
        *,
        ping_seconds: float,
        ping: bytes = PING,
    ) -> None:
        super().__init__(events, headers=STREAM_HEADERS | headers)
        self._ping = {"type": "http.response.body", "body": ping, "more_body": True}
        self.on_close = on_close
        self._ping_seconds = ping_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.on_close()

    async def stream_response(self, send: Send) -> None:
        """One task for all pings of the stream: a timer for each event would cost more than the event."""
        clock = asyncio.get_running_loop().time
        last_sent = clock()

        async def ping() -> None:
            nonlocal last_sent
            while True:
                silence = clock() - last_sent
                if silence >= self._ping_seconds:
                    silence, last_sent = 0.0, clock()
                    await send(self._ping)
                await asyncio.sleep(self._ping_seconds - silence)

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pinging = asyncio.create_task(ping())
        try:
            async for event in self.body_iterator:
                last_sent = clock()
                await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            pinging.cancel()  # nothing may follow the last message
        await send({"type": "http.response.body", "body": b"", "more_body": False})

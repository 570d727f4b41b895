"""Server-sent events as OpenAI frames them: ``data:`` lines, ``: ping`` comments, ``data: [DONE]``.

Frames and keeps alive; what an event says is the routes' business. Completions and chats have no named
events, as clients would take them for chunks; ``/v1/responses`` and ``/v1/messages`` have nothing else, and
no ``[DONE]``.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from truedraft.server.errors import ApiError
from truedraft.server.schemas.answer import Answer

DONE = format_sse_event(data_str="[DONE]")
PING = KEEPALIVE_COMMENT

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


# JSON may have them as they are, but clients in several languages take them for the end of a line.
LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


def chunk_event(chunk: Answer, *, with_usage: bool) -> bytes:
    """Without ``with_usage`` the key is absent, with it every chunk has it, null until the last."""
    return _event(chunk.model_dump_json(exclude=None if with_usage else {"usage"}))


def data_event(part: BaseModel) -> bytes:
    return _event(part.model_dump_json())


def typed_event(fields: dict[str, Any]) -> bytes:
    """Returns an event of ``/v1/responses`` or ``/v1/messages``, named by the type that its data also has."""
    data = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return _event(data, str(fields["type"]))


def error_event(error: ApiError) -> bytes:
    return _event(json.dumps(error.body(), ensure_ascii=False))


def _event(data: str, name: str | None = None) -> bytes:
    return format_sse_event(data_str=data if data.isascii() else data.translate(LINE_ENDS), event=name)


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

        async def send_and_note(message: Message) -> None:
            nonlocal last_sent
            last_sent = clock()
            if not message.get("more_body", True):
                pinging.cancel()  # nothing may follow the last message
            await send(message)

        async def ping() -> None:
            while True:
                silence = clock() - last_sent
                if silence >= self._ping_seconds:
                    silence = 0.0
                    await send_and_note(self._ping)
                await asyncio.sleep(self._ping_seconds - silence)

        pinging = asyncio.create_task(ping())
        try:
            await super().stream_response(send_and_note)
        finally:
            pinging.cancel()

"""Send a generation to the client: as one JSON answer or as a stream, and stop it when the client leaves.

Knows no answer format; each endpoint brings an ``AnswerWriter``.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from truedraft.server.errors import ApiError, code_of, internal_error
from truedraft.server.generation.generation import Generation
from truedraft.server.http.large_json import write_json
from truedraft.server.http.request_id import request_id_of
from truedraft.server.http.sse import EventStreamResponse
from truedraft.server.http.work import while_connected
from truedraft.server.services import get_services
from truedraft.server.text.choice import FinishedChoice

logger = logging.getLogger("truedraft.request")

PING_SECONDS = 15.0

T = TypeVar("T")


class AnswerWriter(Protocol):
    """Writes the answers of one endpoint."""

    @property
    def end(self) -> bytes:
        """Returns what follows the last event of a stream, failed or not."""
        ...

    @property
    def ping(self) -> bytes:
        """Returns what keeps a silent stream open."""
        ...

    @property
    def may_be_large(self) -> bool:
        """Is true where writing the whole answer may take long enough for other requests to notice."""
        ...

    def whole(self, choices: list[FinishedChoice]) -> BaseModel: ...

    def events(self) -> AsyncIterator[bytes]:
        """The events of a stream as they go over the wire; the first one when the first token exists."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Returns the event of an error after the first event."""
        ...


async def respond_whole(
    request: Request, generation: Generation, writer: AnswerWriter, headers: dict[str, str]
) -> Response:
    try:
        choices = await while_connected(request, generation.collect())
    finally:
        generation.close()
    if writer.may_be_large:
        work, prepared = get_services(request).work, generation.prepared
        writing = work.run(
            prepared.answer_weight, prepared.key, lambda: write_json(writer.whole(choices)), may_refuse=False
        )
        answer = await while_connected(request, writing)
    else:
        answer = writer.whole(choices).model_dump_json().encode()
    return Response(answer, headers=headers, media_type="application/json")


async def respond_stream(
    request: Request, generation: Generation, writer: AnswerWriter, headers: dict[str, str]
) -> Response:
    """Wait for the first event before answering, so that an early failure still has its own status."""
    events = writer.events()
    first = asyncio.ensure_future(anext(events))

    def close() -> None:
        first.cancel()
        generation.close()

    try:
        # Bounded: after a while a proxy needs to see something.
        await while_connected(request, asyncio.wait({first}, timeout=PING_SECONDS))
        if first.done():
            first.result()
    except BaseException:
        close()
        raise
    count_error = get_services(request).metrics.count_error
    stream = _until_done(first, events, writer, request_id_of(request.scope), count_error)
    return EventStreamResponse(stream, close, headers, ping_seconds=PING_SECONDS, ping=writer.ping)


async def _until_done(
    first: Awaitable[bytes],
    events: AsyncIterator[bytes],
    writer: AnswerWriter,
    request_id: str,
    count_error: Callable[[str], None],
) -> AsyncIterator[bytes]:
    """Yields the whole stream. The status has been sent, so errors can only be events now."""
    try:
        yield await first
        async for event in events:
            yield event
    except ApiError as error:
        count_error(code_of(error))
        yield writer.failure(error)
    except Exception:
        logger.exception("The request failed while it was streamed")
        count_error("internal_error")
        yield writer.failure(internal_error(request_id))
    yield writer.end

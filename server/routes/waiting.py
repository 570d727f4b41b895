"""A stream whose model has still to be loaded begins while it waits, so that proxies keep it open.

The status is sent before it is known what becomes of the request; an error after that is an event. A model
that is ready never comes here.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from truedraft.server.errors import ApiError, code_of, internal_error
from truedraft.server.http.error_answer import is_messages, messages_error
from truedraft.server.http.json_route import JsonRequest, JsonRoute
from truedraft.server.http.request_id import request_id_of
from truedraft.server.http.sse import DONE, EventStreamResponse, error_event, typed_event
from truedraft.server.routes.checks import check_model
from truedraft.server.routes.responding import PING_SECONDS
from truedraft.server.services import get_services

logger = logging.getLogger("truedraft.request")

Handle = Callable[[Request], Coroutine[Any, Any, Response]]


class GeneratingRoute(JsonRoute):
    """Is the route class of paths that may stream."""

    async def answer(self, request: JsonRequest, handle: Handle) -> Response:
        if not _has_to_wait(request):
            return await handle(request)
        answering = asyncio.ensure_future(handle(request))
        try:
            await asyncio.wait({answering}, timeout=PING_SECONDS)
        except BaseException:
            answering.cancel()
            raise
        if answering.done():
            return answering.result()
        events = _late(request, answering)
        return EventStreamResponse(events, lambda: _give_up(answering), {}, ping_seconds=PING_SECONDS)


def _has_to_wait(request: JsonRequest) -> bool:
    body, services = request.parsed, get_services(request)
    if not getattr(body, "stream", None):
        return False
    try:
        return services.models.must_wait(check_model(body.model, request, services))
    except ApiError:
        return False  # the route says it


def _give_up(answering: "asyncio.Future[Response]") -> None:
    """Ends the work for an answer that nobody reads any more."""
    if not answering.done():
        answering.cancel()
    elif not answering.cancelled() and answering.exception() is None:
        response = answering.result()
        if isinstance(response, EventStreamResponse):
            response.on_close()


async def _late(request: Request, answering: "asyncio.Future[Response]") -> AsyncIterator[bytes]:
    """Yields the events of the answer once it has begun; headers that come too late are comments."""
    try:
        response = await answering
        assert isinstance(response, StreamingResponse)
    except ApiError as error:
        get_services(request).metrics.count_error(code_of(error))
        for event in _failure(request, error):
            yield event
        return
    except Exception:
        logger.exception("The request failed while its model was loaded")
        get_services(request).metrics.count_error("internal_error")
        for event in _failure(request, internal_error(request_id_of(request.scope))):
            yield event
        return
    for name, value in response.headers.items():
        if name.startswith("x-truedraft-"):
            yield f": {name}: {value}\n\n".encode()
    async for part in response.body_iterator:
        yield part if isinstance(part, bytes) else str(part).encode()


def _failure(request: Request, error: ApiError) -> list[bytes]:
    if is_messages(request.scope):
        return [typed_event(messages_error(error, error.status, request_id_of(request.scope)))]
    if request.scope["path"].rstrip("/").endswith("/responses"):
        details = error.body()["error"]
        fields = {name: details[name] for name in ("code", "message", "param")}
        return [typed_event({"type": "error", "sequence_number": 0, **fields})]
    return [error_event(error), DONE]

"""Every path with a body has this route class: it takes JSON only, and reads a long body in a thread.

What a body holds is the schemas' business; which of its fields are not served stands in
``server.schemas.unsupported_fields``.
"""

import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect

from truedraft.server.errors import ClientDisconnectedError, UnsupportedMediaTypeError
from truedraft.server.http.error_handlers import invalid_body
from truedraft.server.http.json_body import parse_json
from truedraft.server.http.work import in_thread_if_long, start_clock
from truedraft.server.stages import current_stages, timed


class JsonRequest(Request):
    """A request whose body has been validated already; FastAPI takes an instance of the model as it is."""

    parsed: Any = None

    async def json(self) -> Any:
        return self.parsed


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        assert self.body_field is not None
        annotation: Any = self.body_field.field_info.annotation
        model: TypeAdapter[Any] = TypeAdapter(annotation)

        def read(content: bytes) -> Any:
            with timed("parse"):
                value = parse_json(content)
                try:
                    return model.validate_python(value)
                except ValidationError as error:
                    raise invalid_body(error, value) from None

        async def read_and_handle(request: Request) -> Response:
            _require_json(request)
            request = JsonRequest(request.scope, request.receive)
            try:
                content = await request.body()
            except ClientDisconnect as error:
                raise ClientDisconnectedError("The client closed the connection.") from error
            start_clock(request)
            stages = current_stages()
            stages.add("body", time.perf_counter() - stages.arrived)
            if content:  # FastAPI says what an empty body lacks
                request.parsed = await in_thread_if_long(request, read, content)
            return await self.answer(request, handle)

        return read_and_handle

    async def answer(
        self, request: JsonRequest, handle: Callable[[Request], Coroutine[Any, Any, Response]]
    ) -> Response:
        """Answers a request whose body has been read; others may do it in other ways."""
        return await handle(request)


def _require_json(request: Request) -> None:
    """Without this FastAPI would call a form body a wrong type, and a compressed one would be bad UTF-8."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    main, _, sub = media_type.partition("/")
    if main != "application" or (sub != "json" and not sub.endswith("+json")):
        raise UnsupportedMediaTypeError("Send the request as JSON with 'Content-Type: application/json'.")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaTypeError("Send the request as it is, without a Content-Encoding.")

"""Refuses request bodies over a size, before they are in memory.

FastAPI's own limit answers in plain text, which OpenAI clients cannot read. Installed by ``server.app``.
"""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Of a declared length that are read; Python refuses to read thousands of them.
MAX_DIGITS = 18


class BodyLimitMiddleware:
    def __init__(self, app: ASGIApp, max_body_size: int) -> None:
        self._app = app
        self._max_body_size = max_body_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        received = int(declared[:MAX_DIGITS]) if declared.isdecimal() else 0

        async def limited_receive() -> Message:
            """The route that reads the body gets the error, and the error handlers write the answer."""
            nonlocal received
            if received > self._max_body_size:
                raise HTTPException(413)
            message = await receive()
            if not declared and message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_body_size:
                    raise HTTPException(413)
            return message

        await self._app(scope, limited_receive, send)

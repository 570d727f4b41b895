"""Refuses request bodies over a size, before they are in memory, and clients that stop sending one.

FastAPI's own limit answers in plain text, which OpenAI clients cannot read. Installed by ``server.app``.
"""

import asyncio

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Of a declared length that are read; Python refuses to read thousands of them.
MAX_DIGITS = 18


class BodyLimitMiddleware:
    def __init__(self, app: ASGIApp, max_body_size: int, timeout: float) -> None:
        self._app = app
        self._max_body_size = max_body_size
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        received = int(declared[:MAX_DIGITS]) if declared.isdecimal() else 0

        loop = asyncio.get_running_loop()
        deadline, is_complete = loop.time() + self._timeout, False

        async def limited_receive() -> Message:
            """The route that reads the body gets the error, and the error handlers write the answer."""
            nonlocal received, is_complete
            if received > self._max_body_size:
                raise HTTPException(413)
            if is_complete:
                return await receive()  # waits for the client to leave
            try:
                message = await asyncio.wait_for(receive(), deadline - loop.time())
            except TimeoutError:
                raise HTTPException(408, headers={"connection": "close"}) from None
            is_complete = not message.get("more_body", False)
            if not declared and message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_body_size:
                    raise HTTPException(413)
            return message

        await self._app(scope, limited_receive, send)

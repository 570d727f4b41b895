"""Refuses request bodies over a size, before they are in memory, and clients that stop sending one.

It also bounds what all open requests hold together, and how many of them one API key has, from the first
byte to the end of the answer. FastAPI's own limit answers in plain text, which OpenAI clients cannot read.
Installed by ``server.app``.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from truedraft.server.errors import QueueFullError, TooManyRequestsError
from truedraft.server.http.auth import api_key_of
from truedraft.server.http.error_answer import error_answer
from truedraft.server.settings import RequestSettings

# A declared length may have this many digits; Python refuses to convert thousands of them.
MAX_DIGITS = 18


class BodyLimitMiddleware:
    """``num_abandoned`` says how many threads work for requests of a key that have ended."""

    def __init__(
        self,
        app: ASGIApp,
        settings: RequestSettings,
        count_error: Callable[[str], None],
        held: "HeldBodies",
        num_abandoned: Callable[[str], int],
    ) -> None:
        self._app = app
        self._max_body_size = settings.max_body_size
        self._timeout = settings.body_timeout
        self._count_error = count_error
        self._held = held
        self._num_abandoned = num_abandoned
        self._max_concurrent = settings.max_concurrent_per_key
        self._num_open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        key = api_key_of(scope)
        if key and self._is_full(key):
            error = TooManyRequestsError(
                f"This API key has {self._max_concurrent} requests open, which is the most "
                "(max_concurrent_per_key). Requests that were given up count until what was begun for them "
                "has ended. Try again when one has ended."
            )
            self._count_error(error.code or error.type)
            await error_answer(error, scope)(scope, receive, send)
            return
        body = _Body(receive, scope, self._max_body_size, self._timeout, self._held, key)
        self._num_open[key] += 1
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._num_open[key] -= 1
            self._held.let_go(body.received, key)

    def _is_full(self, key: str) -> bool:
        num_open = self._num_open[key] + self._num_abandoned(key)
        return self._max_concurrent is not None and num_open >= self._max_concurrent


class HeldBodies:
    """Bytes of all of them. A key may have its even share of the limit whatever the others have."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()
        self.num_bytes = 0

    def hold(self, num_bytes: int, key: str) -> None:
        """``QueueFullError`` if there is no room for them."""
        own, others = self._held[key], self.num_bytes - self._held[key]
        num_keys = len(+self._held) + (not own)
        is_full = self.num_bytes + num_bytes > self._limit
        if own + others and is_full and (own + num_bytes) * num_keys > self._limit:
            raise QueueFullError(
                f"The bodies of open requests have {self.num_bytes} bytes, and this one would exceed the "
                f"limit of {self._limit} (max_held_bodies). Try again later."
            )
        self._held[key] += num_bytes
        self.num_bytes += num_bytes

    def let_go(self, num_bytes: int, key: str) -> None:
        self._held[key] -= num_bytes
        self.num_bytes -= num_bytes


class _Body:
    """Limits one request's body. The route that reads it gets the errors, which the error handlers answer."""

    def __init__(
        self, receive: Receive, scope: Scope, max_size: int, timeout: float, held: HeldBodies, key: str
    ) -> None:
        self._receive = receive
        self._max_size = max_size
        self._deadline = asyncio.get_running_loop().time() + timeout
        self._held = held
        self._key = key
        self._is_complete = False
        declared = Headers(scope=scope).get("content-length", "")
        self._declared = int(declared[:MAX_DIGITS]) if declared.isdecimal() else 0
        self.received = 0

    async def receive(self) -> Message:
        if self._declared > self._max_size:
            raise HTTPException(413)
        if self._is_complete:
            return await self._receive()  # waits for the client to leave
        try:
            seconds = self._deadline - asyncio.get_running_loop().time()
            message = await asyncio.wait_for(self._receive(), seconds)
        except TimeoutError:
            raise HTTPException(408, headers={"connection": "close"}) from None
        self._is_complete = not message.get("more_body", False)
        if message["type"] == "http.request" and (size := len(message.get("body", b""))):
            if self.received + size > self._max_size:
                raise HTTPException(413)
            self._held.hold(size, self._key)
            self.received += size
        return message

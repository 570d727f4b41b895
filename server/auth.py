"""Bearer-key authentication as ASGI middleware, so that it answers before a body is read.

Knows nothing of routes but the few that stay open for probes and scrapers. Installed by ``server.app``
when ``api_keys`` is set.
"""

import hmac
from collections.abc import Callable, Sequence

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import AuthenticationError

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})


class BearerAuthMiddleware:
    def __init__(self, app: ASGIApp, api_keys: Sequence[str], count_error: Callable[[str], None]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = AuthenticationError("Missing or wrong API key. Send 'Authorization: Bearer YOUR_KEY'.")
        self._count_error("invalid_api_key")
        await JSONResponse(error.body(), error.status, error.headers())(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode()
        # Every key is compared, each in constant time, so that timing tells nothing about any of them.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)

"""Bearer-key authentication as ASGI middleware, so that it answers before a body is read.

Knows nothing of routes but the few that stay open for probes and scrapers. Installed by ``server.app``
when ``api_keys`` is set.
"""

import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from truedraft.server.errors import AuthenticationError

# For probes, scrapers and the pages that browsers open without a key: they ask for it, or say how to send it.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json"})
OPEN_FOLDER = "/page/"


def api_key_of(scope: Mapping[str, Any]) -> str:
    """A name for the key that a request came with, which tells nothing of the key; empty without keys."""
    return str(scope.get("state", {}).get("api_key", ""))


def _path(scope: Scope) -> str:
    """Below ``root_path``, with which a proxy may or may not have sent it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


class BearerAuthMiddleware:
    def __init__(self, app: ASGIApp, api_keys: Sequence[str], count_error: Callable[[str], None]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(_path(scope)):
            await self._app(scope, receive, send)
            return
        if (number := self._number_of(Headers(scope=scope))) is not None:
            scope.setdefault("state", {})["api_key"] = f"key-{number}"
            await self._app(scope, receive, send)
            return
        error = AuthenticationError("Missing or wrong API key. Send 'Authorization: Bearer YOUR_KEY'.")
        self._count_error("invalid_api_key")
        await JSONResponse(error.body(), error.status, error.headers())(scope, receive, send)

    def _number_of(self, headers: Headers) -> int | None:
        """Which of the keys the request has."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode()
        # Every key is compared, each in constant time, so that timing tells nothing about any of them.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return matches.index(True) if scheme.lower() == "bearer" and any(matches) else None

"""This middleware asks for API keys, before a body is read.

Knows nothing of routes but the few that stay open for probes and scrapers. Installed by ``server.app``
when ``api_keys`` is set.
"""

import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from truedraft.server.errors import AuthenticationError
from truedraft.server.http.error_answer import error_answer, path_below_root

# Probes, scrapers and browsers open these without a key. The pages ask for it, or say how to send it.
OPEN_PATHS = frozenset(
    (
        "/",
        "/health",
        "/ready",
        "/metrics",
        "/version",
        "/docs",
        "/openapi.json",
        "/load",
        "/ping",
        "/v1/health",
    )
)
OPEN_FOLDER = "/page/"


def api_key_of(scope: Mapping[str, Any]) -> str:
    """Returns a name for the request's key, from which the key cannot be learned; empty without keys."""
    return str(scope.get("state", {}).get("api_key", ""))


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


class KeyAuthMiddleware:
    def __init__(self, app: ASGIApp, api_keys: Sequence[str], count_error: Callable[[str], None]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(path_below_root(scope)):
            await self._app(scope, receive, send)
            return
        if (number := self._number_of(Headers(scope=scope))) is not None:
            scope.setdefault("state", {})["api_key"] = f"key-{number}"
            await self._app(scope, receive, send)
            return
        error = AuthenticationError(
            "Missing or wrong API key. Send 'Authorization: Bearer YOUR_KEY' or 'x-api-key: YOUR_KEY'."
        )
        self._count_error("invalid_api_key")
        await error_answer(error, scope)(scope, receive, send)

    def _number_of(self, headers: Headers) -> int | None:
        """Returns which of the keys the request has, in OpenAI's header or in Anthropic's."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        bearer = key.strip() if scheme.lower() == "bearer" else ""
        for given in (bearer, headers.get("x-api-key", "").strip()):
            # Every key is compared, each in constant time, so that timing tells nothing about any of them.
            matches = [hmac.compare_digest(given.encode(), known) for known in self._keys]
            if given and any(matches):
                return matches.index(True)
        return None

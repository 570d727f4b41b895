"""This middleware calls what a request has left to be done at its end, when its answer is out or given up."""

from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

AT_END = "at_end"


def at_end(scope: Scope, call: Callable[[], Any]) -> None:
    """Has ``call`` called at the end of the request."""
    scope["state"][AT_END].append(call)


class AtEndMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        calls: list[Callable[[], Any]] = scope.setdefault("state", {}).setdefault(AT_END, [])
        try:
            await self._app(scope, receive, send)
        finally:
            for call in calls:
                call()

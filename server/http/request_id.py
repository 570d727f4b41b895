"""Gives every HTTP request an id, answers HEAD like GET, and answers for our own bugs.

The client's ``x-request-id`` is kept if it is sane, else one is made; it is in the answer's headers and in
the log. An unhandled exception becomes a 500 with the id and nothing else.
"""

import logging
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from truedraft.server.errors import internal_error
from truedraft.server.http.error_answer import error_answer, is_messages
from truedraft.server.observability.logs import current_request_id

logger = logging.getLogger("truedraft.request")

HEADER = "x-request-id"
MESSAGES_HEADER = "request-id"  # read by clients of Anthropic's API
# It stands in the log between brackets, so it has neither those nor spaces.
SANE = re.compile(r"[!#-'*-Z^-z|~]{1,128}")


def request_id_of(scope: Mapping[str, Any]) -> str:
    return str(scope["state"]["request_id"])


class RequestIdMiddleware:
    """Outside of all that may answer, so that every answer has the header."""

    def __init__(
        self,
        app: ASGIApp,
        root_path: str,
        count_error: Callable[[str], None],
        count_answer: Callable[[str, int], None],
    ) -> None:
        self._app = app
        self._root_path = root_path
        self._count_answer = count_answer
        self._count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # uvicorn would put the path in front of every request's, which is wrong where the proxy has not
        # taken it away.
        scope = {**scope, "root_path": self._root_path}
        if scope["method"] == "HEAD":
            scope["method"] = "GET"  # uvicorn, which has its own copy, leaves the body out
        request_id = _accept_or_make(Headers(scope=scope).get(HEADER, ""))
        scope.setdefault("state", {})["request_id"] = request_id
        current_request_id.set(request_id)
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                self._count_answer(_route_of(scope), message["status"])
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request_id
                if is_messages(scope):
                    headers[MESSAGES_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("The request failed")
            if has_started:
                raise  # the status is out; only closing the connection can tell the client
            error = internal_error(request_id)
            self._count_error("internal_error")
            await error_answer(error, scope)(scope, receive, send_with_id)


def _route_of(scope: Scope) -> str:
    """The route's own path, so that clients cannot make up new ones; "other" where there is none."""
    return str(getattr(scope.get("route"), "path", "other"))


def _accept_or_make(given: str) -> str:
    return given if SANE.fullmatch(given) else f"req_{uuid.uuid4().hex}"

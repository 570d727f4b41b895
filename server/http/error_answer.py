"""Errors become answers here: in OpenAI's shape, or in Anthropic's on the paths of Anthropic's API.

Everything that answers with an error does it here, from the middleware to the routes.
"""

import re
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from truedraft.server.errors import ApiError, ContextLengthError

# Errors have Anthropic's shape on this path and below it.
MESSAGES = "/v1/messages"

# Anthropic names these statuses. Others are the client's fault below 500, and ours from there on.
MESSAGES_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_answer(
    error: ApiError,
    scope: Mapping[str, Any],
    status: int | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """``status`` and ``headers`` replace the error's own."""
    status = status or error.status
    body: dict[str, Any] = error.body()
    if is_messages(scope):
        body = messages_error(error, status, str(scope["state"]["request_id"]))
    return JSONResponse(body, status, headers or error.headers())


def messages_error(error: ApiError, status: int, request_id: str) -> dict[str, Any]:
    """Returns the error in Anthropic's shape, with our own code where its clients look for codes."""
    ours = error.body()["error"]
    message = ours["message"]
    if isinstance(error, ContextLengthError):
        message = f"prompt is too long: {message}"  # clients look for these words, and shorten it
    kind = MESSAGES_ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"error_code": ours["code"]}
    return {
        "type": "error",
        "error": {"type": kind, "message": message, "details": details},
        "request_id": request_id,
    }


def is_messages(scope: Mapping[str, Any]) -> bool:
    path = canonical(path_below_root(scope))
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def canonical(path: str) -> str:
    """Returns a path without what clients add by mistake: slashes, and the version twice."""
    return re.sub(r"^(/v1)+(?=/v1(/|$))", "", re.sub(r"/+", "/", path).rstrip("/"))


def path_below_root(scope: Mapping[str, Any]) -> str:
    """Returns the path without ``root_path``, which a proxy may or may not have taken away."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path

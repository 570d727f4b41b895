"""Turns exceptions into answers: an ``ApiError``, a body that is not valid, an unknown path or method."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from truedraft.server.errors import (
    ApiError,
    ClientDisconnectedError,
    InvalidRequestError,
    code_of,
)
from truedraft.server.http.error_answer import canonical, error_answer
from truedraft.server.http.foreign_paths import instead_of, is_foreign
from truedraft.server.http.foreign_shapes import hint

# Statuses that the framework itself raises, as codes.
_FRAMEWORK_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "body_timeout",
    413: "request_too_large",
    426: "websocket_unsupported",
}

# pydantic's error types as OpenAI's codes; anything else is "invalid_value".
_VALIDATION_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported": "unsupported_parameter",
}


# pydantic names its classes in these.
_OBJECT_TYPES = ("model_type", "model_attributes_type", "dataclass_type", "dict_type")
OBJECT = "Input should be an object"


def install_error_handlers(app: FastAPI, count_error: Callable[[str], None]) -> None:
    def respond(
        request: Request, error: ApiError, status: int | None = None, headers: dict[str, str] | None = None
    ) -> JSONResponse:
        count_error(code_of(error))
        return error_answer(error, request.scope, status, headers)

    async def on_api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        if isinstance(error, ClientDisconnectedError):
            return JSONResponse(error.body(), error.status)
        return respond(request, error)

    async def on_validation_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first: dict[str, Any] = error.errors()[0]
        return respond(request, _from_validation(first, first["loc"][1:], error.body))

    async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        status, headers = error.status_code, dict(error.headers or {})
        if status == 405 and _is_websocket(request):
            status, headers = 426, {"upgrade": "HTTP/1.1", "connection": "upgrade"}
        message = _framework_message(status, str(error.detail), request)
        translated = InvalidRequestError(message, code=_FRAMEWORK_CODES.get(status))
        return respond(request, translated, status, headers)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)


def _is_websocket(request: Request) -> bool:
    return request.headers.get("upgrade", "").strip().lower() == "websocket"


def _framework_message(status: int, detail: str, request: Request) -> str:
    method, path = request.method, request.url.path
    match status:
        case 404:
            unknown = f"Unknown path: {method} {path}"
            words, near = instead_of(path), near_path(request)
            if words is not None and (near is None or is_foreign(path)):
                return f"{unknown}. Here, {words}"
            return unknown + (f". Did you mean {near}?" if near else "")
        case 405:
            return f"{method} is not allowed for {path}"
        case 408:
            return "The request's body did not arrive in time (body_timeout)."
        case 413:
            return "The request body is larger than this server accepts (max_body_size)."
        case 426:
            return f"{path} does not speak WebSocket; send a POST with 'stream': true."
    return detail


def near_path(request: Request) -> str | None:
    """Returns the path that was probably meant: with the version once, without what is in front, a plural."""
    given = request.url.path
    path = canonical(given).lower()
    ends = [path[place:] for place, character in enumerate(path[:200]) if character == "/"]
    candidates = [each for end in ends for each in (end, f"/v1{end}", f"{end}s", f"/v1{end}s")]
    known = (path for path in candidates if path != given and _exists(path, request))
    return next(known, None)


def _exists(path: str, request: Request) -> bool:
    scope = {**request.scope, "path": path, "root_path": ""}
    return any(route.matches(scope)[0] != Match.NONE for route in request.app.routes)


def invalid_body(error: ValidationError, body: Any) -> InvalidRequestError:
    """Returns the first problem of a body. Lists and mappings stop at their first one, so there are few."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return _from_validation(first, first["loc"], body)


def _from_validation(
    first: Mapping[str, Any], location: Sequence[str | int], body: Any
) -> InvalidRequestError:
    kind = str(first["type"])
    path = _path(location, body)
    param = ".".join(path) or None
    code = _VALIDATION_CODES.get(kind, "invalid_type" if kind.endswith(("_type", "_parsing")) else None)
    message = OBJECT if kind in _OBJECT_TYPES else str(first["msg"]).removeprefix("Value error, ")
    if kind == "missing" and param is None:
        message = "There is none; send the request as a JSON object"
    foreign = hint(path, kind, body)
    if foreign is not None:
        message = f"{message}; {foreign}"
    return InvalidRequestError(f"{param or 'body'}: {message}", param=param, code=code)


def _path(location: Sequence[str | int], body: Any) -> list[str]:
    """Returns the fault's place in the body: pydantic's location without the names of its alternatives."""
    path = []
    for number, part in enumerate(location):
        is_key = isinstance(body, dict) and part in body
        is_index = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if is_key or is_index:
            body = body[part]
        elif number < len(location) - 1 or not isinstance(body, dict):
            continue  # the last one may be a key that is missing
        path.append(str(part))
    return path

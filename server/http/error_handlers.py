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
from truedraft.server.http.error_answer import error_answer

# Statuses that the framework itself raises, as codes.
_FRAMEWORK_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "body_timeout",
    413: "request_too_large",
}

# pydantic's error types as OpenAI's codes; anything else is "invalid_value".
_VALIDATION_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported": "unsupported_parameter",
}


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
        message = _framework_message(error, request)
        translated = InvalidRequestError(message, code=_FRAMEWORK_CODES.get(error.status_code))
        return respond(request, translated, error.status_code, dict(error.headers or {}))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)


def _framework_message(error: HTTPException, request: Request) -> str:
    if error.status_code == 404:
        path = request.url.path
        with_version = {**request.scope, "path": f"/v1{path}"}
        is_known = any(route.matches(with_version)[0] != Match.NONE for route in request.app.routes)
        return f"Unknown path: {request.method} {path}" + (f". Did you mean /v1{path}?" if is_known else "")
    if error.status_code == 405:
        return f"{request.method} is not allowed for {request.url.path}"
    if error.status_code == 408:
        return "The request's body did not arrive in time (body_timeout)."
    if error.status_code == 413:
        return "The request body is larger than this server accepts (max_body_size)."
    return str(error.detail)


def invalid_body(error: ValidationError, body: Any) -> InvalidRequestError:
    """Returns the first problem of a body. Lists and mappings stop at their first one, so there are few."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return _from_validation(first, first["loc"], body)


def _from_validation(
    first: Mapping[str, Any], location: Sequence[str | int], body: Any
) -> InvalidRequestError:
    kind = str(first["type"])
    param = ".".join(_path(location, body)) or None
    code = _VALIDATION_CODES.get(kind, "invalid_type" if kind.endswith(("_type", "_parsing")) else None)
    message = str(first["msg"]).removeprefix("Value error, ")
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

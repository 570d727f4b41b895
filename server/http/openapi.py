"""The OpenAPI document is what FastAPI makes of the schemas; here errors, streams and keys are described.

Examples name the model that is served here, so that they work when pasted. Installed by ``server.app``.
"""

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from truedraft.server.entries import BUNDLED_MODEL_NAME
from truedraft.server.errors import ErrorAnswer
from truedraft.server.settings import Settings

DESCRIPTION = """\
An OpenAI-compatible API. A field that changes the output is honoured, or refused by name with a 400. One that
only asks for extra output, is metadata or is unknown is ignored and listed in the `x-truedraft-ignored`
header (or refused, with the setting `strict_fields`).

Every answer has an `x-request-id`: the request's own, if it sent a valid one. Every error is
`{"error": {"message", "type", "param", "code"}}`; those of `/v1/messages` have Anthropic's shape. A stream
has its HTTP status decided before its first byte; an error after that is its last event.
"""

TAGS = [
    {"name": "generate", "description": "Text out of text."},
    {
        "name": "embed",
        "description": "Vectors of texts, and scores of pairs, of models that are made for them.",
    },
    {"name": "tokenize", "description": "The model's tokenizer."},
    {"name": "models", "description": "What is served."},
    {"name": "gateways", "description": "What gateways ask of other servers."},
    {"name": "operate", "description": "For probes, scrapers and people. Open without a key, but for one."},
]

Responses = dict[int | str, dict[str, Any]]


def _error(description: str, *, may_retry: bool = False) -> dict[str, Any]:
    described: dict[str, Any] = {"model": ErrorAnswer, "description": description}
    if may_retry:
        seconds = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
        described["headers"] = {"Retry-After": seconds}
    return described


# Every route with a body has these.
BODY_ERRORS: Responses = {
    400: _error("Bad JSON, a wrong type, a value out of range, or a parameter that is not supported."),
    404: _error("Unknown model."),
    413: _error("The body is larger than `max_body_size`."),
    415: _error("The body is not declared as JSON."),
    503: _error("Loading, restarting or draining.", may_retry=True),
    "default": _error("Any other error has this shape too."),
}

# Routes that generate have these.
GENERATION_ERRORS: Responses = BODY_ERRORS | {
    429: _error(
        "Too much is waiting or open: `max_queued_sequences`, `max_queued_tokens`, `max_concurrent_per_key`.",
        may_retry=True,
    ),
    504: _error("`request_timeout` passed."),
}


def body_errors(error: type[BaseModel]) -> Responses:
    """Returns the errors of a route with a body, in a shape of its own."""
    return {status: response | {"model": error} for status, response in BODY_ERRORS.items()}


def answer_or_stream(answer: type[BaseModel], stream: str, error: type[BaseModel] = ErrorAnswer) -> Responses:
    """The responses of a generating route: ``stream`` says what its server-sent events are."""
    errors = {status: response | {"model": error} for status, response in GENERATION_ERRORS.items()}
    events = {"schema": {"type": "string", "description": stream}}
    success = {
        "model": answer,
        "description": "The answer; with `stream: true`, server-sent events.",
        "content": {"text/event-stream": events},
    }
    return {200: success, **errors}


def install_openapi(app: FastAPI, settings: Settings) -> None:
    """Finishes the document when it is first asked for, in a thread, as that takes a second."""
    original, lock = app.openapi, threading.Lock()
    finished: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        with lock:
            if not finished:
                document = _with_model(original(), settings.model_name)
                if settings.api_keys:
                    schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
                    schemes["key"] = {"type": "http", "scheme": "bearer"}
                    schemes["x-api-key"] = {"type": "apiKey", "in": "header", "name": "x-api-key"}
                    document["security"] = [{"key": []}, {"x-api-key": []}]
                finished.update(document)
            return finished

    async def answer(request: Request) -> Response:
        root_path = request.scope.get("root_path", "").rstrip("/")
        document = finished or await asyncio.to_thread(openapi)
        return JSONResponse(document | {"servers": [{"url": root_path}]} if root_path else document)

    app.openapi = openapi  # type: ignore[method-assign]
    app.add_route("/openapi.json", answer, include_in_schema=False)


def _with_model(node: Any, name: str) -> Any:
    """A copy in which the examples ask for the model ``name``."""
    if isinstance(node, Mapping):
        return {
            key: name if key == "model" and value == BUNDLED_MODEL_NAME else _with_model(value, name)
            for key, value in node.items()
        }
    return [_with_model(item, name) for item in node] if isinstance(node, list) else node

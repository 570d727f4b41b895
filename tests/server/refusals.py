"""Sends what must be refused, and checks that the worker never hears of it. For tests of bad input."""

from typing import Any

import httpx

from tests.server.running import MODEL, RunningServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Returns the error in OpenAI's shape; Anthropic's has no field for the parameter."""
    answer = response.json()
    error = dict(answer["error"])
    if "/v1/messages" not in response.request.url.path:
        assert set(error) == {"message", "type", "param", "code"}
        return error
    assert (set(answer), answer["type"]) == ({"type", "error", "request_id"}, "error")
    assert answer["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert set(error) == {"message", "type", "details"}
    return error | {"code": error["details"]["error_code"]}


def refusal(server: RunningServer, response: httpx.Response, num_before: int) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    assert server.messages_to_worker("Generate")[num_before:] == []
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert len(response.content) < 10_000
    return error


def refused(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    num_before = len(server.messages_to_worker("Generate"))
    return refusal(server, server.post(path, body), num_before)


def refused_raw(server: RunningServer, content: bytes, path: str = COMPLETIONS) -> dict[str, Any]:
    num_before = len(server.messages_to_worker("Generate"))
    headers = {"content-type": "application/json"}
    return refusal(server, server.client.post(path, content=content, headers=headers), num_before)


def body(extra: str, prompt: str = '"x"') -> bytes:
    return f'{{"model": "{MODEL}", "prompt": {prompt}, "max_tokens": 1, {extra}}}'.encode()

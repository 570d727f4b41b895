"""Reads a raw event stream; shared by the tests of both endpoints."""

import json
from typing import Any

from tests.server.running import RunningServer


def events(body: str) -> list[Any]:
    """Returns the JSON of every event; the stream must hold only data lines and end with [DONE]."""
    *lines, done, end = body.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(line.startswith("data: {") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def answers(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    """The chunks of a stream, or the one answer."""
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return events(response.text) if body.get("stream") else [response.json()]

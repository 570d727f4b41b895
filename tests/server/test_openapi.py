"""The document behind /docs is complete: everything is described, and everything pasted from it works."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import StartServer
from tests.server.growing_requests import OF_VECTORS
from tests.server.running import MODEL, RunningServer
from tests.server.test_every_body_route import COMMANDS
from truedraft.server.http.openapi import TAGS

REQUESTS = [
    "CompletionRequest",
    "ChatRequest",
    "ResponsesRequest",
    "MessagesRequest",
    "TokenCountRequest",
    "TokenizeRequest",
    "DetokenizeRequest",
    "EmbeddingRequest",
    "RerankRequest",
    "ScoreRequest",
    "SpeculationOptions",
    "ChunkStreamOptions",
]


@pytest.fixture
def document(server: RunningServer) -> dict[str, Any]:
    return dict(server.get("/openapi.json").json())


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


@pytest.mark.parametrize("name", REQUESTS)
def test_every_field_is_described(document: dict[str, Any], name: str) -> None:
    for field, schema in document["components"]["schemas"][name]["properties"].items():
        assert schema.get("description"), f"{name}.{field}"


def test_every_operation_is_described(document: dict[str, Any]) -> None:
    tags = {tag["name"] for tag in TAGS}
    for name, operation in operations(document):
        assert operation["summary"], name
        assert operation["description"], name
        assert set(operation["tags"]) <= tags, name
        assert "422" not in operation["responses"], name


# Their answers come in one piece.
WHOLE = {"POST /v1/decisions"}


def test_errors_are_described(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        if not name.startswith("POST"):
            continue
        expected = {"200", "400", "404", "413", "415", "503", "default"}
        generates = name.startswith(("POST /v1/", "POST /infill")) and not name.endswith(
            ("_tokens", "/render", "_adapter")
        )
        expected |= {"429", "504"} if generates else set()
        if name.removeprefix("POST ") in COMMANDS:
            expected |= {"403", "409"}
            expected -= set() if "requestBody" in operation else {"413", "415"}
        assert set(operation["responses"]) == expected
        for status, response in operation["responses"].items():
            schema = response["content"]["application/json"]["schema"]
            schema = schema.get("items", schema)["$ref"]
            shape = "/MessagesErrorAnswer" if "/v1/messages" in name else "/ErrorAnswer"
            assert schema.endswith(shape) == (status != "200"), (name, status)
        streams = generates and name not in WHOLE and not name.endswith(OF_VECTORS)
        assert ("text/event-stream" in operation["responses"]["200"]["content"]) == streams


def test_examples_work_with_the_served_name(
    server: RunningServer, vector_server: RunningServer, document: dict[str, Any]
) -> None:
    for name, operation in operations(document):
        if not name.startswith("POST") or name.removeprefix("POST ") in COMMANDS:
            continue
        content = operation["requestBody"]["content"]["application/json"]
        assert content["examples"], name
        for title, example in content["examples"].items():
            assert example["summary"], (name, title)
            assert example["value"]["model"] == MODEL
            asked = vector_server if name.endswith(OF_VECTORS) else server
            response = asked.client.post(name.split()[1], json=example["value"])
            assert response.status_code == 200, (name, title, response.text)
            assert "x-truedraft-ignored" not in response.headers


def test_keys_are_described_where_there_are_some(document: dict[str, Any], start_server: StartServer) -> None:
    assert "security" not in document
    with start_server(api_keys=["one"]) as server:
        headers = {"authorization": "Bearer one"}
        locked = server.get("/openapi.json", headers=headers).json()
        assert locked["security"] == [{"key": []}, {"x-api-key": []}]
        assert locked["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
        assert locked["components"]["securitySchemes"]["x-api-key"]["name"] == "x-api-key"
        assert server.get("/docs", headers=headers).status_code == 200

"""What holds for every route that takes a body: the same refusals before the worker hears of anything.

The routes are read from the application, so that one that is added later is held to it too.
"""

import gzip
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import StartServer
from tests.server.refusals import error_of, refused_raw
from tests.server.running import MODEL, RunningServer
from truedraft.server.cli.launch import make_app
from truedraft.server.settings import Settings

# A valid request for each, with few tokens.
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/decisions": {"input": "x", "questions": [{"type": "predicate", "instructions": "y"}]},
    "/v1/completions/render": {"prompt": "x"},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "x"}]},
    "/infill": {"input_prefix": "x", "n_predict": 1},
    "/api/show": {"verbose": True},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [120]},
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "x", "documents": ["x"]},
    "/v1/score": {"text_1": "x", "text_2": "x"},
}
# Routes that load and unload the model; tests of several models use them.
ADAPTERS = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
COMMANDS = {"/models/load", "/models/unload", "/sleep", "/wake_up", "/prefix_cache/clear", *ADAPTERS}
# These ask a model that does not write text.
OF_VECTORS = ("/v1/embeddings", "/v1/rerank", "/v1/score")
JSON = {"content-type": "application/json"}
# Values that no field of any body takes for all of these types.
ODD_VALUES: tuple[Any, ...] = (True, 3, "x", [1], {"a": 1})
each_route = pytest.mark.parametrize("path", sorted(VALID))


@pytest.fixture
def server(path: str, shared_server: RunningServer, vector_server: RunningServer) -> RunningServer:
    """The server whose model the route asks."""
    found = vector_server if path in OF_VECTORS else shared_server
    found.wait_until_idle()
    return found


@each_route
def test_fields_of_other_bodies_are_no_failure(server: RunningServer, path: str) -> None:
    """A field that another route declares has any type where this one does not declare it."""
    schemas = server.get("/openapi.json").json()["components"]["schemas"]
    bodies = [schema for name, schema in schemas.items() if name.endswith("Request")]
    names = sorted({name for schema in bodies for name in schema["properties"]})
    assert {"tools", "stop", "continue_final_message", "max_tokens", "metadata"} <= set(names)
    for name in names:
        for value in ODD_VALUES:
            answer = server.post(path, {"model": MODEL, **VALID[path], name: value})
            assert answer.status_code in {200, 400, 404, 422}, (name, value, answer.text)


def test_no_route_is_left_out() -> None:
    settings = Settings()
    paths = make_app(settings).openapi()["paths"]
    assert {path for path, methods in paths.items() if "post" in methods} == set(VALID) | COMMANDS


@each_route
def test_valid_request(server: RunningServer, path: str) -> None:
    assert server.post(path, VALID[path]).status_code == 200


@each_route
@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{", "invalid_json"),
        (b'{"model": "\xff"}', "invalid_json"),
        (b'{"model": NaN}', "invalid_json"),
        (b'{"model": Infinity}', "invalid_json"),
        (b'{"model": "\\ud800"}', "invalid_json"),
        (b'{"a": ' * 101 + b"1" + b"}" * 101, "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"model": %s}' % (b"9" * 5000), "invalid_json"),
        (b'{"model": "m", "model": "m"}', "duplicate_key"),
        (b"[]", "invalid_type"),
        (b"null", "invalid_type"),
        (b'"x"', "invalid_type"),
        (b"", "missing_required_parameter"),
        (b'{"model": 1e400}', "invalid_type"),
        (b'{"model": [[[[{"a": "b"}]]]]}', "invalid_type"),
        (b'{"model": -99999999999999999999999999}', "invalid_type"),
    ],
    ids=str,
)
def test_bad_json(server: RunningServer, path: str, content: bytes, code: str) -> None:
    assert refused_raw(server, content, path)["code"] == code


@each_route
def test_large_bodies(server: RunningServer, path: str) -> None:
    for headers in (JSON, JSON | {"transfer-encoding": "chunked"}):
        content = b"x" * (10 << 20)
        sent: Any = iter([content]) if "transfer-encoding" in headers else content
        response = server.client.post(path, content=sent, headers=headers)
        assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")


@each_route
def test_other_content_types_and_encodings(server: RunningServer, path: str) -> None:
    response = server.client.post(path, content=b"a=b", headers={"content-type": "text/plain"})
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")
    headers = JSON | {"content-encoding": "gzip"}
    response = server.client.post(path, content=gzip.compress(b'{"model": "x"}'), headers=headers)
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")


@each_route
def test_other_methods(server: RunningServer, path: str) -> None:
    response = server.get(path)
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")


@each_route
def test_unknown_model(server: RunningServer, path: str) -> None:
    response = server.post(path, VALID[path] | {"model": "gpt-9\u0000"})
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    assert "'gpt-9\u0000'" in error_of(response)["message"]


def test_keys_origins_and_limits(start_server: StartServer) -> None:
    settings: dict[str, Any] = {"api_keys": ["one"], "cors_origins": ["https://a.example"]}
    for task in ("generate", "embed"):
        bodies = {path: body for path, body in VALID.items() if (path in OF_VECTORS) == (task == "embed")}
        _check_keys_origins_and_limits(start_server, settings, task, bodies)


def _check_keys_origins_and_limits(
    start_server: StartServer, settings: dict[str, Any], task: str, bodies: dict[str, dict[str, Any]]
) -> None:
    with start_server("--task", task, **settings, max_body_size=200) as server:
        for path, body in bodies.items():
            refused = server.post(path, body, headers={"origin": "https://a.example"})
            assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
            assert refused.headers["access-control-allow-origin"] == "https://a.example"
            key = {"authorization": "Bearer one"}
            assert server.post(path, body, headers=key).status_code == 200
            large = server.post(path, body | {"user": "x" * 200}, headers=key)
            assert (large.status_code, error_of(large)["code"]) == (413, "request_too_large")


def test_while_loading(start_server: StartServer, tmp_path: Path) -> None:
    with start_server(wait=False) as server:
        for path, body in VALID.items():
            response = server.post(path, {"model": MODEL} | body)
            assert (response.status_code, response.headers["retry-after"]) == (503, "2")
            assert error_of(response)["code"] == "not_ready"

"""Thousands of requests that schemathesis generates from the server's own OpenAPI: ``make fuzz``.

The real application answers, around the tests' fake worker, so that time goes into the front end. Some
requests fit the API's description, the others break it somewhere. Whatever comes, the answer must not be a
500, must have a status, a content type and a body that the description has; an error has OpenAI's shape.
Generated without chance: the same requests every time. A failure prints a curl command that repeats it.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from pydantic import BaseModel
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.running import MODEL, RunningServer, run_server
from tests.server.tiny_tokenizer import write_tokenizer
from tests.server.wire import ChatChunk
from truedraft.server.cli.launch import make_app
from truedraft.server.schemas.completion import Completion
from truedraft.server.schemas.messages import MessagesErrorAnswer
from truedraft.server.settings import Settings
from truedraft.server.text.tokenizer import load_tokenizer

MIN_CASES = 2000
CASES_PER_ROUTE = 500
TIMEOUT_SECONDS = 60
MAX_CHOICES = 3  # more would only cost time

app = make_app(Settings(target="tiny-model"))
schema = schemathesis.openapi.from_dict(app.openapi())
schema.config.max_stream_events = 10_000  # its default stops reading a stream long before its end
CHUNKS: dict[str, type[BaseModel]] = {"/v1/completions": Completion, "/v1/chat/completions": ChatChunk}
NAMED = ("/v1/responses", "/v1/messages")  # whose events have names
answers: Counter[tuple[str, int]] = Counter()


@schema.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """A random model name would end every case as a 404, and 128 choices would take their time."""
    if not isinstance(body, dict):
        return body
    changed = dict(body)
    if isinstance(changed.get("model"), str):
        changed["model"] = MODEL
    n = changed.get("n")
    if isinstance(n, int) and not isinstance(n, bool) and MAX_CHOICES < n <= 128:
        changed["n"] = 1 + n % MAX_CHOICES
    return changed


def error_in_shape(context: Any, response: Any, case: schemathesis.Case) -> None:
    """OpenAI's or Anthropic's, with a text in it, whatever the status; probes have a shape of their own."""
    if response.status_code < 400 or case.path == "/ready":
        return
    body = response.json()
    if case.path.startswith("/v1/messages"):
        MessagesErrorAnswer.model_validate(body, extra="forbid", strict=True)
        return
    assert set(body) == {"error"}, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert all(error[name] is None or isinstance(error[name], str) for name in ("param", "code")), error


def stream_in_shape(context: Any, response: Any, case: schemathesis.Case) -> None:
    """``data:`` lines of JSON objects, ``event:`` lines on the routes of ``NAMED`` only, the right end."""
    if not is_stream(response):
        return
    text = response.content.decode("utf-8")
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    is_named = case.path in NAMED
    datas = []
    for block in blocks:
        if block.startswith(":"):
            continue
        *names, data = block.split("\n")
        assert data.startswith("data: "), block
        assert [name.startswith("event: ") for name in names] == ([True] if is_named else []), block
        datas.append(data.removeprefix("data: "))
    if not is_named:
        assert datas.pop() == "[DONE]"
    if is_named:
        assert all(isinstance(json.loads(data)["type"], str) for data in datas)
    else:
        for data in datas:  # none of them may be an error
            CHUNKS[case.path].model_validate_json(data, extra="forbid")


def body_in_shape(context: Any, response: Any, case: schemathesis.Case) -> None:
    """Streams aside: described as text, which schemathesis takes for the description of one event."""
    if not is_stream(response):
        response_schema_conformance(context, response, case)


def bad_data_is_refused(context: Any, response: Any, case: schemathesis.Case) -> None:
    """Routes are left out whose kinds of input items overlap in the document: ``oneOf`` fits neither."""
    if case.path not in (*NAMED, "/v1/messages/count_tokens"):
        negative_data_rejection(context, response, case)


def is_stream(response: Any) -> bool:
    return bool(response.headers.get("content-type", [""])[0].startswith("text/event-stream"))


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    bad_data_is_refused,
    body_in_shape,
    error_in_shape,
    stream_in_shape,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    model = write_tokenizer(folder / "tiny-model")
    with run_server(model, load_tokenizer(str(model)), folder) as running:
        yield running


@schema.parametrize()
@settings(
    max_examples=CASES_PER_ROUTE,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_route(case: schemathesis.Case, server: RunningServer) -> None:
    response = case.call(base_url=server.url, timeout=TIMEOUT_SECONDS)
    answers[f"{case.method} {case.path}", response.status_code] += 1
    case.validate_response(response, checks=CHECKS)


def test_cases_were_many_and_of_both_kinds(
    server: RunningServer, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs last. A fuzzer whose every request is refused at the door would prove little."""
    total = sum(answers.values())
    with capsys.disabled():
        print(f"\n{total} cases. Answers by route and status:")
        for (route, status), count in sorted(answers.items()):
            print(f"  {route:30} {status}  {count:5}")
    if pytestconfig.getoption("keyword") or not answers:
        pytest.skip("only a part of the routes was asked for")
    assert total >= MIN_CASES
    for path in (path for path, item in app.openapi()["paths"].items() if "post" in item):
        assert answers[f"POST {path}", 200] >= 20, f"nearly every request to {path} was refused"
        assert answers[f"POST {path}", 400] >= 20, f"nearly every request to {path} was accepted"
    assert server.get("/ready").status_code == 200

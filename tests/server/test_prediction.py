"""Predicted outputs over HTTP: shapes, what the worker gets, usage in answers and streams, refusals.

The fake worker says "Hello, wörld..." in bytes, four a step, and drafts three of the prediction in each.
"""

from typing import Any

import pytest

from tests.server.running import RunningServer
from tests.server.test_errors import error_of
from tests.server.wire import answers

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
endpoints = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
ways_to_answer = pytest.mark.parametrize("way", [{}, WITH_USAGE], ids=str)


def prompt(path: str) -> dict[str, Any]:
    if path == COMPLETIONS:
        return {"prompt": "x"}
    return {"messages": [{"role": "user", "content": "x"}]}


def predicted(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


def counts(server: RunningServer, path: str, body: dict[str, Any]) -> tuple[int, int]:
    """Accepted and rejected, from the answer or the last chunk."""
    last = answers(server, path, prompt(path) | {"max_tokens": 8} | body)[-1]
    details = last["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@endpoints
@ways_to_answer
def test_what_appeared_and_what_did_not(server: RunningServer, path: str, way: dict[str, Any]) -> None:
    assert counts(server, path, way) == (0, 0)
    assert counts(server, path, way | predicted("Hello, w")) == (8, 0)
    assert counts(server, path, way | predicted("Hello, world")) == (8, 4)
    assert counts(server, path, way | predicted("Hello; world and more")) == (7, 14)
    assert counts(server, path, way | predicted("")) == (0, 0)
    assert counts(server, path, way | predicted("@" * 20)) == (0, 20)


@endpoints
@ways_to_answer
def test_parts_are_one_text(server: RunningServer, path: str, way: dict[str, Any]) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo, w"}]
    assert counts(server, path, way | predicted(parts)) == (8, 0)
    assert counts(server, path, way | predicted([])) == (0, 0)


@endpoints
@ways_to_answer
def test_choices_are_added_up(server: RunningServer, path: str, way: dict[str, Any]) -> None:
    assert counts(server, path, way | {"n": 3} | predicted("Hello, w")) == (24, 0)


@endpoints
def test_what_follows_a_stop_string_did_not_appear(server: RunningServer, path: str) -> None:
    assert counts(server, path, {"stop": "l"} | predicted("Hello, w"))[0] == 3


@endpoints
@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_another_method_leaves_it_unused(server: RunningServer, path: str, method: str) -> None:
    body = {"speculation": {"method": method}} | predicted("Hello, w")
    assert counts(server, path, body) == (0, 0)


@pytest.mark.parametrize(("speculation", "method"), [({}, "auto"), ({"method": "prediction"}, "prediction")])
def test_the_report_says_who_may_draft(server: RunningServer, speculation: Any, method: str) -> None:
    body = {"prompt": "x", "max_tokens": 8, "speculation": speculation} | predicted("Hello, w")
    assert answers(server, COMPLETIONS, body)[-1]["truedraft"]["method"] == method


@endpoints
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type"),
        (predicted(None), "prediction.content"),
        (predicted(5), "prediction.content"),
        (predicted({"text": "x"}), "prediction.content"),
        (predicted(["x"]), "prediction.content.0"),
        (predicted([{"type": "image_url", "text": "x"}]), "prediction.content.0.type"),
        (predicted([{"type": "text"}]), "prediction.content.0.text"),
        (predicted("x" * 600), "prediction"),
        ({"speculation": {"method": "prediction"}}, "prediction"),
        ({"speculation": {"method": "prediction"}, "prediction": None}, "prediction"),
    ],
)
def test_refusals_name_it(server: RunningServer, path: str, body: dict[str, Any], param: str) -> None:
    response = server.post(path, prompt(path) | body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


@endpoints
def test_null_is_no_prediction(server: RunningServer, path: str) -> None:
    assert counts(server, path, {"prediction": None}) == (0, 0)

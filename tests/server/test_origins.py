"""Where tokens came from: in answers and streams, and in the same numbers as usage, report and metrics."""

import json
from typing import Any

import pytest

from tests.server.conftest import StartServer
from tests.server.running import RunningServer, wait_for
from tests.server.wire import answers

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
# The fake worker drafts three tokens a step, and gives four: three accepted and one more.
ORIGINS = ["accepted"] * 3 + ["bonus"]


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = (
        {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    )
    return prompt | {"max_tokens": 20, "speculation": {"origins": True}} | fields


def text_of(choice: dict[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta")
    return str(choice.get("text", "") if message is None else message.get("content") or "")


@pytest.mark.parametrize("way", [{}, WITH_USAGE], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
def test_sums_are_those_of_usage_report_and_metrics(
    server: RunningServer, path: str, way: dict[str, Any], n: int
) -> None:
    """Characters of the text have up to four tokens, which chunks do not tear apart."""
    accepted_name = "truedraft_spec_decode_num_accepted_tokens_total"
    wait_for(lambda: server.metric("truedraft_num_requests_running") == 0, "what the worker still counts")
    generated = server.metric("truedraft_generation_tokens_total")
    accepted = server.metric(accepted_name, method="draft_model")
    chunks = answers(server, path, body(path, n=n, **way))
    tokens: list[list[dict[str, Any]]] = [[] for _ in range(n)]
    texts = [""] * n
    for chunk in chunks:
        for choice in chunk["choices"]:
            tokens[choice["index"]] += choice.get("origins") or []
            texts[choice["index"]] += text_of(choice)
            assert bool(text_of(choice)) <= bool(choice.get("origins"))
    usage, report = chunks[-1]["usage"], chunks[-1]["truedraft"]
    for own, text in zip(tokens, texts, strict=True):
        assert "".join(token["text"] for token in own) == text
        assert [token["origin"] for token in own] == ORIGINS * 5
    everything = [token for own in tokens for token in own]
    num_accepted = sum(token["origin"] == "accepted" for token in everything)
    assert len(everything) == usage["completion_tokens"] == 20 * n
    assert num_accepted == report["accepted_tokens"] == 15 * n
    assert server.metric("truedraft_generation_tokens_total") == generated + 20 * n
    assert server.metric(accepted_name, method="draft_model") == accepted + 15 * n
    assert "trace" not in report


def test_of_each_token(server: RunningServer) -> None:
    (answer,) = answers(server, COMPLETIONS, body(COMPLETIONS, return_token_ids=True))
    (choice,) = answer["choices"]
    assert [token["token_id"] for token in choice["origins"]] == choice["token_ids"]
    drafted, after = choice["origins"][2:4]
    assert drafted == {
        "text": "l",
        "token_id": ord("l"),
        "origin": "accepted",
        "source": "draft_model",
        "target_prob": 0.5,
        "draft_prob": 0.25,
    }
    assert after == drafted | {"origin": "bonus", "source": None, "target_prob": 0.75, "draft_prob": None}


@pytest.mark.parametrize(("length", "last"), [(6, "recovered"), (0, "plain"), (3, "bonus")])
def test_of_a_token_that_was_not_drafted(server: RunningServer, length: int, last: str) -> None:
    speculation = {"origins": "sources", "num_speculative_tokens": length}
    (answer,) = answers(server, COMPLETIONS, body(COMPLETIONS, max_tokens=4, speculation=speculation))
    *_, token = answer["choices"][0]["origins"]
    assert (token["origin"], token["source"]) == (last, None)


def test_sources_alone_take_no_trace(server: RunningServer) -> None:
    (answer,) = answers(server, COMPLETIONS, body(COMPLETIONS, speculation={"origins": "sources"}))
    tokens = answer["choices"][0]["origins"]
    assert {token["source"] for token in tokens} == {"draft_model", None}
    assert {token["target_prob"] for token in tokens} == {None}
    assert {token["draft_prob"] for token in tokens} == {None}


@pytest.mark.parametrize("way", [{}, {"stream": True}], ids=["whole", "stream"])
def test_a_stop_string_ends_them_with_the_text(server: RunningServer, way: dict[str, Any]) -> None:
    """Tokens up to the one that completed it count, as in usage; the stop string is not part of the text."""
    chunks = answers(server, COMPLETIONS, body(COMPLETIONS, stop="w", **way))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    tokens = [token for choice in choices for token in choice.get("origins") or []]
    assert "".join(token["text"] for token in tokens) == "".join(map(text_of, choices)) == "Hello, "
    assert len(tokens) == len("Hello, w")


def test_responses(server: RunningServer) -> None:
    asked = {"input": "x", "max_output_tokens": 8, "speculation": {"origins": True}}
    answer = server.post(RESPONSES, asked).json()
    (part,) = answer["output"][0]["content"]
    assert "".join(token["text"] for token in part["origins"]) == part["text"]
    assert len(part["origins"]) == answer["usage"]["output_tokens"]
    lines = server.post(RESPONSES, asked | {"stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [token for delta in deltas for token in delta["origins"]] == part["origins"]
    for delta in deltas:
        assert "".join(token["text"] for token in delta["origins"]) == delta["delta"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_only_for_those_who_ask(server: RunningServer, path: str) -> None:
    for speculation in ({"trace": True}, {"origins": False}):
        for way in ({}, {"stream": True}):
            chunks = answers(server, path, body(path, speculation=speculation, **way))
            assert not any("origins" in choice for chunk in chunks for choice in chunk["choices"])
    chunks = answers(server, path, body(path, speculation={"trace": True, "origins": True}))
    assert chunks[-1]["truedraft"]["trace"]


@pytest.mark.parametrize("value", ["all", 1, "true"])
def test_what_it_may_be(server: RunningServer, value: Any) -> None:
    response = server.post(COMPLETIONS, body(COMPLETIONS, speculation={"origins": value}))
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("speculation.origins")


def test_of_a_prompt_that_is_only_scored(start_server: StartServer) -> None:
    with start_server() as server:
        asked = body(COMPLETIONS, max_tokens=0, echo=True, logprobs=1)
        (answer,) = answers(server, COMPLETIONS, asked)
        assert answer["choices"][0]["origins"] == []

"""Input that no client should send: each is its own error, and the worker never hears of it."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import StartServer
from tests.server.refusals import CHAT, COMPLETIONS, body, refused, refused_raw
from tests.server.running import MODEL, RunningServer, run_server
from tests.server.tiny_tokenizer import write_tokenizer
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.server.text.tokenizer import load_tokenizer

CONTEXT = 512  # the fake worker's
VOCAB_SIZE = 260
HUGE = 10**400
INT_FIELDS = [
    "top_k",
    "n",
    "seed",
    "max_tokens",
    "min_tokens",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "priority",
]
FLOAT_FIELDS = [
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
]


@pytest.fixture(autouse=True, scope="module")
def _worker_must_not_notice(shared_server: RunningServer) -> Iterator[None]:
    """What is answered with an error has not reached the worker, and the server goes on as before."""

    def troubles() -> list[float]:
        errors = shared_server.metric("truedraft_request_errors_total", code="internal_error")
        return [shared_server.metric("truedraft_worker_restarts_total"), errors]

    before = troubles()
    yield
    assert troubles() == before
    assert shared_server.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *((COMPLETIONS, name) for name in (*INT_FIELDS, "logprobs", "best_of", *FLOAT_FIELDS)),
        *((CHAT, name) for name in (*INT_FIELDS, "top_logprobs", *FLOAT_FIELDS) if name != "max_tokens"),
    ],
)
@pytest.mark.parametrize("value", [HUGE, -HUGE], ids=["huge", "negative"])
def test_huge_integers(server: RunningServer, path: str, name: str, value: int) -> None:
    prompt: dict[str, Any] = (
        {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    )
    error = refused(server, path, prompt | {name: value})
    assert error["param"] == name
    assert error["code"] != "invalid_json"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [HUGE]}, "prompt"),
        ({"prompt": [[1], [-HUGE]]}, "prompt.1.0"),
        ({"stop_token_ids": [HUGE]}, "stop_token_ids"),
        ({"logit_bias": {"5": HUGE}}, "logit_bias.5"),
        ({"logit_bias": {str(HUGE): 1}}, "logit_bias"),
        ({"speculation": {"num_speculative_tokens": HUGE}}, "speculation.num_speculative_tokens"),
        ({"prompt": HUGE}, "prompt"),
    ],
)
def test_huge_integers_inside_of_others(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    assert refused(server, COMPLETIONS, {"prompt": "x"} | fields)["param"] == param


@pytest.mark.parametrize("number", ["1e400", "-1e400"])
def test_floats_beyond_the_largest(server: RunningServer, number: str) -> None:
    assert refused_raw(server, body(f'"temperature": {number}'))["param"] == "temperature"


@pytest.mark.parametrize("prompt", [" ", "\n", "\t \r\n", "\u00a0\u3000", "\x00"])
def test_whitespace_is_a_prompt(server: RunningServer, prompt: str) -> None:
    asked = {"max_tokens": 0, "echo": True, "return_token_ids": True}
    answer = server.post(COMPLETIONS, {"prompt": prompt} | asked)
    assert answer.status_code == 200
    choice = answer.json()["choices"][0]
    assert choice["text"] == prompt
    assert bytes(choice["prompt_token_ids"]) == prompt.encode()
    message = {"role": "user", "content": prompt}
    assert server.post(CHAT, {"messages": [message], "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("prompt", ["", [], [""], ["x", ""], [[]], [[120], []]])
def test_nothing_is_no_prompt(server: RunningServer, prompt: Any) -> None:
    assert refused(server, COMPLETIONS, {"prompt": prompt})["param"] == "prompt"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_ten_thousand_stop_strings(server: RunningServer, path: str) -> None:
    prompt: dict[str, Any] = (
        {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    )
    error = refused(server, path, prompt | {"stop": [f"stop {number}" for number in range(10_000)]})
    assert (error["param"], error["code"]) == ("stop", "invalid_value")
    assert "at most 64 are allowed (max_stop_strings)" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": [-1]}, "prompt.0", "invalid_value"),
        ({"prompt": [5, -(2**70)]}, "prompt.1", "invalid_value"),
        ({"prompt": [[5], [5, -1]]}, "prompt.1.1", "invalid_value"),
        ({"prompt": [VOCAB_SIZE]}, "prompt", "invalid_value"),
        ({"prompt": [[5], [5, VOCAB_SIZE]]}, "prompt", "invalid_value"),
        ({"prompt": [2**64]}, "prompt", "invalid_value"),
        ({"prompt": [5, 1.5]}, "prompt.1", "invalid_type"),
        ({"prompt": [5, True]}, "prompt.1", "invalid_type"),
        ({"prompt": [True]}, "prompt", "prompt_type"),
        ({"prompt": [5, None]}, "prompt.1", "invalid_type"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0", "invalid_value"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", "invalid_value"),
        ({"stop_token_ids": [2**64]}, "stop_token_ids", "invalid_value"),
    ],
)
def test_token_ids(server: RunningServer, fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(server, COMPLETIONS, {"prompt": "x"} | fields)
    assert error["param"] == param
    assert error["code"] == ("invalid_type" if code == "prompt_type" else code)


@pytest.mark.parametrize("as_ids", [False, True])
def test_prompts_around_the_context(server: RunningServer, as_ids: bool) -> None:
    """The prompt and one token more must fit."""

    def prompt(length: int) -> dict[str, Any]:
        return {"prompt": [120] * length if as_ids else "x" * length}

    fits = server.post(COMPLETIONS, prompt(CONTEXT - 1) | {"max_tokens": 1})
    assert fits.status_code == 200
    assert fits.json()["usage"]["total_tokens"] == CONTEXT
    for length in (CONTEXT, CONTEXT + 1, 100 * CONTEXT):
        error = refused(server, COMPLETIONS, prompt(length) | {"max_tokens": 1})
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert f"{CONTEXT} tokens" in error["message"]
        # Nobody has to tokenize such a text to know that it does not fit.
        unit = "tokens" if as_ids or length <= CONTEXT + 1 else "characters"
        assert f"the prompt has {length} {unit}" in error["message"]
    error = refused(server, COMPLETIONS, prompt(CONTEXT - 1) | {"max_tokens": 2})
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    # No token more is needed where none is asked for.
    for scored in ({}, {"logprobs": 1}):
        none = {"max_tokens": 0, "echo": True} | scored
        fits = server.post(COMPLETIONS, prompt(CONTEXT) | none)
        assert fits.status_code == 200, fits.text
        assert fits.json()["usage"]["total_tokens"] == CONTEXT
        error = refused(server, COMPLETIONS, prompt(CONTEXT + 1) | none)
        assert f"the prompt has {CONTEXT + 1} tokens." in error["message"]


def test_chats_around_the_context(server: RunningServer) -> None:
    def chat(length: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "x" * length}], "max_tokens": 1}

    overhead = server.post(CHAT, chat(1)).json()["usage"]["prompt_tokens"] - 1
    assert server.post(CHAT, chat(CONTEXT - 1 - overhead)).json()["usage"]["total_tokens"] == CONTEXT
    for length in (CONTEXT - overhead, CONTEXT - overhead + 1):
        error = refused(server, CHAT, chat(length))
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"k" * 100_000: 1}},
        {"logit_bias": {"k" * 100_000: 1}},
        {"stream_options": {"include_usage": "\x00" * 1000}, "stream": True},
    ],
)
def test_long_input_is_no_long_error(server: RunningServer, fields: dict[str, Any]) -> None:
    assert refused(server, COMPLETIONS, {"prompt": "x"} | fields)["param"]


def test_long_model_name(server: RunningServer) -> None:
    response = server.post(COMPLETIONS, {"prompt": "x", "model": "m" * 100_000})
    assert response.status_code == 404
    assert len(response.content) < 2000


def test_message_that_cannot_be_sent_hurts_nobody_else(start_server: StartServer) -> None:
    """The last line of defence holds: such a request fails alone, whatever let it through."""
    with start_server() as server:
        engine = server.engine
        fine = Generate("fine-0", [5], SamplingParams(max_tokens=1))

        async def submit() -> None:
            engine.submit([fine, Generate("fine-1", [2**70], SamplingParams(max_tokens=1))])

        with pytest.raises(OverflowError):
            asyncio.run_coroutine_threadsafe(submit(), server.loop).result()
        assert engine.num_requests == 0
        assert server.post(COMPLETIONS, {"prompt": "x"}).status_code == 200
        assert server.metric("truedraft_worker_restarts_total") == 0


@pytest.mark.parametrize("key", ["\u0000", "\u2028", '"\\', "é😀", "a.b", "</script>"])
def test_strange_keys_are_named_as_they_are(server: RunningServer, key: str) -> None:
    content = json.dumps({"model": MODEL, "prompt": "x", "logit_bias": {key: "1"}}).encode()
    assert refused_raw(server, content)["param"] == f"logit_bias.{key}"


@pytest.mark.parametrize("value", [5, ["a"], {"a": 1}])
def test_template_that_stumbles_over_a_type(tmp_path: Path, value: Any) -> None:
    template = "{{ 'id ' + name }}"
    folder = write_tokenizer(tmp_path / MODEL, chat_template=template)
    with run_server(folder, load_tokenizer(str(folder)), tmp_path) as server:
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        error = refused(server, CHAT, chat | {"chat_template_kwargs": {"name": value}})
        assert error["param"] == "messages"
        assert server.post(CHAT, chat | {"chat_template_kwargs": {"name": "5"}}).status_code == 200


def test_client_that_leaves_while_it_sends(server: RunningServer) -> None:
    num_before = len(server.messages_to_worker("Generate"))
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port)) as client:
        head = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000"
        client.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\n{head}\r\n\r\n{{".encode())
    assert server.post(COMPLETIONS, {"prompt": [-1]}).status_code == 400
    assert server.messages_to_worker("Generate")[num_before:] == []


def test_body_without_a_length_is_limited_too(server: RunningServer) -> None:
    headers = {"content-type": "application/json"}
    response = server.client.post(COMPLETIONS, content=(b" " * 100_000 for _ in range(100)), headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"

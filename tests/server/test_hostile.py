"""One request costs the front end little: it is refused before it is expensive, or done in a thread."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.server.conftest import StartServer
from tests.server.refusals import CHAT, COMPLETIONS, refused
from tests.server.running import RunningServer
from truedraft.server.errors import RequestTooLargeError
from truedraft.server.http.json_body import MAX_CONTAINERS, MAX_VALUES, parse_json
from truedraft.server.http.large_json import BATCH, write_json
from truedraft.server.schemas.chat import ChatRequest
from truedraft.server.schemas.completion import CompletionRequest
from truedraft.server.schemas.logprobs import CompletionLogprobs
from truedraft.server.schemas.responses import ResponsesRequest
from truedraft.server.schemas.tokenize import DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from truedraft.server.text.tokenizer import Tokenizer

REQUESTS = [CompletionRequest, ChatRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest]


def collections_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields every list and mapping of a pydantic schema whose items are checked."""
    if isinstance(schema, dict):
        items = schema.get("items_schema") or schema.get("values_schema")
        if schema.get("type") in ("list", "dict") and items is not None and items.get("type") != "any":
            yield schema
        for name, value in schema.items():
            if name != "json_schema_input_schema":  # describes, and checks nothing
                yield from collections_in(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from collections_in(value)


@pytest.mark.parametrize("model", REQUESTS)
def test_every_list_stops_at_its_first_fault(model: type) -> None:
    """Otherwise a body of 8 MB makes millions of errors, and only one is shown."""
    found = list(collections_in(TypeAdapter(model).core_schema))
    assert found
    assert all(schema.get("fail_fast") for schema in found)


@pytest.mark.parametrize("path", ["/tokenize", COMPLETIONS])
def test_many_unknown_keys_make_a_short_header(server: RunningServer, path: str) -> None:
    odd = {f"x{number}": number for number in range(90_000)}
    response = server.post(path, {"prompt": "x"} | odd)
    assert response.status_code == 200
    assert response.headers["x-truedraft-ignored"].startswith("x0, x1, ")
    assert 900 < len(response.headers["x-truedraft-ignored"]) <= 1000


def test_a_list_of_wrong_types_is_refused_by_its_first(server: RunningServer) -> None:
    error = refused(server, COMPLETIONS, {"prompt": [1, *["a"] * 300_000]})
    assert (error["param"], error["code"]) == ("prompt.1", "invalid_type")


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (b"[" + b"[]," * (MAX_CONTAINERS + 1) + b"1]", MAX_CONTAINERS),
        (b"[" + b"{}," * (MAX_CONTAINERS + 1) + b"1]", MAX_CONTAINERS),
        (b"{" + b",".join(b'"%d":1' % i for i in range(MAX_CONTAINERS + 1)) + b"}", MAX_CONTAINERS),
        (b"[" + b"1," * (MAX_VALUES + 1) + b"1]", MAX_VALUES),
    ],
    ids=["lists", "objects", "keys", "values"],
)
def test_bodies_of_too_many_values_are_not_parsed(body: bytes, limit: int) -> None:
    with pytest.raises(RequestTooLargeError, match=str(limit)):
        parse_json(body)


def test_punctuation_inside_strings_does_not_count() -> None:
    text = '[{:,"\\' * (MAX_CONTAINERS + 1)
    assert parse_json(json.dumps([text, text]).encode()) == [text, text]


def longest_pause(work: Callable[[], object]) -> tuple[float, float]:
    """Returns the longest time that another thread was kept from running, and the time of ``work``.

    Both are this process's own: what others take, or a machine that stands still, does not count.
    """
    pauses, is_over = [0.0], threading.Event()

    def tick() -> None:
        last = time.process_time()
        while not is_over.is_set():
            time.sleep(0.001)
            now = time.process_time()
            pauses.append(now - last)
            last = now

    ticking = threading.Thread(target=tick)
    ticking.start()
    started = time.process_time()
    work()
    duration = time.process_time() - started
    is_over.set()
    ticking.join()
    return max(pauses), duration


def test_tokenizing_lets_other_threads_run(tokenizer: Tokenizer) -> None:
    text = "tell me a story " * 60_000
    pause, duration = longest_pause(lambda: tokenizer.encode(text, add_special_tokens=True))
    assert pause < duration / 2, f"{pause:.3f} of {duration:.3f} s"
    token_ids = 4 * tokenizer.encode(text, add_special_tokens=True)
    pause, duration = longest_pause(lambda: tokenizer.decode(token_ids, skip_special_tokens=True))
    assert pause < duration / 2, f"{pause:.3f} of {duration:.3f} s"


def test_large_answers_are_written_in_pieces() -> None:
    """The JSON is the same, without one long turn in which nothing else runs."""
    small = TokenizeAnswer(count=3, max_model_len=8, tokens=[1, 2, 3])
    assert write_json(small) == small.model_dump_json().encode()
    tokens = list(range(3 * BATCH + 7))
    answer = TokenizeAnswer(count=1, max_model_len=8, tokens=tokens, token_strs=[f"ä{i}" for i in tokens])
    assert write_json(answer) == answer.model_dump_json().encode()
    nested = CompletionLogprobs(
        tokens=["a"] * (BATCH + 1),
        token_logprobs=[None, *[-1.5] * BATCH],
        top_logprobs=[{"a": -1.0}] * (BATCH + 1),
        text_offset=[],
    )
    assert write_json(nested) == nested.model_dump_json().encode()
    big = TokenizeAnswer(count=1, max_model_len=8, tokens=list(range(3_000_000)))
    pause, duration = longest_pause(lambda: write_json(big))
    assert pause < duration / 2, f"{pause:.3f} of {duration:.3f} s"


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_characters_are_limited_before_tokenizing(start_server: StartServer, path: str) -> None:
    with start_server(max_prompt_characters=100) as server:
        response = server.post(path, {"prompt": "x" * 101})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (413, "request_too_large")
        assert "101 characters" in error["message"]
        assert "100 are allowed (max_prompt_characters)" in error["message"]
        assert server.post(path, {"prompt": "x" * 100}).status_code == 200
        several = server.post(COMPLETIONS, {"prompt": ["x" * 60, "x" * 41], "max_tokens": 1})
        assert several.status_code == 413
        chat = {"messages": [{"role": "user", "content": "x" * 101}], "max_tokens": 1}
        assert server.post(CHAT, chat).status_code == 413
        predicted = {"prediction": {"type": "content", "content": "x" * 101}}
        response = server.post(COMPLETIONS, {"prompt": "x"} | predicted)
        assert (response.status_code, response.json()["error"]["param"]) == (413, "prediction")


def test_a_text_that_cannot_fit_is_not_tokenized(
    server: RunningServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = tokenizer.encode

    def note(text: str, *, add_special_tokens: bool) -> list[int]:
        encoded.append(len(text))
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", note)
    longest = next(n for n in range(10**6) if tokenizer.fewest_tokens("x" * n) == 513) - 1
    error = refused(server, COMPLETIONS, {"prompt": "x" * (longest + 1)})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert encoded == []
    body = {"prompt": "x" * (longest + 1), "truncate_prompt_tokens": 4, "max_tokens": 1}
    assert server.post(COMPLETIONS, body).status_code == 200  # its end does fit


def test_log_probabilities_of_an_answer_are_limited(start_server: StartServer) -> None:
    with start_server(max_answer_values=60) as server:
        body = {"prompt": ["abcd", "abcd"], "max_tokens": 1, "prompt_logprobs": 6}
        assert server.post(COMPLETIONS, body).status_code == 200  # 2 * 4 * 7
        error = refused(server, COMPLETIONS, body | {"prompt_logprobs": 7})
        assert error["param"] == "prompt_logprobs"
        assert "64 values" in error["message"]
        assert "60 are allowed (max_answer_values)" in error["message"]
        generated = {"prompt": "a", "n": 2, "max_tokens": 10, "logprobs": 3}
        assert refused(server, COMPLETIONS, generated)["param"] == "logprobs"
        assert server.post(COMPLETIONS, generated | {"stream": True}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "num_values"),
    [
        ({"echo": True, "max_tokens": 0}, "echo", 40),
        ({"return_token_ids": True, "max_tokens": 0}, "return_token_ids", 40),
        ({"return_token_ids": True, "max_tokens": 5}, "return_token_ids", 90),
        ({"echo": True, "return_token_ids": True, "max_tokens": 0}, "echo", 80),
        ({"speculation": {"origins": "sources"}, "max_tokens": 2}, "speculation.origins", 20),
        (
            {"speculation": {"trace": True, "num_speculative_tokens": 2}, "max_tokens": 2},
            "speculation.trace",
            60,
        ),
        ({"speculation": {"trace": True}, "max_tokens": 2, "stream": True}, "speculation.trace", 660),
        ({"logprobs": 1, "max_tokens": 2}, "logprobs", 40),
        ({"logprobs": 1, "max_tokens": 2, "stream": True}, None, 0),
        ({"logprobs": 1, "echo": True, "max_tokens": 0}, "prompt_logprobs", 120),
    ],
)
def test_all_that_is_told_of_tokens_counts(
    start_server: StartServer, fields: dict[str, Any], param: str | None, num_values: int
) -> None:
    body = {"prompt": ["abcd", "abcd"], "n": 5} | fields
    with start_server(max_answer_values=max(num_values - 1, 1)) as server:
        if param is not None:
            error = refused(server, COMPLETIONS, body)
            assert error["param"] == param
            assert f"{num_values} values" in error["message"]
        server.services.settings.max_answer_values = max(num_values, 1)
        assert server.post(COMPLETIONS, body).status_code == 200


def test_entries_of_logit_bias_are_limited(start_server: StartServer) -> None:
    with start_server(max_logit_bias=2) as server:
        error = refused(server, COMPLETIONS, {"prompt": "x", "logit_bias": {"1": 1, "2": 1, "3": 1}})
        assert error["param"] == "logit_bias"
        assert "3 entries" in error["message"]
        assert "2 are allowed (max_logit_bias)" in error["message"]
        body = {"prompt": "x", "max_tokens": 1, "logit_bias": {"1": 1, "2": 1}}
        assert server.post(COMPLETIONS, body).status_code == 200


def test_choices_are_limited_before_tokenizing(start_server: StartServer) -> None:
    with start_server(max_choices=3) as server:
        error = refused(server, COMPLETIONS, {"prompt": ["a", "b"], "n": 2})
        assert error["param"] == "n"
        assert "4 choices" in error["message"]
        assert "3 are allowed (max_choices)" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "limit"),
    [
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": [1] * 1025}, "1024"),
        (COMPLETIONS, {"prompt": "x", "cache_salt": "x" * 1025}, "1024"),
        ("/v1/responses", {"input": "x", "metadata": {"x": "x" * 16384}}, "16384"),
    ],
)
def test_what_is_repeated_is_limited(
    server: RunningServer, path: str, fields: dict[str, Any], limit: str
) -> None:
    """The cost would come for each prompt on the way to the worker, or in each event of a stream."""
    error = refused(server, path, fields)
    assert error["param"].split(".")[0] in fields
    assert limit in error["message"]


def test_a_prediction_counts_once_for_each_prompt(start_server: StartServer) -> None:
    with start_server(max_prompt_characters=100) as server:
        body = {"prediction": {"type": "content", "content": "x" * 10}, "max_tokens": 1}
        assert server.post(COMPLETIONS, body | {"prompt": ["a"] * 10}).status_code == 200
        response = server.post(COMPLETIONS, body | {"prompt": ["a"] * 11})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (413, "prediction")
        assert "110 characters" in error["message"]

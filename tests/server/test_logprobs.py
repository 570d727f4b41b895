"""Log-probabilities in answers and streams, through the official SDK and over the raw wire."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.fake_worker import given_logprob, logprob_at
from tests.server.conftest import StartServer
from tests.server.running import MODEL, RunningServer
from tests.server.wire import answers
from truedraft.engine.messages import TokenLogprob
from truedraft.server.text.logprobs import ScoredToken, chat_logprobs, completion_logprobs, echoed_tokens
from truedraft.server.text.prompt import TokenPrompt
from truedraft.server.text.tokenizer import Tokenizer

TEXT = "Hello, wörld 😀! "  # what the fake worker repeats
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def sdk(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def shown(position: int) -> float:
    return max(logprob_at(position), -9999.0)


def merged(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """The logprobs of one choice, put together from all chunks."""
    lists: dict[str, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index and choice["logprobs"]:
                for name, values in choice["logprobs"].items():
                    lists[name] = lists.get(name, []) + values if values is not None else None
    return lists


def test_completion(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model=MODEL, prompt="Once", max_tokens=19, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.tokens[:9] == [*"Hello, w"] + ["bytes:\\xc3"]
    assert logprobs.token_logprobs == [shown(position) for position in range(4, 23)]
    assert logprobs.token_logprobs[5] == -9999.0
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"G": -0.0625, "H": -0.5, "I": -1.5}
    assert logprobs.top_logprobs[8] == {"bytes:\\xc2": -0.0625, "bytes:\\xc3": -1.5, "bytes:\\xc4": -2.5}
    assert logprobs.text_offset == [*range(8), 8, 8, *range(9, 13), 13, 13, 13, 13, 14]
    assert answer.choices[0].text == "Hello, wörld 😀!"


@pytest.mark.parametrize(
    ("logprobs", "top"), [(0, {"H"}), (1, {"G", "H"}), (2, {"G", "H"}), (5, set("GHIJK"))]
)
def test_the_token_itself_is_always_there(server: RunningServer, logprobs: int, top: set[str]) -> None:
    (answer,) = answers(server, COMPLETIONS, {"prompt": "x", "logprobs": logprobs})
    assert set(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == top


def test_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=19, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.refusal is None
    assert bytes(byte for token in logprobs.content for byte in token.bytes or []).decode() == TEXT.strip()
    umlaut = logprobs.content[8]
    assert (umlaut.token, umlaut.bytes) == ("\\xc3", [0xC3])
    assert [(top.token, top.bytes) for top in umlaut.top_logprobs] == [
        ("\\xc2", [0xC2]),
        ("\\xc3", [0xC3]),
        ("\\xc4", [0xC4]),
    ]
    assert umlaut.top_logprobs[1].logprob == umlaut.logprob


@pytest.mark.parametrize("fields", [{}, {"logprobs": False}, {"logprobs": None, "top_logprobs": 0}])
def test_chat_without(server: RunningServer, fields: dict[str, Any]) -> None:
    (answer,) = answers(server, CHAT, {"messages": HELLO, "max_tokens": 3} | fields)
    assert answer["choices"][0]["logprobs"] is None


def test_chat_without_top(server: RunningServer) -> None:
    (answer,) = answers(server, CHAT, {"messages": HELLO, "max_tokens": 3, "logprobs": True})
    assert [token["top_logprobs"] for token in answer["choices"][0]["logprobs"]["content"]] == [[], [], []]


@pytest.mark.parametrize("stop", [None, ["örld", "Hellx"], "😀!", "! Hello, wörld"])
@pytest.mark.parametrize("tokens_per_step", [1, 4, 7])
def test_streams_say_the_same(start_server: StartServer, stop: Any, tokens_per_step: int) -> None:
    with start_server("--tokens-per-step", str(tokens_per_step)) as server:
        body = {"n": 2, "max_tokens": 60, "stop": stop}
        completion = body | {"prompt": ["aé", "b"], "logprobs": 2, "echo": True}
        (whole,) = answers(server, COMPLETIONS, completion)
        chunks = answers(server, COMPLETIONS, completion | {"stream": True})
        for index in range(4):
            assert merged(chunks, index) == whole["choices"][index]["logprobs"]
        for chunk in chunks:
            assert "logprobs" in chunk["choices"][0]
        chat = body | {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
        (whole,) = answers(server, CHAT, chat)
        chunks = answers(server, CHAT, chat | {"stream": True})
        for index in range(2):
            assert merged(chunks, index) == whole["choices"][index]["logprobs"]
        assert len(whole["choices"][0]["logprobs"]["content"]) == whole["usage"]["completion_tokens"] / 2


async def test_sdk_stream(server: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        stream = await sdk.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=19, logprobs=True, stream=True
        )
        choices = [chunk.choices[0] async for chunk in stream]
    for choice in choices[1:-1]:
        assert choice.logprobs is not None
        raw = bytes(byte for token in choice.logprobs.content or [] for byte in token.bytes or [])
        assert raw.decode() == choice.delta.content


def test_tokens_of_the_stop_string_are_the_last(server: RunningServer) -> None:
    (answer,) = answers(server, COMPLETIONS, {"prompt": "x", "max_tokens": 60, "stop": "lo,", "logprobs": 0})
    choice = answer["choices"][0]
    assert choice["text"] == "Hel"
    assert choice["logprobs"]["tokens"] == [*"Hello,"]
    assert answer["usage"]["completion_tokens"] == 6


def test_end_of_sequence_is_scored(start_server: StartServer) -> None:
    with start_server("--text", "Bye.", "--once") as server:
        (answer,) = answers(server, COMPLETIONS, {"prompt": "x", "logprobs": 1})
        assert answer["choices"][0]["text"] == "Bye."
        assert answer["choices"][0]["logprobs"]["tokens"] == [*"Bye.", "<|endoftext|>"]
        assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


def test_echo(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model=MODEL, prompt="Né", max_tokens=2, logprobs=1, echo=True)
    choice = answer.choices[0]
    assert choice.text == "NéHe"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["N", "bytes:\\xc3", "bytes:\\xa9", "H", "e"]
    assert choice.logprobs.text_offset == [0, 1, 1, 2, 3]
    assert choice.logprobs.token_logprobs is not None
    first: object = choice.logprobs.token_logprobs[0]
    assert first is None
    assert choice.logprobs.token_logprobs[1:] == [shown(position) for position in range(1, 5)]


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_a_prompt(server: RunningServer, stream: bool) -> None:
    """What evaluation harnesses send: nothing is generated, but the engine is asked for one token."""
    body = {"prompt": ["abc", "d"], "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
    body |= {"n": 2, "min_tokens": 0, "speculation": {"trace": True}}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    before = server.metric("truedraft_generation_tokens_total")
    chunks = answers(server, COMPLETIONS, body)
    assert merged(chunks, 1)["tokens"] == ["a", "b", "c"]
    assert merged(chunks, 1)["token_logprobs"] == [None, shown(1), shown(2)]
    assert merged(chunks, 1)["top_logprobs"][:2] == [None, {"a": -0.0625, "b": shown(1)}]
    assert merged(chunks, 3)["token_logprobs"] == [None]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert {(choice["text"], choice["finish_reason"]) for choice in choices} == {
        ("abc", "length"),
        ("d", "length"),
    }
    assert chunks[-1]["usage"]["completion_tokens"] == 0
    assert chunks[-1]["truedraft"]["trace"] == [[], [], [], []]
    assert server.metric("truedraft_generation_tokens_total") == before


def test_no_tokens_and_no_prompt(server: RunningServer) -> None:
    (answer,) = answers(server, COMPLETIONS, {"prompt": "abc", "max_tokens": 0, "logprobs": 1})
    assert answer["choices"][0]["logprobs"] == {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_prompt_logprobs(server: RunningServer, num_top: int) -> None:
    body = {"prompt": ["ab", "c"], "prompt_logprobs": num_top, "max_tokens": 1}
    expected = {
        str(ord("b")): {"logprob": -0.125, "rank": 2, "decoded_token": "b"},
        str(ord("a")): {"logprob": -0.0625, "rank": 1, "decoded_token": "a"},
        str(ord("c")): {"logprob": -1.125, "rank": 3, "decoded_token": "c"},
    }
    wanted = {0: ["b"], 1: ["a", "b"], 3: ["a", "b", "c"]}[num_top]
    entry = {str(ord(name)): expected[str(ord(name))] for name in wanted}
    for extra in ({}, {"max_tokens": 0}):
        (answer,) = answers(server, COMPLETIONS, body | extra)
        assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [[None, entry], [None]]
        assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]


def test_prompt_logprobs_of_a_chat(server: RunningServer) -> None:
    body = {"messages": HELLO, "prompt_logprobs": 1, "max_tokens": 1, "return_token_ids": True}
    (answer,) = answers(server, CHAT, body)
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    assert [entry["decoded_token"] for entry in answer["prompt_logprobs"][1].values()] == ["t", "u"]


@pytest.mark.parametrize("num_top", [0, 1])
def test_tokens_that_the_request_names(server: RunningServer, num_top: int) -> None:
    """They follow the most likely ones, and each is there once."""
    body = {"prompt": "ab", "max_tokens": 1, "logprobs": num_top, "logprob_token_ids": [ord("z"), ord("H")]}
    (answer,) = answers(server, COMPLETIONS, body)
    (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
    named = {"z": given_logprob(ord("z"), 2), "H": given_logprob(ord("H"), 2)}
    assert top == ({"G": -0.0625} if num_top else {}) | named
    chat = {"messages": HELLO, "max_tokens": 1, "logprobs": True, "top_logprobs": num_top}
    (answer,) = answers(server, CHAT, chat | {"logprob_token_ids": [ord("z"), 1]})
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in entry["top_logprobs"]] == ["G"] * num_top + ["z", "\x01"]


@pytest.mark.parametrize("echo", [False, True])
def test_a_continuation_is_scored_from_its_first_token(server: RunningServer, echo: bool) -> None:
    body = {"prompt": "abcd", "max_tokens": 0, "prompt_logprobs": 0, "prompt_logprobs_start": 2}
    body |= {"echo": True, "logprobs": 0} if echo else {}
    (answer,) = answers(server, COMPLETIONS, body)
    (choice,) = answer["choices"]
    entries = choice["prompt_logprobs"]
    assert entries[:2] == [None, None]
    assert [list(entry) for entry in entries[2:]] == [[str(ord("c"))], [str(ord("d"))]]
    assert [value["logprob"] for entry in entries[2:] for value in entry.values()] == [-0.25, -0.375]
    if echo:
        assert choice["logprobs"]["token_logprobs"] == [None, None, -0.25, -0.375]


def test_each_field_gets_its_own_number(server: RunningServer) -> None:
    """An echoed prompt and prompt_logprobs share what the engine sends."""
    body = {"prompt": "ab", "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 4}
    (answer,) = answers(server, COMPLETIONS, body)
    assert len(answer["choices"][0]["prompt_logprobs"][1]) == 4
    assert [len(top) for top in answer["choices"][0]["logprobs"]["top_logprobs"][1:]] == [2, 2]


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        (COMPLETIONS, {"logprobs": 6}, "logprobs", "invalid_value"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs", "invalid_value"),
        (COMPLETIONS, {"logprobs": True}, "logprobs", "invalid_type"),
        (COMPLETIONS, {"top_logprobs": 2}, "top_logprobs", "unsupported_parameter"),
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
        (COMPLETIONS, {"logprob_token_ids": [1]}, "logprob_token_ids", "invalid_value"),
        (COMPLETIONS, {"logprobs": 0, "logprob_token_ids": [260]}, "logprob_token_ids", "invalid_value"),
        (COMPLETIONS, {"logprobs": 0, "logprob_token_ids": [1] * 1025}, "logprob_token_ids", "invalid_value"),
        (CHAT, {"logprob_token_ids": [1]}, "logprob_token_ids", "invalid_value"),
        (COMPLETIONS, {"prompt_logprobs_start": 1}, "prompt_logprobs_start", "invalid_value"),
        (
            COMPLETIONS,
            {"prompt_logprobs": 0, "prompt_logprobs_start": 1},
            "prompt_logprobs_start",
            "invalid_value",
        ),
        (CHAT, {"logprobs": 5}, "logprobs", "invalid_type"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    ],
)
def test_limits(server: RunningServer, path: str, fields: dict[str, Any], param: str, code: str) -> None:
    response = server.post(
        path, {"prompt": "x"} | fields if path == COMPLETIONS else {"messages": HELLO} | fields
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_limit_can_be_raised(start_server: StartServer) -> None:
    with start_server(max_logprobs=30) as server:
        (answer,) = answers(server, COMPLETIONS, {"prompt": "x", "logprobs": 30, "max_tokens": 1})
        assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == 30
        fields = {"messages": HELLO, "logprobs": True, "top_logprobs": 31}
        assert server.post(CHAT, fields).status_code == 400


def test_equal_texts_are_kept_apart(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With byte fallback, "A" may be a token of its own and a byte token."""
    monkeypatch.setattr(tokenizer.vocabulary, "_known", {7: b"A", 8: b"A", 9: b"B", 5: None, 6: None})
    token = ScoredToken(8, -3.0, [(7, -1.0), (9, -1.5), (5, -2.0), (6, -2.5)], 0)
    logprobs = completion_logprobs([token], 4, tokenizer.vocabulary)
    assert logprobs.tokens == ["A"]
    assert logprobs.top_logprobs == [
        {"token_id:7": -1.0, "B": -1.5, "token_id:5": -2.0, "token_id:6": -2.5, "A": -3.0}
    ]
    top = chat_logprobs([token], 4, tokenizer.vocabulary).content[0].top_logprobs
    assert [(entry.token, entry.bytes) for entry in top] == [
        ("A", [65]),
        ("B", [66]),
        ("token_id:5", None),
        ("token_id:6", None),
    ]


def test_what_the_tokenizer_puts_before_the_text_takes_no_room(tokenizer: Tokenizer) -> None:
    prompt = TokenPrompt([257, ord("a"), ord("b")], "ab")
    scored = [None, TokenLogprob(ord("a"), -1.0, []), TokenLogprob(ord("b"), -1.0, [])]
    assert [token.offset for token in echoed_tokens(prompt, scored, tokenizer)] == [0, 0, 1]
    written = prompt._replace(text="<|im_start|>ab")
    assert [token.offset for token in echoed_tokens(written, scored, tokenizer)] == [0, 12, 13]


def test_answers_are_json(server: RunningServer) -> None:
    response = server.post(COMPLETIONS, {"prompt": "x", "logprobs": 5, "max_tokens": 40})
    refuse = pytest.fail
    json.loads(response.text, parse_constant=lambda name: refuse(f"{name} is not JSON"))

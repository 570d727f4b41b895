"""``/v1/completions`` and ``/v1/chat/completions`` through the official SDK and over the raw wire."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.server.conftest import StartServer
from tests.server.running import MODEL, RunningServer
from tests.server.wire import events

TEXT = "Hello, wörld 😀! "  # what the fake worker repeats
HELLO: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def sdk(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def text_of(num_tokens: int) -> str:
    """The fake worker's tokens are bytes; a character that is cut off at the end becomes U+FFFD."""
    repeated = TEXT.encode() * (num_tokens // len(TEXT) + 1)
    return repeated[:num_tokens].decode(errors="ignore")


def test_completion(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model=MODEL, prompt="Once", max_tokens=13)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, text_of(13), "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        4,
        13,
        17,
    )
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_completion_defaults_to_16_tokens(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model=MODEL, prompt="Once")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_chat_goes_on_until_the_context_ends(server: RunningServer, sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == text_of(answer.usage.completion_tokens)
    assert choice.finish_reason == "length"


async def test_async_stream(start_server: StartServer) -> None:
    with start_server() as server, server.one_step_at_a_time(30):
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
            stream = await sdk.completions.create(model=MODEL, prompt="Once", max_tokens=30, stream=True)
            texts = [chunk.choices[0].text async for chunk in stream]
    assert "".join(texts) == text_of(30)
    assert len(texts) > 3


def test_chat_stream(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_completion_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text_of(30)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 30


def test_stream_on_the_wire(server: RunningServer) -> None:
    response = server.post("/v1/completions", {"prompt": "Once", "max_tokens": 8, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    chunks = events(response.text)
    assert all("usage" not in chunk for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    assert set(chunks[0]["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}


def test_usage_is_null_until_the_last_chunk(server: RunningServer) -> None:
    body = {"prompt": "Once", "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(server.post("/v1/completions", body).text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("prompt", "num_prompt_tokens"),
    [("ab", 2), (["ab", "c"], 3), ([97, 98], 2), ([[97, 98], [99]], 3)],
    ids=["string", "strings", "tokens", "token lists"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_forms_and_n(server: RunningServer, prompt: Any, num_prompt_tokens: int, stream: bool) -> None:
    body = {"prompt": prompt, "n": 2, "max_tokens": 5, "echo": True, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    response = server.post("/v1/completions", body)
    chunks = events(response.text) if stream else [response.json()]
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    prompts = ["ab", "c"] if num_prompt_tokens == 3 else ["ab"]
    expected = [text + text_of(5) for text in prompts for _ in range(2)]
    assert [texts[index] for index in sorted(texts)] == expected
    assert chunks[-1]["usage"]["prompt_tokens"] == num_prompt_tokens
    assert chunks[-1]["usage"]["completion_tokens"] == 5 * len(expected)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("include", "text"), [(False, "Hello, w"), (True, "Hello, wörld")])
def test_stop_string(server: RunningServer, stream: bool, include: bool, text: str) -> None:
    """The stop string ends in the middle of a step: tokens after it do not count."""
    body = {"prompt": "x", "stop": ["örld", "never"], "max_tokens": 400, "stream": stream, "n": 2}
    body |= {"include_stop_str_in_output": include, "return_token_ids": True}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    response = server.post("/v1/completions", body)
    chunks = events(response.text) if stream else [response.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == 1]
    assert "".join(choice["text"] for choice in choices) == text
    assert choices[-1]["finish_reason"] == "stop"
    assert bytes(token for choice in choices for token in choice["token_ids"]).decode() == "Hello, wörld"
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * len("Hello, wörld".encode())


def test_no_characters_are_split(server: RunningServer) -> None:
    body = {"messages": HELLO, "max_tokens": 140, "stream": True}
    chunks = events(server.post("/v1/chat/completions", body).text)
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "\ufffd" not in "".join(pieces[:-1])
    assert "".join(pieces) == text_of(140)


@pytest.mark.parametrize("tokens_per_step", [1, 3, 5])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_character_comes_in_one_piece(
    start_server: StartServer, path: str, tokens_per_step: int
) -> None:
    """One token is one byte, and a step ends anywhere: emoji, Chinese, combining marks, joined signs."""
    text = "👍🏽 你好，世界 é̂ नि 👩‍👩‍👧."
    with start_server("--text", text, "--once", "--tokens-per-step", str(tokens_per_step)) as server:
        prompt: dict[str, Any] = {"prompt": "x"} if path == "/v1/completions" else {"messages": HELLO}
        with server.one_step_at_a_time(len(text.encode()) + len(["eos"]), tokens_per_step):
            chunks = events(server.post(path, prompt | {"max_tokens": 200, "stream": True}).text)
        choices = [chunk["choices"][0] for chunk in chunks]
        pieces = [c["text"] if "text" in c else c["delta"].get("content", "") for c in choices]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) == text
        assert len([piece for piece in pieces if piece]) > len(text.encode()) / 10
        answer = server.post(path, prompt | {"max_tokens": 200}).json()["choices"][0]
        assert (answer["text"] if "text" in answer else answer["message"]["content"]) == text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "Bye."),
        ({"skip_special_tokens": False}, "Bye."),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "Bye.<|endoftext|>"),
        ({"include_stop_str_in_output": True}, "Bye."),
    ],
)
def test_end_of_sequence(start_server: StartServer, body: dict[str, Any], text: str) -> None:
    with start_server("--text", "Bye.", "--once") as server:
        answer = server.post("/v1/completions", {"prompt": "x"} | body).json()
        assert answer["choices"][0]["text"] == text
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 5
        long = server.post("/v1/completions", {"prompt": "x", "ignore_eos": True, "max_tokens": 6} | body)
        assert long.json()["choices"][0]["text"] == "Bye.By"


def test_no_tokens_at_all(server: RunningServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "ab", "max_tokens": 0, "echo": True}).json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_chat_messages_reach_the_template(server: RunningServer, tokenizer: Any) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "tool", "content": "d", "tool_call_id": "call_1"},
    ]
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    response = server.post("/v1/chat/completions", body)
    assert "x-truedraft-ignored" not in response.headers
    assert tokenizer.decode(response.json()["prompt_token_ids"], skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nd\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_min_tokens_holds_for_stop_strings_too(server: RunningServer, stream: bool) -> None:
    """The first "o" is the fifth token, the next one comes only after the text has begun again."""
    body = {"prompt": "x", "stop": "o", "max_tokens": 400, "min_tokens": 5, "stream": stream}
    response = server.post("/v1/completions", body)
    chunks = events(response.text) if stream else [response.json()]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == f"{TEXT}Hell"


@pytest.mark.parametrize(
    ("prompt", "truncated"),
    [("abcdef", "def"), ([97, 98, 99, 100], "bcd"), ("ab", "ab"), ("aé", "aé")],
)
def test_truncated_prompt(server: RunningServer, prompt: Any, truncated: str) -> None:
    body = {"prompt": prompt, "truncate_prompt_tokens": 3, "echo": True, "max_tokens": 1}
    answer = server.post("/v1/completions", body | {"return_token_ids": True}).json()
    assert answer["choices"][0]["text"] == f"{truncated}H"
    assert answer["choices"][0]["prompt_token_ids"] == list(truncated.encode())
    assert answer["usage"]["prompt_tokens"] == len(truncated.encode())


def test_truncated_chat(server: RunningServer) -> None:
    body = {"messages": HELLO, "truncate_prompt_tokens": 10, "max_tokens": 1, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", body).json()
    assert bytes(answer["prompt_token_ids"]) == b"assistant\n"


def test_prompt_that_fits_only_when_truncated(server: RunningServer) -> None:
    body = {"prompt": "x" * 600, "max_tokens": 12}
    assert server.post("/v1/completions", body).status_code == 400
    assert server.post("/v1/completions", body | {"truncate_prompt_tokens": 500}).status_code == 200

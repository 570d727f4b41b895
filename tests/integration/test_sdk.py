"""The official SDK, sync and async, talks to the real server process: all ways to ask, all ways to fail."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.integration.conftest import DRAFTED, Server
from tests.server.running import wait_for

MODEL = "truedraft-demo"
ASK: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Tell me a story about a dog."}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai as client:
        yield client


@pytest.fixture
def said(sdk: openai.OpenAI) -> str:
    """What every other way of asking must say too."""
    answer = sdk.chat.completions.create(messages=ASK, max_tokens=30, **GREEDY)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 30
    return answer.choices[0].message.content or ""


def async_sdk(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).owned_by == "truedraft"


def test_chat_streams_and_helpers_agree(sdk: openai.OpenAI, said: str) -> None:
    chunks = sdk.chat.completions.create(messages=ASK, max_tokens=30, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said
    # The helper takes an answer that was cut off for an error, so this one ends by a stop string.
    stop = said[-6:]
    options: Any = {"include_usage": True}
    with sdk.chat.completions.stream(messages=ASK, stop=stop, stream_options=options, **GREEDY) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == said[: said.index(stop)]
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert 0 < final.usage.completion_tokens <= 30


def test_completions_stream(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(prompt="Once upon a time", max_tokens=30, **GREEDY)
    chunks = sdk.completions.create(prompt="Once upon a time", max_tokens=30, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_responses(sdk: openai.OpenAI, said: str) -> None:
    request: dict[str, Any] = {"input": ASK[0]["content"], "max_output_tokens": 30, **GREEDY}
    answer = sdk.responses.create(**request)
    assert answer.output_text == said
    assert (answer.status, answer.usage and answer.usage.output_tokens) == ("incomplete", 30)
    events = list(sdk.responses.create(stream=True, **request))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == said
    assert events[-1].type == "response.incomplete"
    with sdk.responses.stream(**request) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
    assert snapshots[-1] == said


async def test_async(server: Server, said: str) -> None:
    async with async_sdk(server) as sdk:
        answer = await sdk.chat.completions.create(messages=ASK, max_tokens=30, **GREEDY)
        assert answer.choices[0].message.content == said
        chunks = await sdk.chat.completions.create(messages=ASK, max_tokens=30, stream=True, **GREEDY)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]) == said
        async with sdk.chat.completions.stream(messages=ASK, stop=said[-6:], **GREEDY) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == said[: said.index(said[-6:])]
        response = await sdk.responses.create(input=ASK[0]["content"], max_output_tokens=30, **GREEDY)
        assert response.output_text == said
        completion = await sdk.completions.create(prompt="Once", max_tokens=5, **GREEDY)
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 5


def test_raw_responses(sdk: openai.OpenAI, said: str) -> None:
    raw = sdk.chat.completions.with_raw_response.create(
        messages=ASK, max_tokens=30, extra_headers={"x-request-id": "mine-7"}, **GREEDY
    )
    assert (raw.status_code, raw.headers["x-request-id"], raw.request_id) == (200, "mine-7", "mine-7")
    assert raw.parse().choices[0].message.content == said
    with sdk.completions.with_streaming_response.create(prompt="Once", max_tokens=5, **GREEDY) as streamed:
        assert streamed.parse().choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("request_", "kind", "code", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "invalid_value", "temperature"),
        ({"modalities": ["audio"]}, openai.BadRequestError, "unsupported_parameter", "modalities"),
        (
            {"messages": [{"role": "user", "content": "x" * 10**5}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "messages",
        ),
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found", "model"),
    ],
)
async def test_errors(server: Server, request_: dict[str, Any], kind: Any, code: str, param: str) -> None:
    request = {"model": MODEL, "messages": ASK} | request_
    with server.openai as sdk, pytest.raises(kind) as caught:
        sdk.chat.completions.create(**request)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.request_id
    async with async_sdk(server) as sdk_:
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                await sdk_.chat.completions.create(stream=stream, **request)
            assert (caught.value.code, caught.value.type) == (code, "invalid_request_error")


def test_errors_of_other_routes(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        sdk.responses.create(model=MODEL, input="x", background=True)
    assert (caught.value.status_code, caught.value.code) == (400, "unsupported_parameter")
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve("resp_1")
    with pytest.raises(openai.BadRequestError) as wrong:
        sdk.embeddings.create(model=MODEL, input="x")
    assert wrong.value.code == "wrong_task"


def test_examples_of_the_document_work(server: Server) -> None:
    """Examples are sent as they stand there, where the bundled model can be asked."""
    document = server.get("/openapi.json").json()
    posts = {path: methods["post"] for path, methods in document["paths"].items() if "post" in methods}
    # Vectors and gaps are asked of other models; the last ones load and unload this one.
    left_out = {"/v1/embeddings", "/v1/rerank", "/v1/score", "/infill"}
    left_out |= {"/models/load", "/models/unload", "/sleep", "/wake_up", "/v1/load_lora_adapter"}
    left_out |= {"/v1/unload_lora_adapter", "/prefix_cache/clear"}
    assert left_out <= posts.keys()
    examples = [
        (path, name, example["value"])
        for path, route in posts.items()
        if path not in left_out
        for name, example in route["requestBody"]["content"]["application/json"]["examples"].items()
    ]
    assert {path for path, _, _ in examples} == posts.keys() - left_out
    for path, name, body in examples:
        response = server.post(path, body)
        assert response.status_code == 200, (path, name, response.text)
        assert "x-truedraft-ignored" not in response.headers


def test_tokenize(server: Server) -> None:
    text = "Once upon a time 😀"
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    back = server.post("/detokenize", {"tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}
    request = {"model": MODEL, "prompt": text, "max_tokens": 1, "return_token_ids": True}
    completion = server.post("/v1/completions", request).json()
    assert completion["choices"][0]["prompt_token_ids"] == answer["tokens"]


def test_speculation_says_everything(server: Server, sdk: openai.OpenAI) -> None:
    sdk.completions.create(prompt="Once", max_tokens=60, extra_body={"speculation": DRAFTED}, **GREEDY)
    # The policy's part is told after the tokens.
    wait_for(lambda: bool(server.get("/speculation").json()["policy"]), "the policy's state")
    state = server.get("/speculation").json()
    assert state["proposer"] == "auto"
    assert state["on"] == state["why"].startswith("on: ")
    assert 0 <= state["draft_length"] <= 32
    positions = state["acceptance_by_position"]
    assert [entry["position"] for entry in positions][:4] == [0, 1, 2, 3]
    assert all(0 <= entry["accepted"] <= entry["drafted"] for entry in positions)
    assert 0 < state["acceptance_rate"] < 1
    assert set(state["phase_seconds"]) == {"draft", "score", "verify", "host"}
    assert state["policy"]["policy"] == "auto"
    assert server.metric("truedraft_request_queue_time_seconds_count") > 0


def test_messages_say_what_chats_say(server: Server) -> None:
    """Anthropic's form is another way to ask for the same."""
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 30, "temperature": 0}
    chat = server.post("/v1/chat/completions", asked).json()
    message = server.post("/v1/messages", asked).json()
    assert [block["text"] for block in message["content"]] == [chat["choices"][0]["message"]["content"]]
    counted = server.post("/v1/messages/count_tokens", {"model": MODEL, "messages": messages}).json()
    assert counted == {"input_tokens": chat["usage"]["prompt_tokens"]}
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}}
    tools = [{"name": "add", "input_schema": schema | {"required": ["a"], "additionalProperties": False}}]
    forced = {"tools": tools, "tool_choice": {"type": "tool", "name": "add"}, "max_tokens": 60}
    (call,) = server.post("/v1/messages", asked | forced).json()["content"]
    assert (call["type"], call["name"], call["input"]["a"] in range(10)) == ("tool_use", "add", True)

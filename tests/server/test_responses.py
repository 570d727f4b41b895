"""``/v1/responses``: text in, text out, through the official SDK's types and over the raw wire."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseInputParam

from tests.server.conftest import StartServer
from tests.server.refusals import refused
from tests.server.running import MODEL, RunningServer, wait_for
from tests.server.test_completions import text_of

PATH = "/v1/responses"
EVENTS_BEFORE = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
EVENTS_AFTER = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
LOGPROBS = "message.output_text.logprobs"


@pytest.fixture
def sdk(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def read(body: str) -> list[dict[str, Any]]:
    """Events off the wire: named by their type, numbered without a gap, and nothing else."""
    *blocks, end = body.split("\n\n")
    assert end == ""
    read_events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        read_events.append(event)
    return read_events


def prompt_of(server: RunningServer, tokenizer: Any, fields: dict[str, Any]) -> str:
    """What the model was given."""
    num_before = len(server.messages_to_worker("Generate"))
    assert server.post(PATH, {"max_output_tokens": 1} | fields).status_code == 200
    (line,) = server.messages_to_worker("Generate")[num_before:]
    ids = json.loads(line.partition("prompt_token_ids=")[2].partition("]")[0] + "]")
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def test_response(sdk: openai.OpenAI) -> None:
    answer = sdk.responses.create(
        model=MODEL,
        input="Said nowhere else",
        max_output_tokens=13,
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
    )
    assert Response.model_validate(answer.to_dict(), strict=False)
    assert (answer.object, answer.model, answer.status) == ("response", MODEL, "incomplete")
    assert answer.id.startswith("resp_")
    assert answer.output_text == text_of(13)
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    (item,) = answer.output
    assert item.type == "message"
    assert item.id.startswith("msg_")
    assert (item.role, item.status, len(item.content)) == ("assistant", "incomplete", 1)
    assert (answer.temperature, answer.top_p, answer.metadata) == (0.5, 0.9, {"a": "b"})
    assert (answer.tools, answer.tool_choice, answer.error) == ([], "auto", None)
    assert answer.to_dict()["store"] is False
    assert answer.usage is not None
    assert answer.usage.output_tokens == 13
    assert answer.usage.total_tokens == answer.usage.input_tokens + 13
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


def test_stream(start_server: StartServer) -> None:
    with (
        start_server() as server,
        server.one_step_at_a_time(30),
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        stream = list(sdk.responses.create(model=MODEL, input="Hi", max_output_tokens=30, stream=True))
    deltas = [event for event in stream if event.type == "response.output_text.delta"]
    kinds = [event.type for event in stream]
    assert kinds == [*EVENTS_BEFORE, *["response.output_text.delta"] * len(deltas), *EVENTS_AFTER] + [
        "response.incomplete"
    ]
    assert len(deltas) > 3
    assert "".join(event.delta for event in deltas) == text_of(30)
    last = stream[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == text_of(30)
    assert last.response.usage is not None
    assert len({event.item_id for event in deltas} | {last.response.output[0].id}) == 1


def test_stream_helper_of_the_sdk(start_server: StartServer) -> None:
    with (
        start_server("--text", "Good bye.", "--once") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        with sdk.responses.stream(model=MODEL, input="Hi") as stream:
            snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert snapshots[-1] == "Good bye."
        assert (final.status, final.output_text, final.incomplete_details) == ("completed", "Good bye.", None)
        assert final.output[0].status == "completed"  # type: ignore[union-attr]


async def test_async(server: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        answer = await sdk.responses.create(model=MODEL, input="Hi", max_output_tokens=9)
        assert answer.output_text == text_of(9)
        stream = await sdk.responses.create(model=MODEL, input="Hi", max_output_tokens=30, stream=True)
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == text_of(30)
        async with sdk.responses.stream(model=MODEL, input="Hi", max_output_tokens=9) as managed:
            kinds = [event.type async for event in managed]
        assert kinds[-1] == "response.incomplete"


def test_events_on_the_wire(server: RunningServer) -> None:
    response = server.post(PATH, {"input": "Hi", "max_output_tokens": 40, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = read(response.text)
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == text_of(40)
    assert "\ufffd" not in text[:-1]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    whole = server.post(PATH, {"input": "Hi", "max_output_tokens": 40}).json()
    assert done["text"] == text == whole["output"][0]["content"][0]["text"]
    last = events[-1]["response"]
    same = {"id", "created_at", "output"}
    assert {k: v for k, v in last.items() if k not in same} == {
        k: v | {"input_tokens_details": last["usage"]["input_tokens_details"]} if k == "usage" else v
        for k, v in whole.items()
        if k not in same
    }


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"input": "Hi"}, [("user", "Hi")]),
        ({"input": "Hi", "instructions": "Be brief."}, [("system", "Be brief."), ("user", "Hi")]),
        (
            {
                "input": [
                    {"role": "developer", "content": "a"},
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}] * 2},
                    {
                        "id": "msg_1",
                        "type": "message",
                        "role": "assistant",
                        "status": "completed",
                        "content": [
                            {"type": "output_text", "text": "c", "annotations": [], "logprobs": None}
                        ],
                    },
                    {"role": "user", "content": "d"},
                ]
            },
            [("system", "a"), ("user", "b\nb"), ("assistant", "c"), ("user", "d")],
        ),
    ],
)
def test_input_reaches_the_template(
    server: RunningServer, tokenizer: Any, fields: dict[str, Any], messages: list[tuple[str, str]]
) -> None:
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    assert prompt_of(server, tokenizer, fields) == f"{expected}<|im_start|>assistant\n"


def test_answers_can_be_given_back(sdk: openai.OpenAI) -> None:
    first = sdk.responses.create(model=MODEL, input="Hi", max_output_tokens=9)
    conversation: ResponseInputParam = [{"role": "user", "content": "Hi"}]
    conversation += [item.to_dict() for item in first.output]  # type: ignore[misc]
    conversation.append({"role": "user", "content": "More"})
    answer = sdk.responses.with_raw_response.create(model=MODEL, input=conversation, max_output_tokens=9)
    assert "x-truedraft-ignored" not in answer.headers
    assert answer.parse().output_text == text_of(9)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: RunningServer, stream: bool) -> None:
    fields = {"input": "Hi", "max_output_tokens": 12, "include": [LOGPROBS], "top_logprobs": 2}
    response = server.post(PATH, fields | {"stream": stream})
    if stream:
        events = read(response.text)
        entries = [e for event in events if event["type"].endswith("text.delta") for e in event["logprobs"]]
        answer = events[-1]["response"]
        assert entries == answer["output"][0]["content"][0]["logprobs"]
    else:
        answer = response.json()
        entries = answer["output"][0]["content"][0]["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text_of(12)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert answer["top_logprobs"] == 2


def test_extensions_work_here_too(server: RunningServer) -> None:
    fields = {"input": "Hi", "stop": "örld", "seed": 4, "speculation": {"num_speculative_tokens": 2}}
    answer = server.post(PATH, fields).json()
    assert answer["output"][0]["content"][0]["text"] == "Hello, w"
    assert answer["status"] == "completed"
    assert (answer["truedraft"]["verification"], answer["truedraft"]["seeds"]) == ("coupled", [4])
    assert "truedraft" not in server.post(PATH, {"input": "Hi", "max_output_tokens": 1}).json()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": [{}]}, "messages"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    error = refused(server, PATH, {"input": "Hi"} | fields)
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "background": False, "truncation": "disabled", "parallel_tool_calls": False},
        {"tools": [], "tool_choice": "none", "text": {"format": {"type": "text"}}, "include": []},
        {"reasoning": {"effort": "none"}, "previous_response_id": None, "service_tier": "auto"},
        {"user": "me", "safety_identifier": "x", "prompt_cache_key": "y", "conversation": None},
    ],
)
def test_what_asks_for_nothing_is_fine(server: RunningServer, fields: dict[str, Any]) -> None:
    response = server.post(PATH, {"input": "Hi", "max_output_tokens": 1} | fields)
    assert response.status_code == 200, response.text
    assert "x-truedraft-ignored" not in response.headers
    assert response.json()["parallel_tool_calls"] is fields.get("parallel_tool_calls", True)
    assert response.json()["tool_choice"] == fields.get("tool_choice", "auto")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": [5]}, "input.0", "invalid_type"),
        ({"input": [{"content": "x"}]}, "input.0.role", "missing_required_parameter"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input.0.content", "missing_required_parameter"),
        ({"input": [{"role": "user", "content": 5}]}, "input.0.content", "invalid_type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
            "input.0.content.0.text",
            "invalid_type",
        ),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"input": "x", "include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"input": "x", "speculation": {"method": "prediction"}}, "prediction", "invalid_value"),
        ({"input": "x", "metadata": {"a": 1}}, "metadata.a", "invalid_type"),
        ({"input": "x" * 600}, "input", "context_length_exceeded"),
    ],
)
def test_invalid_values(server: RunningServer, fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(server, PATH, fields)
    assert (error["param"], error["code"]) == (param, code)


def test_unknown_fields_are_reported(server: RunningServer) -> None:
    part = {"type": "input_text", "text": "x", "size": 1}
    fields = {"input": [{"role": "user", "content": [part], "mood": "good"}], "bogus": 1}
    response = server.post(PATH, fields | {"max_output_tokens": 1})
    assert response.headers["x-truedraft-ignored"] == "bogus, input.0.mood, input.0.content.0.size"


def test_failure_in_a_stream_is_an_event(start_server: StartServer) -> None:
    with start_server() as server, ThreadPoolExecutor() as threads:
        server.worker.at_most(10)
        body = {"input": "a", "max_output_tokens": 100, "stream": True}
        answer = threads.submit(server.post, PATH, body)
        server.wait_for_tokens(40)
        server.worker.die()
        response = answer.result()
        assert response.status_code == 200
        last = read(response.text)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == "server_error"
        assert "exited with code 7" in last["response"]["error"]["message"]
        assert server.metric("truedraft_request_errors_total", code="worker_lost") == 1


def test_client_that_leaves_frees_its_sequence(start_server: StartServer) -> None:
    with start_server() as server:
        server.worker.at_most(1)
        body = {"model": MODEL, "input": "x", "stream": True}
        with server.client.stream("POST", PATH, json=body) as response:
            next(response.iter_lines())
        server.wait_for_messages("Abort", 1)
        aborted = partial(server.metric, "truedraft_requests_aborted_total", reason="disconnect")
        wait_for(lambda: aborted() == 1, "the count")

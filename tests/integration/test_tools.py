"""Tool calls of the real server with the bundled pair: always valid, and an agent's loop through the SDK."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from openai.types.responses import ResponseInputParam
from pydantic import BaseModel, Field

from tests.integration.conftest import Server

MODEL = "truedraft-demo"


class Weather(BaseModel):
    """Reports the weather somewhere."""

    city: str = Field(max_length=12)
    unit: Literal["C", "F"]


class Add(BaseModel):
    """The sum of two digits."""

    a: int = Field(ge=0, le=9)
    b: int = Field(ge=0, le=9)


KINDS: dict[str, type[BaseModel]] = {"Weather": Weather, "Add": Add}
TOOLS: Any = [openai.pydantic_function_tool(kind) for kind in KINDS.values()]
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]
NAMED = {"type": "function", "function": {"name": "Add"}}


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai as client:
        yield client


def checked(calls: Any) -> None:
    """Every call is one of a tool, with arguments that it takes."""
    assert calls
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        KINDS[call.function.name].model_validate_json(call.function.arguments, strict=True)


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls_are_valid(sdk: openai.OpenAI, choice: Any, stream: bool) -> None:
    seen = 0
    for seed in range(8):
        asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": TOOLS, "tool_choice": choice}
        asked |= {"seed": seed, "temperature": float(seed > 0), "max_tokens": 400}
        if not stream:
            answer = sdk.chat.completions.create(**asked)
        else:
            try:
                with sdk.chat.completions.stream(**asked) as events:
                    answer = events.get_final_completion()
            except openai.LengthFinishReasonError:
                continue
        (only,) = answer.choices
        if only.finish_reason == "length":
            continue
        seen += 1
        assert only.finish_reason == "tool_calls"
        assert not only.message.content
        checked(only.message.tool_calls)
        if choice == NAMED:
            assert [call.function.name for call in only.message.tool_calls or []] == ["Add"]  # type: ignore[union-attr]
    assert seen >= 6


def test_drafts_change_no_call(server: Server) -> None:
    body = {"model": MODEL, "messages": ASK, "tools": TOOLS, "tool_choice": "required", "seed": 11}
    answers = [
        server.post("/v1/chat/completions", body | {"speculation": {"method": method}}).json()
        for method in ("none", "auto")
    ]
    first, second = (
        [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]] for answer in answers
    )
    assert first == second
    assert answers[1]["truedraft"]["accepted_tokens"] > 20


def test_free_answers_are_text_or_calls(sdk: openai.OpenAI) -> None:
    for seed in range(4):
        answer = sdk.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, seed=seed, max_tokens=40)
        message = answer.choices[0].message
        assert message.content or message.tool_calls
        if answer.choices[0].finish_reason == "tool_calls":
            checked(message.tool_calls)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_on_chats(sdk: openai.OpenAI, stream: bool) -> None:
    """Calls, gets results, calls again, and answers in words: as the SDK keeps the conversation."""
    messages = list(ASK)
    for choice in ("required", "required", "none"):
        asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": TOOLS, "max_tokens": 150}
        asked |= {"tool_choice": choice, "parallel_tool_calls": False, "seed": 1}
        if choice == "none":
            asked["stop"] = "."
        if not stream:
            message = sdk.chat.completions.create(**asked).choices[0].message
        else:
            with sdk.chat.completions.stream(**asked) as events:
                message = events.get_final_completion().choices[0].message
        messages.append(message.to_dict())  # type: ignore[arg-type]
        for call in message.tool_calls or []:
            assert call.type == "function"
            KINDS[call.function.name].model_validate_json(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps({"result": 5})})
    assert [message["role"] for message in messages] == [
        "user", *["assistant", "tool"] * 2, "assistant"
    ]  # fmt: skip
    assert messages[-1]["content"]  # type: ignore[typeddict-item]


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_on_responses(sdk: openai.OpenAI, stream: bool) -> None:
    items: ResponseInputParam = [{"role": "user", "content": "What is the weather in Paris?"}]
    for choice in ("required", "none"):
        asked: dict[str, Any] = {"model": MODEL, "input": items, "tools": FLAT, "max_output_tokens": 150}
        asked |= {"tool_choice": choice, "parallel_tool_calls": False, "extra_body": {"seed": 1, "stop": "."}}
        if not stream:
            answer: Any = sdk.responses.create(**asked)
        else:
            with sdk.responses.stream(**asked) as events:
                answer = events.get_final_response()
        items += [item.to_dict() for item in answer.output]
        for call in answer.output:
            if call.type == "function_call":
                KINDS[call.name].model_validate_json(call.arguments)
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
    assert [item.get("type") for item in items] == [None, "function_call", "function_call_output", "message"]
    assert answer.output_text


def test_calls_are_parsed_by_the_sdk(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.parse(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=2
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, (Weather, Add))

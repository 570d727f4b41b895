"""LangChain's ``ChatOpenAI`` and ``OpenAI``: whole answers, streams, batches, usage, log-probabilities."""

import asyncio
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.clients.conftest import MODEL, Server

MESSAGES = [SystemMessage("You tell short stories."), HumanMessage("Tell me a story about a fox.")]


def chat(server: Server, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        max_retries=0,
        **{"max_tokens": 30, **settings},
    )


def expected(server: Server, max_tokens: int = 30) -> str:
    """Returns the same chat through the plain SDK."""
    answer = server.openai.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": MESSAGES[0].text},
            {"role": "user", "content": MESSAGES[1].text},
        ],
        temperature=0,
        max_tokens=max_tokens,
    )
    return answer.choices[0].message.content or ""


def test_a_chat(server: Server) -> None:
    answer = chat(server).invoke(MESSAGES)
    assert isinstance(answer, AIMessage)
    assert answer.text == expected(server) != ""
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == MODEL
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 30


def test_a_stream_with_usage(server: Server) -> None:
    chunks = list(chat(server, stream_usage=True).stream(MESSAGES))
    assert len(chunks) > 3
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.text == expected(server)
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 30
    assert whole.usage_metadata["total_tokens"] == whole.usage_metadata["input_tokens"] + 30


def test_a_batch_and_an_asynchronous_stream(server: Server) -> None:
    model = chat(server)
    answers = model.batch([MESSAGES] * 3)
    assert [answer.text for answer in answers] == [expected(server)] * 3

    async def read() -> str:
        return "".join([chunk.text async for chunk in model.astream(MESSAGES)])

    assert asyncio.run(read()) == expected(server)


def test_a_conversation_goes_on(server: Server) -> None:
    """An answer is sent back as LangChain keeps it, with all the fields it adds."""
    model = chat(server)
    first = model.invoke(MESSAGES)
    second = model.invoke([*MESSAGES, first, HumanMessage("And then?")])
    assert second.text
    assert second.usage_metadata is not None
    assert first.usage_metadata is not None
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


def test_log_probabilities(server: Server) -> None:
    answer = chat(server, logprobs=True, top_logprobs=2, max_tokens=5).invoke(MESSAGES)
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == 5
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content)


def test_stop_strings(server: Server) -> None:
    answer = chat(server, max_tokens=100, stop_sequences=["."]).invoke(MESSAGES)
    assert answer.text == expected(server, max_tokens=100).partition(".")[0]
    assert answer.response_metadata["finish_reason"] == "stop"


def test_responses(server: Server) -> None:
    """Over ``/v1/responses`` the same is said."""
    answer = chat(server, use_responses_api=True).invoke(MESSAGES)
    assert answer.text == expected(server)
    chunks = list(chat(server, use_responses_api=True).stream(MESSAGES))
    assert "".join(chunk.text for chunk in chunks) == expected(server)


def test_a_completion(server: Server) -> None:
    model = OpenAI(
        model=MODEL, base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=20, max_retries=0
    )
    want = server.openai.completions.create(
        model=MODEL, prompt="Once upon a time", temperature=0, max_tokens=20
    )
    assert model.invoke("Once upon a time") == want.choices[0].text
    assert "".join(model.stream("Once upon a time")) == want.choices[0].text
    assert model.batch(["Once upon a time"] * 2) == [want.choices[0].text] * 2


def test_errors_are_the_sdks(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        chat(server).with_config(configurable={}).bind(model="another").invoke(MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(server).bind(temperature=9).invoke(MESSAGES)


class Weather(BaseModel):
    """Reports the weather somewhere."""

    city: str = Field(max_length=12)
    unit: Literal["C", "F"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("use_responses_api", [False, True])
def test_structured_output(server: Server, method: Any, use_responses_api: bool) -> None:
    model = chat(server, use_responses_api=use_responses_api, max_tokens=200)
    assert isinstance(model.with_structured_output(Weather, method=method).invoke(MESSAGES), Weather)


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_bound_tools(server: Server, use_responses_api: bool) -> None:
    """One call, whole and streamed; its result goes back, and an answer in words comes."""
    model = chat(server, use_responses_api=use_responses_api, max_tokens=200)
    calling = model.bind_tools([Weather], tool_choice="required", parallel_tool_calls=False)
    answer = calling.invoke(MESSAGES)
    (call,) = answer.tool_calls
    Weather.model_validate(call["args"])
    whole, *chunks = calling.stream(MESSAGES)
    for chunk in chunks:
        whole += chunk
    assert isinstance(whole, AIMessage)
    assert [(each["name"], each["args"]) for each in whole.tool_calls] == [("Weather", call["args"])]
    result = ToolMessage("Rain", tool_call_id=call["id"] or "")
    assert model.bind_tools([Weather], tool_choice="none").invoke([*MESSAGES, answer, result]).text

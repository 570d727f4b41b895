"""LiteLLM: chats and completions, whole and streamed, and the classes that it sorts errors into."""

import asyncio
from typing import Any

import litellm
import pytest

from tests.clients.conftest import MODEL, Server

litellm.telemetry = False
litellm.suppress_debug_info = True

MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]


def settings(server: Server, **others: Any) -> dict[str, Any]:
    return {
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 30,
        "num_retries": 0,
        "max_retries": 0,
        **others,
    }


def chat(server: Server, **others: Any) -> Any:
    return litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, **settings(server, **others))


def expected(server: Server) -> str:
    answer = server.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=30
    )
    return answer.choices[0].message.content


def test_a_chat(server: Server) -> None:
    answer = chat(server)
    assert answer.choices[0].message.content == expected(server) != ""
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 30


def test_a_stream_with_usage(server: Server) -> None:
    chunks = list(chat(server, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected(server)
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert [usage.completion_tokens for usage in usages] == [30]
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt.choices[0].message.content == text
    assert rebuilt.choices[0].finish_reason == "length"


def test_an_asynchronous_stream(server: Server) -> None:
    async def read() -> str:
        stream = await litellm.acompletion(
            model=f"openai/{MODEL}", messages=MESSAGES, stream=True, **settings(server)
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(read()) == expected(server)


def test_completions(server: Server) -> None:
    want = server.openai.completions.create(
        model=MODEL, prompt="Once upon a time", temperature=0, max_tokens=30
    )
    request = {"model": f"text-completion-openai/{MODEL}", "prompt": "Once upon a time"}
    answer = litellm.text_completion(**request, **settings(server))
    assert answer.choices[0].text == want.choices[0].text
    stream = litellm.text_completion(**request, **settings(server, stream=True))
    assert "".join(chunk.choices[0].text or "" for chunk in stream) == want.choices[0].text


def test_our_own_fields_pass_through(server: Server) -> None:
    answer = chat(server, extra_body={"speculation": {"method": "ngram"}, "top_k": 5})
    assert answer.choices[0].message.content == expected(server)
    assert answer.truedraft["method"] == "ngram"


def test_errors_are_sorted(server: Server) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        chat(server, temperature=9)
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        litellm.completion(model="openai/another", messages=MESSAGES, **settings(server))
    # LiteLLM falls back to a model with a longer context if it can tell that this is what is lacking.
    with pytest.raises(litellm.ContextWindowExceededError):
        chat(server, messages=[{"role": "user", "content": "fox " * 5000}])

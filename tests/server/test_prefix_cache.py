"""Priority, prefix sharing and its salt: how they reach the engine, and what is reported of the cache."""

from typing import Any

import httpx
import pytest

from tests.server.conftest import StartServer
from tests.server.running import RunningServer
from tests.server.wire import answers

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STORY = "Once upon a time there was a fox"  # 32 tokens: two blocks of the fake worker's cache


def cached_tokens(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({}, "priority=0, cache_prompt=True, cache_salt=''"),
        (
            {"priority": None, "cache_prompt": None, "cache_salt": None},
            "priority=0, cache_prompt=True, cache_salt=''",
        ),
        ({"cache_prompt": False}, "priority=0, cache_prompt=False, cache_salt=''"),
        ({"cache_salt": "mine"}, "priority=0, cache_prompt=True, cache_salt='mine'"),
    ],
)
def test_fields_reach_the_engine(server: RunningServer, path: str, fields: dict[str, Any], sent: str) -> None:
    prompt: dict[str, Any] = (
        {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    )
    response = server.post(path, {"max_tokens": 1} | prompt | fields)
    assert response.status_code == 200
    assert "x-truedraft-ignored" not in response.headers
    assert sent in server.messages_to_worker("Generate")[-1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"priority": 1.5}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"cache_prompt": 1}, "cache_prompt"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_invalid_values(server: RunningServer, path: str, fields: dict[str, Any], param: str) -> None:
    prompt: dict[str, Any] = (
        {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    )
    response = server.post(path, prompt | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_cached_tokens(start_server: StartServer) -> None:
    with start_server() as server:

        def ask(**fields: Any) -> int:
            return cached_tokens(server.post(COMPLETIONS, {"prompt": STORY, "max_tokens": 1} | fields))

        assert ask() == 0
        assert ask() == 16  # the last token of a prompt is always computed
        assert ask(prompt=STORY + " and a bird") == 32
        assert ask(prompt=STORY, cache_prompt=False) == 0
        assert ask(cache_salt="mine") == 0
        assert ask(cache_salt="mine") == 16
        assert ask(max_tokens=0) == 0  # nothing is computed at all
        assert ask(max_tokens=0, echo=True, logprobs=0) == 16
        lengths = [32, 32, 43, 32, 32, 32]  # without the one that opted out, and the one of no tokens
        assert server.metric("truedraft_prefix_cache_queries_total") == sum(lengths)
        assert server.metric("truedraft_prefix_cache_hits_total") == 16 + 32 + 16 + 16


def test_cached_tokens_are_counted_once_per_prompt(start_server: StartServer) -> None:
    """The fake worker lets later choices share the first one's prompt, which is no gain of the client's."""
    with start_server() as server:
        asked = {"prompt": [STORY, "A" * 40], "n": 3, "max_tokens": 1}
        assert cached_tokens(server.post(COMPLETIONS, asked)) == 0
        assert cached_tokens(server.post(COMPLETIONS, asked)) == 16 + 32


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_cached_tokens_of_a_stream(start_server: StartServer, path: str) -> None:
    prompt = {"prompt": STORY} if path == COMPLETIONS else {"messages": [{"role": "user", "content": STORY}]}
    stream = {"max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    with start_server() as server:
        first, second = (answers(server, path, prompt | stream)[-1]["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] >= 16

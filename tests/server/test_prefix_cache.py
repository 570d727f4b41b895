"""Priority, prefix sharing and its salt: how they reach the engine, and what is reported of the cache."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from msgspec import structs

from tests.server.conftest import StartServer
from tests.server.running import RunningServer, wait_for
from tests.server.test_launch import WORKER
from tests.server.test_speculation_status import STATS
from tests.server.wire import answers
from truedraft.engine.messages import PrefixFileStats
from truedraft.server.observability.metrics import WorkerMetrics

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


def test_to_clear(start_server: StartServer) -> None:
    with start_server() as server:

        def ask() -> int:
            return cached_tokens(server.post(COMPLETIONS, {"prompt": STORY, "max_tokens": 1}))

        assert (ask(), ask()) == (0, 16)
        for _ in range(2):
            assert server.client.post("/prefix_cache/clear").json() == {"success": True}
        assert len(server.messages_to_worker("ClearPrefixes")) == 2
        assert (ask(), ask()) == (0, 16)
        assert server.get("/prefix_cache/clear").status_code == 405


def test_files_that_cannot_be_cleared_are_told(start_server: StartServer) -> None:
    with start_server() as server:
        server.worker.keep_files()
        answer = server.client.post("/prefix_cache/clear")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "prefix_cache_not_cleared")
        assert (
            "could not be cleared: the disk refuses. They are not read" in answer.json()["error"]["message"]
        )
        server.worker.go_on()
        assert server.client.post("/prefix_cache/clear").json() == {"success": True}


def test_a_worker_that_ends_has_cleared_nothing(start_server: StartServer) -> None:
    with start_server() as server, ThreadPoolExecutor() as threads:
        worker = server.engine.workers[0]
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        answer = threads.submit(server.client.post, "/prefix_cache/clear")
        wait_for(lambda: bool(worker._clearings), "what is to be cleared")
        os.kill(worker.pid, signal.SIGKILL)
        refused = answer.result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "worker_lost")
        server.wait_until_ready()
        assert server.client.post("/prefix_cache/clear").json() == {"success": True}


def test_metrics_tell_of_files() -> None:
    """A worker's totals begin anew with it; gauges are those of the last one."""
    files = PrefixFileStats(32, 4096, 100, 0.5, 200, 1, 2, 3, is_writing=True)
    metrics = WorkerMetrics()
    for _ in range(2):
        metrics.ready(WORKER)
        metrics.stats(structs.replace(STATS, prefix_files=files))
        samples = {
            (sample.name.removeprefix("truedraft_prefix_cache_disk_"), *sample.labels.values()): sample.value
            for family in metrics.collect()
            for sample in family.samples
        }
        metrics.lost()
    assert samples["hits_total",] == 64
    assert (samples["bytes",], samples["writing",]) == (4096, 1)
    assert samples["read_seconds_total",] == 1.0
    assert (samples["transferred_bytes_total", "read"], samples["transferred_bytes_total", "written"]) == (
        200,
        400,
    )
    reasons = ("damaged", "failed", "dropped")
    assert [samples["errors_total", reason] for reason in reasons] == [2, 4, 6]


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

"""Limits on time and on what waits: requests are refused before anything is computed, or freed after."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import StartServer
from tests.server.running import MODEL, RunningServer, wait_for
from tests.server.wire import events

COMPLETIONS = "/v1/completions"
# Only the test can make the server's clock go so far.
LONG_SECONDS = 10_000.0


def error_of(response: httpx.Response) -> dict[str, Any]:
    return dict(response.json()["error"])


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_before_the_first_byte(start_server: StartServer, stream: bool) -> None:
    with start_server(request_timeout=LONG_SECONDS) as server, ThreadPoolExecutor() as threads:
        server.worker.at_most(0)
        body = {"prompt": ["a", "b"], "n": 2, "stream": stream}
        answer = threads.submit(server.post, COMPLETIONS, body)
        server.wait_for_messages("Generate", 2)
        server.pass_time(LONG_SECONDS)
        response = answer.result()
        assert response.status_code == 504
        error = error_of(response)
        assert (error["type"], error["code"], error["param"]) == ("timeout_error", "request_timeout", None)
        assert "10000 seconds" in error["message"]
        server.wait_for_messages("Abort", 2)
        assert server.engine.num_requests == 0
        assert server.metric("truedraft_requests_aborted_total", reason="timeout") == 1
        assert server.metric("truedraft_requests_aborted_total", reason="disconnect") == 0
        assert server.metric("truedraft_request_errors_total", code="request_timeout") == 1


def test_deadline_in_a_stream_is_an_event(start_server: StartServer) -> None:
    with start_server(request_timeout=LONG_SECONDS) as server, ThreadPoolExecutor() as threads:
        server.worker.at_most(0)
        body = {"prompt": "a", "max_tokens": 400, "stream": True}
        answer = threads.submit(server.post, COMPLETIONS, body)
        for num_steps in (1, 2, 3):
            server.worker.at_most(num_steps)
            server.wait_for_tokens(4 * num_steps)
        server.pass_time(LONG_SECONDS)
        response = answer.result()
        assert response.status_code == 200
        *chunks, last = events(response.text.replace(": ping\n\n", ""))
        assert last["error"]["code"] == "request_timeout"
        assert len(chunks) == 3
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        server.wait_for_messages("Abort", 1)
        assert server.engine.num_requests == 0


def test_deadline_that_is_kept(start_server: StartServer) -> None:
    with start_server(request_timeout=LONG_SECONDS, keep_alive_timeout=100_000) as server:
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 100}).status_code == 200
        server.pass_time(LONG_SECONDS)
        assert server.metric("truedraft_requests_aborted_total", reason="timeout") == 0
        assert server.messages_to_worker("Abort") == []


def test_sdk_does_not_try_again_after_a_deadline(start_server: StartServer) -> None:
    with (
        start_server(request_timeout=0.2) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2) as sdk,
    ):
        server.worker.at_most(0)
        with pytest.raises(openai.InternalServerError) as caught:
            sdk.completions.create(model=MODEL, prompt="a")
        assert (caught.value.status_code, caught.value.code) == (504, "request_timeout")
        assert server.metric("truedraft_request_errors_total", code="request_timeout") == 1


def test_queued_tokens_are_limited(start_server: StartServer) -> None:
    """A worker that takes no step leaves everything waiting for its first token."""
    with start_server(max_queued_tokens=10) as server, ThreadPoolExecutor() as threads:

        def submit(num_tokens: int, number: int) -> Future[httpx.Response]:
            body = {"prompt": "x" * num_tokens, "max_tokens": 1}
            future = threads.submit(server.post, COMPLETIONS, body)
            server.wait_for_requests(number)
            return future

        server.worker.at_most(0)
        accepted = [submit(20, 1)]  # nothing waits, so its length does not matter
        refused = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert error_of(refused)["code"] == "queue_full"
        assert "20 prompt tokens are waiting" in error_of(refused)["message"]
        server.worker.at_most(1)
        assert accepted[0].result().status_code == 200
        accepted = [submit(4, 1), submit(6, 2)]
        assert server.post(COMPLETIONS, {"prompt": "x"}).status_code == 429
        server.worker.go_on()
        assert [future.result().status_code for future in accepted] == [200, 200]
        assert server.post(COMPLETIONS, {"prompt": ["x" * 5, "x" * 6]}).status_code == 200
        assert server.metric("truedraft_request_errors_total", code="queue_full") == 2


def test_sdk_comes_back_when_the_queue_was_full(start_server: StartServer) -> None:
    """It waits as long as Retry-After says, and again where that was not long enough."""
    with (
        start_server(max_queued_sequences=1) as server,
        ThreadPoolExecutor() as threads,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=30) as sdk,
    ):
        server.worker.at_most(0)
        first = threads.submit(server.post, COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        server.wait_for_requests(1)
        started = time.monotonic()
        answer = threads.submit(sdk.completions.create, model=MODEL, prompt="x", max_tokens=1)
        refusals = partial(server.metric, "truedraft_request_errors_total", code="queue_full")
        wait_for(lambda: refusals() > 0, "a refusal")
        server.worker.go_on()
        assert answer.result().choices
        assert time.monotonic() - started > 1
        assert first.result().status_code == 200


def test_sdk_names_the_refusal(start_server: StartServer) -> None:
    with (
        start_server(max_queued_sequences=1) as server,
        ThreadPoolExecutor() as threads,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        server.worker.at_most(0)
        first = threads.submit(server.post, COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        server.wait_for_requests(1)
        with pytest.raises(openai.RateLimitError) as caught:
            sdk.completions.create(model=MODEL, prompt="x", max_tokens=1)
        assert caught.value.code == "queue_full"
        assert caught.value.response.headers["retry-after"] == "1"
        server.worker.go_on()
        first.result()


def test_limits_are_off_unless_set(server: RunningServer) -> None:
    settings = server.services.settings
    assert (settings.request_timeout, settings.max_queued_tokens) == (None, None)

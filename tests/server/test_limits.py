"""How long a request may take, and how much may wait: refused before anything is computed, or freed after."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import StartServer
from tests.server.running import MODEL, RunningServer, wait_for
from tests.server.wire import events

COMPLETIONS = "/v1/completions"
SLOW = ("--step-seconds", "0.02", "--tokens-per-step", "1")


def error_of(response: httpx.Response) -> dict[str, Any]:
    return dict(response.json()["error"])


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_before_the_first_byte(start_server: StartServer, stream: bool) -> None:
    with start_server("--step-seconds", "1", request_timeout=0.3) as server:
        response = server.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "stream": stream})
        assert response.status_code == 504
        error = error_of(response)
        assert (error["type"], error["code"], error["param"]) == ("timeout_error", "request_timeout", None)
        assert "0.3 seconds" in error["message"]
        wait_for(lambda: len(server.messages_to_worker("Abort")) == 2, "the aborts")
        assert server.services.engine.num_requests == 0
        assert server.metric("foretoken_requests_aborted_total", reason="timeout") == 1
        assert server.metric("foretoken_requests_aborted_total", reason="disconnect") == 0
        assert server.metric("foretoken_request_errors_total", code="request_timeout") == 1


def test_deadline_in_a_stream_is_an_event(start_server: StartServer) -> None:
    with start_server(*SLOW, request_timeout=0.5) as server:
        response = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 400, "stream": True})
        assert response.status_code == 200
        *chunks, last = events(response.text)
        assert last["error"]["code"] == "request_timeout"
        assert len(chunks) > 1
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        wait_for(lambda: len(server.messages_to_worker("Abort")) == 1, "the abort")
        assert server.services.engine.num_requests == 0


def test_deadline_that_is_kept(start_server: StartServer) -> None:
    with start_server(request_timeout=0.5) as server:
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 100}).status_code == 200
        time.sleep(0.6)
        assert server.metric("foretoken_requests_aborted_total", reason="timeout") == 0
        assert server.messages_to_worker("Abort") == []


def test_sdk_does_not_try_again_after_a_deadline(start_server: StartServer) -> None:
    with (
        start_server("--step-seconds", "1", request_timeout=0.2) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2) as sdk,
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            sdk.completions.create(model=MODEL, prompt="a")
        assert (caught.value.status_code, caught.value.code) == (504, "request_timeout")
        assert len(server.messages_to_worker("Generate")) == 1


def test_queued_tokens_are_limited(start_server: StartServer) -> None:
    """Steps are slow, so that what has been submitted waits for its first token until they are over."""
    with (
        start_server("--step-seconds", "0.5", max_queued_tokens=10) as server,
        ThreadPoolExecutor() as threads,
    ):

        def submit(num_tokens: int, number: int) -> Future[httpx.Response]:
            body = {"prompt": "x" * num_tokens, "max_tokens": 1}
            future = threads.submit(server.post, COMPLETIONS, body)
            wait_for(lambda: server.services.engine.num_requests == number, "the request")
            return future

        accepted = [submit(20, 1)]  # nothing waits, so its length does not matter
        refused = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert error_of(refused)["code"] == "queue_full"
        assert "20 prompt tokens are waiting" in error_of(refused)["message"]
        assert accepted[0].result().status_code == 200
        accepted = [submit(4, 1), submit(6, 2)]
        assert server.post(COMPLETIONS, {"prompt": "x"}).status_code == 429
        assert [future.result().status_code for future in accepted] == [200, 200]
        assert server.post(COMPLETIONS, {"prompt": ["x" * 5, "x" * 6]}).status_code == 200
        assert server.metric("foretoken_request_errors_total", code="queue_full") == 2


def test_sdk_comes_back_when_the_queue_was_full(start_server: StartServer) -> None:
    """It waits as long as Retry-After says."""
    with (
        start_server("--step-seconds", "0.5", max_queued_requests=1) as server,
        ThreadPoolExecutor() as threads,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=1) as sdk,
    ):
        first = threads.submit(server.post, COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        wait_for(lambda: server.services.engine.num_requests == 1, "the first request")
        started = time.monotonic()
        answer = sdk.completions.create(model=MODEL, prompt="x", max_tokens=1)
        assert time.monotonic() - started > 1
        assert answer.choices
        assert first.result().status_code == 200
        assert server.metric("foretoken_request_errors_total", code="queue_full") == 1


def test_sdk_names_the_refusal(start_server: StartServer) -> None:
    with (
        start_server("--step-seconds", "0.5", max_queued_requests=1) as server,
        ThreadPoolExecutor() as threads,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        first = threads.submit(server.post, COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        wait_for(lambda: server.services.engine.num_requests == 1, "the first request")
        with pytest.raises(openai.RateLimitError) as caught:
            sdk.completions.create(model=MODEL, prompt="x", max_tokens=1)
        assert caught.value.code == "queue_full"
        assert caught.value.response.headers["retry-after"] == "1"
        first.result()


def test_limits_are_off_unless_set(server: RunningServer) -> None:
    settings = server.services.settings
    assert (settings.request_timeout, settings.max_queued_tokens) == (None, None)

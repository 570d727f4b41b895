"""Several API keys on one server: none sees, delays or crowds out another's requests more than it must."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.conftest import StartServer
from tests.server.refusals import COMPLETIONS, refused
from tests.server.running import RunningServer
from truedraft.server.errors import QueueFullError
from truedraft.server.text.tokenizer import Tokenizer
from truedraft.server.workers.open_requests import FairShare, Waiting

KEYS = ["anna-secret", "bert-secret"]


def key(name: str) -> dict[str, dict[str, str]]:
    return {"headers": {"authorization": f"Bearer {name}"}}


def generates(server: RunningServer) -> list[str]:
    return server.messages_to_worker("Generate")


def test_the_queue_counts_sequences(start_server: StartServer) -> None:
    with start_server(max_queued_sequences=4) as server, ThreadPoolExecutor() as threads:
        server.worker.at_most(0)
        first = threads.submit(server.post, COMPLETIONS, {"prompt": "x", "n": 3, "max_tokens": 1})
        server.wait_for_requests(1)
        response = server.post(COMPLETIONS, {"prompt": "x", "n": 2, "max_tokens": 1})
        assert response.status_code == 429
        assert "3 sequences are waiting" in response.json()["error"]["message"]
        assert "4 (max_queued_sequences)" in response.json()["error"]["message"]
        second = threads.submit(server.post, COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        server.wait_for_requests(2)
        server.worker.go_on()
        assert (first.result().status_code, second.result().status_code) == (200, 200)
        # Nothing waits any more, whatever has been counted on the way.
        assert server.post(COMPLETIONS, {"prompt": "x", "n": 9, "max_tokens": 1}).status_code == 200


def test_a_full_queue_is_noticed_before_tokenizing(
    start_server: StartServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_server(max_queued_sequences=1) as server, ThreadPoolExecutor() as threads:
        server.worker.at_most(0)
        first = threads.submit(server.post, COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        server.wait_for_requests(1)
        encoded: list[str] = []
        monkeypatch.setattr(tokenizer, "encode", lambda text, **_: encoded.append(text) or [1])
        assert server.post(COMPLETIONS, {"prompt": "y"}).status_code == 429
        assert encoded == []
        monkeypatch.undo()
        server.worker.go_on()
        assert first.result().status_code == 200


def test_abandoned_sequences_do_not_wait(start_server: StartServer) -> None:
    with start_server(max_queued_sequences=2) as server:
        server.worker.at_most(0)
        with server.unanswered(COMPLETIONS, {"prompt": "x", "n": 2}):
            server.wait_for_requests(1)
        server.wait_for_requests(0)
        server.worker.go_on()
        assert server.post(COMPLETIONS, {"prompt": "x", "n": 2, "max_tokens": 1}).status_code == 200


def test_one_key_has_so_many_requests_open(start_server: StartServer) -> None:
    with start_server(api_keys=KEYS, max_concurrent_per_key=1) as server, ThreadPoolExecutor() as threads:
        server.worker.at_most(0)
        body = {"prompt": "x", "max_tokens": 1}
        first = threads.submit(server.post, COMPLETIONS, body, **key("anna-secret"))
        server.wait_for_requests(1)
        refusal = server.post(COMPLETIONS, body, **key("anna-secret"))
        assert (refusal.status_code, refusal.headers["retry-after"]) == (429, "1")
        error = refusal.json()["error"]
        assert (error["code"], error["type"]) == ("too_many_requests", "rate_limit_error")
        assert "1 requests open" in error["message"]
        assert "max_concurrent_per_key" in error["message"]
        other = threads.submit(server.post, COMPLETIONS, body, **key("bert-secret"))
        server.wait_for_requests(2)
        server.worker.go_on()
        assert (first.result().status_code, other.result().status_code) == (200, 200)
        assert server.post(COMPLETIONS, body, **key("anna-secret")).status_code == 200


def test_a_new_key_is_not_behind_anothers_hundred(start_server: StartServer) -> None:
    """The worker takes two sequences a step, by priority; the second key's only one is among the first."""

    def post(name: str, n: int) -> httpx.Response:
        return server.post(COMPLETIONS, {"prompt": "x", "n": n, "max_tokens": 1}, **key(name))

    with start_server("--max-running", "2", api_keys=KEYS) as server, ThreadPoolExecutor() as threads:
        server.worker.at_most(0)
        greedy = [threads.submit(post, "anna-secret", 100)]
        server.wait_for_requests(1)
        greedy.append(threads.submit(post, "anna-secret", 100))
        server.wait_for_requests(2)
        late = threads.submit(post, "bert-secret", 1)
        server.wait_for_requests(3)
        server.wait_for_messages("Generate", 3)
        server.worker.at_most(1)
        assert late.result().status_code == 200
        assert not any(future.done() for future in greedy)
        server.worker.go_on()
        assert [future.result().status_code for future in greedy] == [200, 200]


def test_one_key_alone_is_served_in_order(start_server: StartServer) -> None:
    with start_server(api_keys=["anna-secret"]) as server:
        for _ in range(3):
            assert (
                server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, **key("anna-secret")).status_code
                == 200
            )
        places = [int(line.partition("place=")[2].partition(",")[0]) for line in generates(server)]
        assert places == sorted(places)
        assert places[0] > 0


@pytest.mark.parametrize("n", [1, 8, 32])
def test_a_full_queue_is_one_keys_own(start_server: StartServer, n: int) -> None:
    settings = {"api_keys": KEYS, "max_queued_sequences": 64, "max_queued_tokens": 100}
    with start_server(**settings) as server, ThreadPoolExecutor() as threads:
        server.worker.at_most(0)
        greedy = threads.submit(
            server.post, COMPLETIONS, {"prompt": "x" * 90, "n": 64, "max_tokens": 1}, **key("anna-secret")
        )
        server.wait_for_requests(1)
        body = {"prompt": "x" * 20, "n": n, "max_tokens": 1}
        refused = server.post(COMPLETIONS, body, **key("anna-secret")).json()["error"]
        assert refused["code"] == "queue_full"
        assert "64 sequences are waiting, 64 of them of this API key" in refused["message"]
        late = threads.submit(server.post, COMPLETIONS, body, **key("bert-secret"))
        server.wait_for_requests(2)
        server.worker.go_on()
        assert (greedy.result().status_code, late.result().status_code) == (200, 200)


def test_shares_of_the_queue() -> None:
    waiting = Waiting("sequences", "max_queued_sequences", 100)
    waiting.check_room(1000, "a")  # nothing waits
    waiting.add(1000, "a")
    waiting.check_room(50, "b")
    waiting.add(50, "b")
    with pytest.raises(QueueFullError, match="1050 sequences are waiting, 50 of them of this API key"):
        waiting.check_room(1, "b")
    waiting.check_room(33, "c")
    with pytest.raises(QueueFullError, match="the 34 of this request would exceed its share"):
        waiting.check_room(34, "c")
    waiting.add(-1000, "a")
    waiting.check_room(50, "b")
    none = Waiting("prompt tokens", "max_queued_tokens", None)
    none.add(1000, "a")
    none.check_room(1000, "a")


def test_the_worker_is_told_whose_a_request_is(start_server: StartServer) -> None:
    with start_server(api_keys=KEYS) as server:
        body = {"prompt": "x", "max_tokens": 1}
        assert server.post(COMPLETIONS, body, **key("bert-secret")).status_code == 200
        (line,) = generates(server)
        assert "tenant='key-1'" in line
        assert "secret" not in line


def test_fair_share() -> None:
    share = FairShare()
    assert [share.tag("a", 100), share.tag("a", 1), share.tag("b", 1), share.tag("b", 1)] == [100, 101, 1, 2]
    share.started(100, 100)
    share.started(101, 1)
    # What a had is served: c, which comes now, does not go before all that b waits for.
    assert share.tag("c", 1) == 101
    share.reset()
    assert share.tag("b", 1) == 1


def test_priority_needs_the_setting(start_server: StartServer, server: RunningServer) -> None:
    error = refused(server, COMPLETIONS, {"prompt": "x", "priority": -1})
    assert (error["code"], error["param"]) == ("unsupported_parameter", "priority")
    assert "allow_priority" in error["message"]
    assert server.post(COMPLETIONS, {"prompt": "x", "priority": 0, "max_tokens": 1}).status_code == 200
    with start_server(allow_priority=True) as allowing:
        body = {"prompt": "x", "priority": -1, "max_tokens": 1}
        assert allowing.post(COMPLETIONS, body).status_code == 200
        assert "priority=-1," in generates(allowing)[0]


def cached_tokens(server: RunningServer, name: str, **fields: Any) -> int:
    body = {"prompt": "x" * 64, "max_tokens": 1} | fields
    usage = server.post(COMPLETIONS, body, **key(name)).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_keys_do_not_see_each_others_prefixes(start_server: StartServer) -> None:
    with start_server(api_keys=KEYS) as server:
        assert cached_tokens(server, "anna-secret") == 0
        assert cached_tokens(server, "bert-secret") == 0
        assert cached_tokens(server, "anna-secret") > 0
        assert cached_tokens(server, "bert-secret") > 0
        # A salt cannot reach into another key's prefixes.
        assert cached_tokens(server, "bert-secret", cache_salt="key-0/") == 0
        assert not any(name in "".join(generates(server)) for name in KEYS)
    with start_server(api_keys=KEYS, share_prefixes=True) as server:
        assert cached_tokens(server, "anna-secret") == 0
        assert cached_tokens(server, "bert-secret") > 0

"""What requests cost before the engine has them: bounded, fair between keys, given up with the request."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.conftest import StartServer
from tests.server.refusals import CHAT, COMPLETIONS
from tests.server.running import MODEL, RunningServer, wait_for
from truedraft.engine.text.abandoned import AbandonedError, stop_if_abandoned
from truedraft.server.errors import QueueFullError
from truedraft.server.http import json_route
from truedraft.server.http.body_limit import HeldBodies
from truedraft.server.text.grammar.validator import GrammarValidator
from truedraft.server.text.template_process import template_process
from truedraft.server.text.tokenizer import Tokenizer
from truedraft.server.turns import Turns

KEYS = ["anna-secret", "bert-secret"]
ANNA, BERT = ({"authorization": f"Bearer {key}"} for key in KEYS)
LONG = "x" * 3000  # more than is tokenized on the event loop
LONG_SECONDS = 10_000.0


class Encoder:
    """Holds up the tokenizer, in threads, for texts that begin with ``slow``."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.go_on = threading.Event()
        encode = tokenizer.encode

        def slow(text: str, *, add_special_tokens: bool) -> list[int]:
            self.seen.append(text[:8])
            if text.startswith("slow"):
                self.go_on.wait()
            return encode(text, add_special_tokens=add_special_tokens)

        monkeypatch.setattr(tokenizer, "encode", slow)

    def wait_for(self, number: int) -> None:
        wait_for(lambda: len(self.seen) >= number, f"{number} texts")


@pytest.fixture
def encoder(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoder]:
    made = Encoder(tokenizer, monkeypatch)
    yield made
    made.go_on.set()


@contextmanager
def sending(server: RunningServer, path: str, *lines: str, sent: int = 10) -> Iterator[socket.socket]:
    """A request of which only the beginning comes."""
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines]
    head += ["Content-Length: 100000", "", ""]
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall("\r\n".join(head).encode() + b" " * sent)
        yield connection


def is_idle(server: RunningServer) -> bool:
    turns = server.services.work.turns
    return (turns.num_at_work, turns.weight_at_work, turns.num_waiting) == (0, 0, 0)


@pytest.mark.parametrize(
    ("path", "fields"), [("/tokenize", {}), (COMPLETIONS, {"truncate_prompt_tokens": 4, "max_tokens": 1})]
)
def test_small_texts_do_not_wait_for_large_ones(
    start_server: StartServer, encoder: Encoder, path: str, fields: dict[str, Any]
) -> None:
    """One large one is at work, another waits; both take all of the memory."""
    with start_server(work_memory=4 << 20) as server, ThreadPoolExecutor() as threads:
        large = [threads.submit(server.post, path, fields | {"prompt": f"slow{LONG * 6}"}) for _ in range(2)]
        encoder.wait_for(1)
        wait_for(lambda: server.services.work.turns.num_waiting == 1, "the other")
        assert server.post(path, fields | {"prompt": LONG[:2500]}).status_code == 200
        assert encoder.seen.count("slowxxxx") == 1
        encoder.go_on.set()
        assert [future.result().status_code for future in large] == [200, 200]
        wait_for(lambda: is_idle(server), "the end of all work")


def test_nothing_is_done_for_clients_that_left(start_server: StartServer, encoder: Encoder) -> None:
    with start_server(work_memory=4 << 20) as server, ThreadPoolExecutor() as threads:
        first = threads.submit(server.post, "/tokenize", {"prompt": f"slow{LONG * 6}"})
        encoder.wait_for(1)
        with server.unanswered("/tokenize", {"prompt": f"left{LONG * 6}"}):
            wait_for(lambda: server.services.work.turns.num_waiting == 1, "the other")
        wait_for(lambda: server.services.work.turns.num_waiting == 0, "its leaving")
        encoder.go_on.set()
        assert first.result().status_code == 200
        wait_for(lambda: is_idle(server), "the end of all work")
        assert "leftxxxx" not in encoder.seen


def test_too_much_that_waits_is_refused(start_server: StartServer, encoder: Encoder) -> None:
    settings: dict[str, Any] = {"work_memory": 4 << 20, "max_queued_sequences": 1}
    with start_server(**settings) as server, ThreadPoolExecutor() as threads:
        body = {"prompt": f"slow{LONG * 6}"}
        waiting = [threads.submit(server.post, "/tokenize", body)]
        encoder.wait_for(1)
        waiting.append(threads.submit(server.post, "/tokenize", body))
        wait_for(lambda: server.services.work.turns.num_waiting == 1, "the other")
        response = server.post("/tokenize", body)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert response.json()["error"]["code"] == "queue_full"
        encoder.go_on.set()
        assert [future.result().status_code for future in waiting] == [200, 200]


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize", CHAT])
def test_the_deadline_covers_tokenizing(
    start_server: StartServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    go_on, seen = threading.Event(), []

    def hang(text: str, *, add_special_tokens: bool) -> list[int]:
        seen.append(text)
        go_on.wait()
        return [1]

    monkeypatch.setattr(tokenizer, "encode", hang)
    with start_server(request_timeout=LONG_SECONDS) as server, ThreadPoolExecutor() as threads:
        chat = {"messages": [{"role": "user", "content": LONG}]}
        answer = threads.submit(server.post, path, chat if path == CHAT else {"prompt": LONG})
        wait_for(lambda: bool(seen), "the tokenizer")
        server.pass_time(LONG_SECONDS + 1)
        response = answer.result()
        assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
        go_on.set()
        wait_for(lambda: is_idle(server), "the end of all work")


def test_the_deadline_covers_grammars(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    async def hang(*_: object) -> str:
        asked.set()
        return await server.loop.create_future()  # type: ignore[no-any-return]

    monkeypatch.setattr(GrammarValidator, "_ask", hang)
    with start_server(request_timeout=LONG_SECONDS) as server, ThreadPoolExecutor() as threads:
        body = {"prompt": "x", "structured_outputs": {"regex": "a"}}
        answer = threads.submit(server.post, COMPLETIONS, body)
        asked.wait()
        server.pass_time(LONG_SECONDS + 1)
        assert answer.result().status_code == 504
        # A client that leaves is noticed there, too.
        asked.clear()
        with server.unanswered(COMPLETIONS, body):
            asked.wait()
            assert server.services.grammar_validator._turns.num_at_work == 1
        wait_for(lambda: server.services.grammar_validator._turns.num_at_work == 0, "its end")


def test_the_deadline_counts_from_the_request(start_server: StartServer, encoder: Encoder) -> None:
    """What was spent before the engine had it is not given again."""
    with start_server(request_timeout=LONG_SECONDS) as server, ThreadPoolExecutor() as threads:
        server.worker.at_most(0)
        answer = threads.submit(server.post, COMPLETIONS, {"prompt": f"slow{LONG[:300]}", "user": LONG})
        encoder.wait_for(1)
        server.pass_time(LONG_SECONDS - 100)
        encoder.go_on.set()
        server.wait_for_requests(1)
        server.pass_time(101)
        assert answer.result().status_code == 504
        assert server.metric("truedraft_requests_aborted_total", reason="timeout") == 1


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", COMPLETIONS, CHAT])
def test_a_key_has_so_many_requests_open_from_the_first_byte(start_server: StartServer, path: str) -> None:
    with start_server(api_keys=KEYS, max_concurrent_per_key=1) as server:
        refused = partial_status(server, ANNA)
        own = (f"Authorization: {ANNA['authorization']}", "Expect: 100-continue")
        with sending(server, path, *own) as connection:
            assert b"100 Continue" in connection.recv(100)  # its body is being read
            assert refused() == 429
            response = server.post("/tokenize", {"prompt": "x"}, headers=ANNA)
            assert response.json()["error"]["code"] == "too_many_requests"
            assert response.headers["retry-after"] == "1"
            assert server.post("/tokenize", {"prompt": "x"}, headers=BERT).status_code == 200
            assert server.get("/v1/models", headers=ANNA).status_code == 200
        wait_for(lambda: refused() == 200, "room")


def partial_status(server: RunningServer, headers: dict[str, str]) -> Any:
    return lambda: server.post("/tokenize", {"prompt": "x"}, headers=headers).status_code


def test_bodies_of_open_requests_are_limited(start_server: StartServer) -> None:
    with start_server(max_held_bodies=10_000) as server:
        server.worker.at_most(0)
        with server.unanswered(COMPLETIONS, {"prompt": "x", "user": "x" * 8000}):
            server.wait_for_requests(1)
            response = server.post(COMPLETIONS, {"prompt": "x", "user": "x" * 3000})
            assert (response.status_code, response.headers["retry-after"]) == (429, "1")
            assert "max_held_bodies" in response.json()["error"]["message"]
            assert server.post("/tokenize", {"prompt": "x"}).status_code == 200
        server.wait_for_requests(0)
        large = {"prompt": "x", "user": "x" * 20_000}  # goes alone, whatever the limit
        wait_for(lambda: server.post("/tokenize", {"prompt": "x" * 15_000}).status_code == 200, "room")
        server.worker.go_on()
        assert server.post(COMPLETIONS, large | {"max_tokens": 1}).status_code == 200


def test_each_key_has_its_share_of_bodies() -> None:
    held = HeldBodies(100)
    held.hold(90, "a")
    with pytest.raises(QueueFullError):
        held.hold(20, "a")
    held.hold(50, "b")  # its share, whatever the other has
    with pytest.raises(QueueFullError):
        held.hold(1, "b")
    with pytest.raises(QueueFullError):
        held.hold(1, "a")
    held.let_go(90, "a")
    held.hold(50, "b")
    assert held.num_bytes == 100
    held.let_go(100, "b")
    assert held.num_bytes == 0


def test_a_body_that_is_refused_holds_nothing(start_server: StartServer) -> None:
    with start_server(max_body_size=1000) as server:
        content = json.dumps({"model": MODEL, "prompt": "x" * 2000})
        for _ in range(3):
            response = server.client.post(
                COMPLETIONS, content=iter([content.encode()]), headers={"content-type": "application/json"}
            )
            assert response.status_code == 413
        assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_one_keys_work_leaves_a_thread_to_others(start_server: StartServer, encoder: Encoder) -> None:
    """One key has sent more large texts than there are threads; another one's chat needs several turns."""
    with start_server(api_keys=KEYS) as server, ThreadPoolExecutor(40) as threads:
        number = server.services.work.num_threads
        body = {"prompt": f"slow{LONG}"}
        held = [threads.submit(server.post, "/tokenize", body, headers=ANNA) for _ in range(number + 2)]
        encoder.wait_for(number - 1)
        wait_for(lambda: server.services.work.turns.num_waiting == 3, "the others")
        chat = {"messages": [{"role": "user", "content": "x"}], "user": LONG, "max_tokens": 1}
        answer = server.post(CHAT, chat, headers=BERT)
        num_begun = encoder.seen.count("slowxxxx")
        encoder.go_on.set()
        assert (answer.status_code, num_begun) == (200, number - 1)
        assert {future.result().status_code for future in held} == {200}
        wait_for(lambda: is_idle(server), "the end of all work")


def test_what_is_begun_counts_for_its_key_until_it_ends(start_server: StartServer, encoder: Encoder) -> None:
    with start_server(api_keys=KEYS, max_concurrent_per_key=1) as server:
        body = {"prompt": f"slow{LONG}"}
        with pytest.raises(httpx.ReadTimeout):
            server.post("/tokenize", body, headers=ANNA, timeout=0.5)
        encoder.wait_for(1)
        wait_for(lambda: server.services.work.num_abandoned("key-0") == 1, "its leaving")
        small = {"prompt": "x"}
        refusal = server.post("/tokenize", small, headers=ANNA)
        assert refusal.json()["error"]["code"] == "too_many_requests"
        assert "until what was begun for them has ended" in refusal.json()["error"]["message"]
        assert server.post("/tokenize", small, headers=BERT).status_code == 200
        encoder.go_on.set()
        wait_for(lambda: server.post("/tokenize", small, headers=ANNA).status_code == 200, "its end")


def test_abandoned_work_can_find_out(start_server: StartServer, tokenizer: Tokenizer) -> None:
    began, ended = threading.Event(), threading.Event()

    def endless(text: str, **_: Any) -> list[int]:
        began.set()
        try:
            while True:
                stop_if_abandoned()
        except AbandonedError:
            ended.set()
            raise

    with pytest.MonkeyPatch.context() as patch, start_server() as server:
        patch.setattr(tokenizer, "encode", endless)
        with server.unanswered("/tokenize", {"prompt": LONG}):
            wait_for(began.is_set, "its begin")
            assert not ended.is_set()
        wait_for(ended.is_set, "its end")
        wait_for(lambda: is_idle(server), "the end of all work")


@pytest.mark.parametrize("stage", ["turn", "template", "tokenize", "grammar", "parse"])
def test_time_before_the_engine_is_seen(
    start_server: StartServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """A stage takes long, by a clock that a test moves; all that is measured of the request tells so."""
    ahead = 0.0

    def late(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal ahead
            ahead += LONG_SECONDS
            return function(*args, **options)

        return call

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + ahead)
    for module in ("stages", "observability.metrics", "observability.access_log", "http.protocol"):
        monkeypatch.setattr(f"truedraft.server.{module}.time", clock)
    monkeypatch.setattr("truedraft.server.http.json_route.time", clock)
    places: dict[str, tuple[Any, str]] = {
        "turn": (Turns, "begin"),
        "template": (template_process(), "ask"),
        "tokenize": (tokenizer, "_fast"),
        "grammar": (GrammarValidator, "error_of"),
        "parse": (json_route, "parse_json"),
    }
    with start_server() as server:
        owner, name = places[stage]
        honest = getattr(owner, name)
        if stage == "tokenize":  # the object is needed as it is by all but this call

            def encode_batch(*args: Any, **options: Any) -> Any:
                monkeypatch.setattr(owner, name, honest)
                return late(honest.encode_batch)(*args, **options)

            monkeypatch.setattr(owner, name, SimpleNamespace(encode_batch=encode_batch))
        else:
            monkeypatch.setattr(owner, name, late(honest))
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        if stage == "grammar":
            body["structured_outputs"] = {"regex": "a+"}
        assert server.post(CHAT, body).status_code == 200
        server.wait_until_idle()
        for metric in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
            assert server.metric(f"truedraft_{metric}_sum") >= LONG_SECONDS, metric
        assert server.metric("truedraft_request_prefill_time_seconds_sum") < LONG_SECONDS
        times = {
            each: server.metric("truedraft_request_stage_seconds_sum", stage=each)
            for each in ("body", "parse", "turn", "template", "tokenize", "grammar")
        }
        assert [each for each, seconds in times.items() if seconds >= LONG_SECONDS] == [stage]


def test_the_clock_starts_with_the_first_byte(server: RunningServer) -> None:
    """Its client's clock starts before, and ends after the server's own."""
    before = server.metric("truedraft_time_to_first_token_seconds_sum")
    content = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        asked = time.perf_counter()
        connection.sendall(head.encode())
        time.sleep(0.3)  # a client that is slow with its body waits for itself, which counts
        connection.sendall(f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        assert connection.recv(65536)
        took = time.perf_counter() - asked
    server.wait_until_idle()
    assert 0.3 <= server.metric("truedraft_time_to_first_token_seconds_sum") - before <= took


def test_what_the_front_end_holds_is_counted(start_server: StartServer, encoder: Encoder) -> None:
    with start_server(work_memory=4 << 20) as server, ThreadPoolExecutor() as threads:
        body = {"prompt": f"slow{LONG * 6}"}
        held = [threads.submit(server.post, "/tokenize", body) for _ in range(2)]
        encoder.wait_for(1)
        wait_for(lambda: server.metric("truedraft_num_requests_waiting_for_turn") == 1, "the other")
        assert server.metric("truedraft_held_body_bytes") > 2 * len(LONG * 6)
        encoder.go_on.set()
        assert {future.result().status_code for future in held} == {200}
        wait_for(lambda: server.metric("truedraft_held_body_bytes") == 0, "the end")

"""Several models in one server, by HTTP: who is loaded when, what clients see meanwhile, and who may ask."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.several import SeveralServer, progress, run_several
from truedraft.engine.errors import ConfigError
from truedraft.engine.hub.fetch import Tell
from truedraft.server.cli.settings_sources import load_settings
from truedraft.server.models import registry
from truedraft.server.routes import waiting
from truedraft.server.text.tokenizer import Tokenizer

Start = Callable[..., AbstractContextManager[SeveralServer]]


@pytest.fixture
def start(model_folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> Start:
    return partial(run_several, model_folder, tokenizer, tmp_path)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@contextmanager
def held(server: SeveralServer, name: str) -> Iterator[None]:
    """Keeps the load of a model from ending."""
    server.orders[name].die()
    try:
        yield
    finally:
        server.orders[name].go_on()


@contextmanager
def busy(server: SeveralServer, threads: ThreadPoolExecutor, name: str) -> Iterator["Future[httpx.Response]"]:
    """A request of the model runs from begin to end; its answer comes after that."""
    server.complete(name)
    server.orders[name].at_most(0)
    answer = threads.submit(server.complete, name)
    server.wait_for_requests(name, 1)
    try:
        yield answer
    finally:
        server.orders[name].go_on()


def code(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])


def test_a_request_loads_its_model(start: Start) -> None:
    with start(idle_unload=100) as server:
        assert server.states() == {"a": "unloaded", "b": "unloaded", "c": "unloaded"}
        assert server.get("/ready").json() == {"status": "ready"}
        for name in "ab":
            answer = server.complete(name)
            assert (answer.status_code, answer.json()["model"]) == (200, name)
            assert server.metric("truedraft_generation_tokens_total", model_name=name) == 4
        assert server.states() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        assert server.metric("truedraft_model_loaded") == 2
        assert server.metric("truedraft_model_loads_total", model_name="a") == 1
        assert "Generate" in server.logs["a"].read_text()
        assert {worker["model"] for worker in server.get("/health").json()["workers"]} == {"a", "b"}
        assert server.get("/speculation?model=b").json()["proposer"] == "draft_model"
        assert server.get("/speculation?model=c").json()["proposer"] is None
        assert server.get("/version?model=b").json()["device"] == "cpu"
        assert code(server.get("/ready?model=d")) == "model_not_found"
        assert code(server.complete("d")) == "model_not_found"
        assert code(server.post("/tokenize", {"prompt": "x"})) == "missing_required_parameter"
        assert code(server.get("/speculation")) == "missing_required_parameter"
        assert server.post("/tokenize", {"prompt": "x", "model": "a"}).status_code == 200
        server.pass_time(100)
        server.wait_for_state("a", "unloaded")
        server.wait_for_state("b", "unloaded")
        assert server.complete("a").status_code == 200
        # What was counted before the load counts on.
        assert server.metric("truedraft_generation_tokens_total", model_name="a") == 8
        assert server.starts == ["a", "b", "a"]


def test_what_asks_for_the_same_model_loads_it_once(start: Start, threads: ThreadPoolExecutor) -> None:
    with start() as server, held(server, "b"):
        answers = [threads.submit(server.complete, "b") for _ in range(3)]
        server.wait_for_waiting("b", 3)
        server.wait_for_state("b", "loading")
        assert server.complete("a").status_code == 200  # meanwhile
        server.orders["b"].go_on()
        assert [answer.result().status_code for answer in answers] == [200] * 3
        assert server.starts.count("b") == 1


def test_what_requests_use_makes_no_room(start: Start, threads: ThreadPoolExecutor) -> None:
    with start(max_loaded_models=2) as server:
        server.complete("b")
        with busy(server, threads, "a") as answer:
            assert server.complete("c").status_code == 200
            assert server.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert answer.result().status_code == 200
        # Nothing is idle: the request for b waits until one of them is.
        with busy(server, threads, "a") as first, busy(server, threads, "c") as second:
            other = threads.submit(server.complete, "b")
            server.wait_for_waiting("b", 1)
            server.orders["c"].go_on()
            assert second.result().status_code == 200
            assert other.result().status_code == 200
            assert server.states() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        assert first.result().status_code == 200


def test_a_failed_load_leaves_the_others_alone(start: Start, threads: ThreadPoolExecutor) -> None:
    options = {"b": ("--fail-at-start", "The weights are broken.")}
    with start(options=options) as server, busy(server, threads, "a") as answer:
        refused = server.complete("b")
        assert (refused.status_code, code(refused)) == (503, "model_load_failed")
        assert "The weights are broken" in refused.text
        assert refused.headers["retry-after"] == "30"
        assert code(server.complete("b")) == "model_load_failed"
        assert server.starts.count("b") == 1  # it is not tried again at once
        assert server.states()["b"] == "failed"
        assert server.get("/ready?model=b").status_code == 503
        server.orders["a"].go_on()
        assert answer.result().status_code == 200
        server.pass_time(registry.RETRY_SECONDS)
        assert code(server.complete("b")) == "model_load_failed"
        assert code(server.post("/models/load", {"model": "b"})) == "model_load_failed"
        assert server.starts.count("b") == 3


def test_the_death_of_a_worker_disturbs_no_other_model(start: Start, threads: ThreadPoolExecutor) -> None:
    with start() as server:
        server.complete("b")
        with busy(server, threads, "a") as answer:
            server.orders["b"].die()
            server.wait_for_state("b", "restarting")
            assert code(server.complete("b")) == "not_ready"
            server.orders["a"].go_on()
            assert answer.result().status_code == 200
            server.orders["b"].go_on()
            server.wait_for_state("b", "loaded")
        assert server.complete("b").status_code == 200
        assert server.metric("truedraft_worker_restarts_total", model_name="b") == 1
        assert server.metric("truedraft_worker_restarts_total", model_name="a") == 0


def test_nobody_waits_for_ever(start: Start, threads: ThreadPoolExecutor) -> None:
    with start(load_timeout=50) as server, held(server, "a"):
        answer = threads.submit(server.complete, "a")
        server.wait_for_waiting("a", 1)
        server.wait_for_state("a", "loading")
        server.pass_time(50)
        refused = answer.result()
        assert (refused.status_code, code(refused)) == (503, "not_ready")
        assert "50 s (load_timeout)" in refused.text
        server.orders["a"].go_on()  # the load has gone on
        server.wait_for_state("a", "loaded")
        assert server.starts == ["a"]


def test_the_end_of_the_server_ends_the_waiting(start: Start, threads: ThreadPoolExecutor) -> None:
    with start() as server, held(server, "a"):
        answer = threads.submit(server.complete, "a")
        server.wait_for_waiting("a", 1)
        server.loop.call_soon_threadsafe(server.services.models.abandon)
        assert code(answer.result()) == "shutting_down"


def test_memory_is_counted_before_a_load(start: Start) -> None:
    """Before their first load the models are estimated at 600 MiB; the workers say that they take 100."""
    options = {name: ("--worker-bytes", str(100 << 20)) for name in "abc"}
    with start(options=options, total=750 << 20, cache_memory="100MiB", device="cpu") as server:
        for name in "abc":
            assert server.complete(name).status_code == 200
        assert server.states() == {"a": "unloaded", "b": "loaded", "c": "loaded"}
        assert server.complete("a").status_code == 200  # whose size is known now
        assert server.states() == {"a": "loaded", "b": "loaded", "c": "loaded"}
    with start(
        options=options, total=650 << 20, cache_memory="100MiB", device="cpu", pinned=("a",)
    ) as server:
        server.wait_for_state("a", "loaded")
        refused = server.complete("b")
        assert code(refused) == "model_load_failed"
        assert "may take 600.0MiB" in refused.text
        assert server.states() == {"a": "loaded", "b": "unloaded", "c": "unloaded"}


def test_unload_and_load_by_call(start: Start, threads: ThreadPoolExecutor) -> None:
    with start(drain_timeout=20) as server:
        assert server.post("/models/load", {"model": "a"}).json() == {"success": True}
        assert server.states()["a"] == "loaded"
        with busy(server, threads, "a") as answer:
            unloaded = threads.submit(server.post, "/models/unload", {"model": "a"})
            use = server.services.models._uses[server.model("a")]
            while not use.leaves:
                pass
            late = threads.submit(server.complete, "a")
            server.wait_for_waiting("a", 1)
            server.orders["a"].go_on()
            # What runs is finished, what comes meanwhile waits for the next load.
            assert answer.result().status_code == 200
            assert unloaded.result().json() == {"success": True}
            assert late.result().status_code == 200
        assert server.starts == ["a", "a"]
        with busy(server, threads, "a") as answer:
            unloaded = threads.submit(server.post, "/models/unload", {"model": "a"})
            while not use.leaves:
                pass
            server.pass_time(20)
            refused = unloaded.result()
            assert (refused.status_code, code(refused)) == (409, "model_busy")
            assert server.states()["a"] == "loaded"
        assert answer.result().status_code == 200
        assert server.post("/models/unload", {"model": "a"}).json() == {"success": True}
        assert server.post("/models/unload", {"model": "a"}).json() == {"success": True}
        assert server.states()["a"] == "unloaded"
        assert server.post("/models/load", {"model": "a", "x": 1}).status_code == 400


def test_sleep(start: Start) -> None:
    with start() as server:
        server.complete("a")
        assert server.get("/is_sleeping?model=a").json() == {"is_sleeping": False}
        assert server.client.post("/sleep?model=a&level=1").json() == {"success": True}
        assert server.get("/is_sleeping?model=a").json() == {"is_sleeping": True}
        refused = server.complete("a")
        assert (refused.status_code, code(refused)) == (503, "not_ready")
        assert "wake_up" in refused.text
        assert server.get("/ready?model=a").json()["status"] == "sleeping"
        assert server.complete("b").status_code == 200
        assert code(server.client.post("/wake_up?model=a&tags=weights")) == "unsupported_parameter"
        assert server.client.post("/wake_up?model=a").json() == {"success": True}
        assert server.complete("a").status_code == 200
        assert server.client.post("/sleep?model=a&level=3").status_code == 400


def events_of(server: SeveralServer, until: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the events up to the one that is waited for."""
    found = []
    with server.client.stream("GET", "/models/events") as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                if (
                    found[-1]["model"] == until["model"]
                    and found[-1]["status"].items() >= until["status"].items()
                ):
                    break
    return found


def test_a_fetch_is_a_state(start: Start, threads: ThreadPoolExecutor) -> None:
    goes_on = threading.Event()

    def fetch(tell: Tell) -> None:
        tell(progress(40))
        assert goes_on.wait(300)

    def broken(tell: Tell) -> None:
        raise OSError("/secret is full")

    with start(fetches={"a": fetch, "b": broken}, pinned=("a",)) as server:
        half = {"model": "a", "status": {"value": "downloading", "bytes": 40, "total_bytes": 100}}
        events_of(server, half)
        assert server.get("/health").status_code == 200
        ready = server.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "fetching")
        assert "40 bytes of 100 bytes" in ready.json()["reason"]
        refused = server.complete("b")
        assert code(refused) == "model_load_failed"
        assert "secret" not in refused.text
        answer = threads.submit(server.complete, "a")
        server.wait_for_waiting("a", 1)
        goes_on.set()
        assert answer.result().status_code == 200
        events_of(server, {"model": "a", "status": {"value": "loaded"}})


STREAMS = {
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/v1/responses": {"input": "x", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
}
ENDS = {"/v1/responses": "response.incomplete", "/v1/messages": "message_stop"}


@pytest.mark.parametrize("path", STREAMS)
def test_streams_that_wait_are_kept_open(start: Start, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PING_SECONDS", 0.05)
    body = {**STREAMS[path], "model": "a", "stream": True, "unheard_of": 1}
    with start() as server, held(server, "a"), server.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert next(lines).startswith(": ping")
        server.orders["a"].go_on()
        rest = list(lines)
    assert ENDS.get(path, "[DONE]") in "".join(rest)
    assert ": x-truedraft-ignored: unheard_of" in rest


@pytest.mark.parametrize("path", STREAMS)
def test_a_load_that_fails_ends_the_stream(start: Start, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PING_SECONDS", 0.05)
    goes_on = threading.Event()

    def fetch(tell: Tell) -> None:
        assert goes_on.wait(300)
        raise OSError("broken")

    body = {**STREAMS[path], "model": "a", "stream": True}
    with start(fetches={"a": fetch}) as server, server.client.stream("POST", path, json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith(": ping")
        goes_on.set()
        rest = "".join(lines)
        assert "could not be loaded" in rest
        assert ("[DONE]" in rest) == (path not in ENDS)
        assert server.metric("truedraft_request_errors_total", code="model_load_failed") == 1


def test_a_client_that_leaves_gives_its_model_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PING_SECONDS", 0.05)
    body = {**STREAMS["/v1/completions"], "model": "a", "stream": True, "max_tokens": 400}
    with start(max_loaded_models=1) as server:
        with held(server, "a"), server.client.stream("POST", "/v1/completions", json=body) as response:
            assert next(response.iter_lines()).startswith(": ping")
        server.wait_for_waiting("a", 0)
        server.wait_for_state("a", "loaded")
        assert server.complete("b").status_code == 200  # since a has made room
        with server.client.stream("POST", "/v1/completions", json=body | {"model": "b"}) as response:
            next(response.iter_lines())
        assert server.complete("a").status_code == 200


def test_rights_of_keys(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the team\nadmin operate\nonly-a models=a\n  boss models=b,c operate\n")

    def of(key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    with start(api_keys="plain", api_key_file=str(keys)) as server:

        def listed(key: str) -> list[str]:
            return [card["id"] for card in server.get("/v1/models", headers=of(key)).json()["data"]]

        assert [listed(key) for key in ("plain", "only-a", "boss")] == [["a", "b", "c"], ["a"], ["b", "c"]]
        body = {"prompt": "x", "max_tokens": 1}
        refused = server.post("/v1/completions", body | {"model": "b"}, headers=of("only-a"))
        assert (refused.status_code, code(refused)) == (404, "model_not_found")
        assert "has 'a'." in refused.text
        assert server.post("/v1/completions", body | {"model": "a"}, headers=of("only-a")).status_code == 200
        # Without a name the one model that it may use is meant.
        assert server.post("/tokenize", {"prompt": "x"}, headers=of("only-a")).status_code == 200
        assert server.get("/v1/models/b", headers=of("only-a")).status_code == 404
        for key, name, status in (
            ("plain", "a", 403),
            ("only-a", "a", 403),
            ("only-a", "b", 404),
            ("boss", "b", 200),
            ("boss", "a", 404),
            ("admin", "a", 200),
        ):
            for path in ("/models/load", "/models/unload"):
                answer = server.post(path, {"model": name}, headers=of(key))
                assert answer.status_code == status, (key, name)
        assert server.client.post("/sleep?model=a", headers=of("plain")).status_code == 403
        for key, name, status in (("plain", "a", 403), ("boss", "a", 404), ("boss", "b", 200)):
            answer = server.client.post(f"/prefix_cache/clear?model={name}", headers=of(key))
            assert answer.status_code == status, key
        assert server.client.post("/prefix_cache/clear", headers=of("admin")).status_code == 400
        assert server.post("/models/load", {"model": "a"}).status_code == 401


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("key operat", "'operat' after a key is neither"),
        ("key models=", "names no model"),
        ("key models=nobody", "there is no model nobody; this server has"),
    ],
)
def test_rights_are_checked_at_start(tmp_path: Path, lines: str, message: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text(lines)
    with pytest.raises(ConfigError, match=message):
        load_settings(["truedraft-demo", "other/model", "--api-key-file", str(keys)])

"""Life with a worker process: disconnects, crashes, restarts, failed loads, and exact metrics."""

import asyncio
import json
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import Mock

import httpx
import openai
import pytest
from msgspec import structs

from tests.fake_worker import QUEUE_SECONDS
from tests.faults.shutdown_orders import READY
from tests.server.conftest import StartServer
from tests.server.running import MODEL, TIMEOUT_SECONDS, RunningServer, fake_worker_app, wait_for
from tests.server.serve_process import ROOT
from tests.server.virtual_time import in_virtual_time
from tests.server.wire import events
from truedraft.engine.config import EngineConfig
from truedraft.engine.messages import WEIGHTS_CHANGED, Failed
from truedraft.server.errors import error_codes
from truedraft.server.observability.metrics import WorkerMetrics
from truedraft.server.text.tokenizer import Tokenizer
from truedraft.server.workers import worker_client
from truedraft.server.workers.worker_client import WorkerClient

COMPLETIONS = "/v1/completions"


def test_client_that_leaves_a_stream_frees_its_sequences(start_server: StartServer) -> None:
    with start_server() as server:
        server.worker.at_most(1)
        body = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "max_tokens": 500, "stream": True}
        with server.client.stream("POST", COMPLETIONS, json=body) as response:
            next(response.iter_lines())
        server.wait_for_messages("Abort", 2)
        server.wait_for_requests(0)
        aborted = partial(server.metric, "truedraft_requests_aborted_total", reason="disconnect")
        wait_for(lambda: aborted() == 1, "the count")
        usage = partial(server.metric, "truedraft_kv_cache_usage_perc")
        wait_for(lambda: usage() == 0, "the worker's word that nothing is in use")
        assert server.metric("truedraft_num_requests_running") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_does_not_wait_frees_its_sequences(start_server: StartServer, stream: bool) -> None:
    with start_server() as server:
        server.worker.at_most(0)
        with server.unanswered(COMPLETIONS, {"prompt": "a", "max_tokens": 500, "stream": stream}):
            server.wait_for_messages("Generate", 1)
        server.wait_for_messages("Abort", 1)
        wait_for(lambda: server.engine.num_requests == 0, "the request's end")


def test_stop_string_aborts_its_sequence_only(start_server: StartServer) -> None:
    with start_server() as server:
        server.worker.at_most(4)
        server.post(COMPLETIONS, {"prompt": "a", "n": 2, "max_tokens": 400, "stop": "wörld"})
        aborts = sorted(server.wait_for_messages("Abort", 2))
        assert ["index=0" in aborts[0], "index=1" in aborts[1]] == [True, True]


def test_crash_gives_an_error_and_a_new_worker(start_server: StartServer) -> None:
    with start_server() as server, ThreadPoolExecutor() as threads:
        server.worker.at_most(10)
        lost = threads.submit(server.post, COMPLETIONS, {"prompt": "a", "max_tokens": 100})
        server.wait_for_tokens(40)
        server.worker.die()
        response = lost.result()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "worker_lost"
        assert "exited with code 7" in response.json()["error"]["message"]
        not_ready = server.get("/ready")
        assert not_ready.status_code == 503
        assert not_ready.json()["status"] == "restarting"
        assert server.get("/health").status_code == 200
        refused = server.post(COMPLETIONS, {"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert refused.headers["retry-after"] == "2"
        server.worker.go_on()
        server.wait_until_ready()
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 100}).status_code == 200
        assert server.metric("truedraft_worker_restarts_total") == 1
        # 40 tokens before the crash and 100 after it, although the new worker counts from zero.
        assert server.metric("truedraft_generation_tokens_total") == 140
        drafts = server.metric("truedraft_spec_decode_num_drafts_total", method="draft_model")
        assert drafts == 140 / 4


def test_requests_without_a_token_go_to_the_next_worker(start_server: StartServer) -> None:
    """The first choice has had the worker's only step when it dies; the others have not begun."""
    with start_server("--max-running", "1") as server, ThreadPoolExecutor() as threads:
        server.worker.at_most(1)
        lost = threads.submit(server.post, COMPLETIONS, {"prompt": "a", "max_tokens": 100})
        server.wait_for_tokens(4)
        fields = {"prompt": ["b", "c"], "max_tokens": 20, "echo": True, "stream": True}
        kept = threads.submit(server.post, COMPLETIONS, fields)
        server.wait_for_messages("Generate", 3)
        with server.unanswered(COMPLETIONS, {"prompt": "d"}):
            server.wait_for_messages("Generate", 4)
            server.worker.die()
            assert lost.result().status_code == 503
            server.wait_for_requests(3)
        server.wait_for_requests(2)
        server.worker.go_on()
        assert kept.result().status_code == 200
        texts = ["", ""]
        for chunk in events(kept.result().text):
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert [text[:6] for text in texts] == ["bHello", "cHello"]
        prompts = [
            line.partition("prompt_token_ids=")[2][:4] for line in server.messages_to_worker("Generate")
        ]
        assert prompts == ["[97]", "[98]", "[99]", "[100", "[98]", "[99]"]
        assert server.metric("truedraft_worker_restarts_total") == 1


def test_request_that_kills_two_workers_is_not_tried_again(start_server: StartServer) -> None:
    with start_server("--crash-on", "[120]") as server:
        response = server.post(COMPLETIONS, {"prompt": "x"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_lost")
        assert len(server.messages_to_worker("Generate")) == 2
        server.wait_until_ready()
        assert server.post(COMPLETIONS, {"prompt": "y"}).status_code == 200


def test_crash_in_a_stream_is_an_event(start_server: StartServer) -> None:
    with start_server() as server, ThreadPoolExecutor() as threads:
        server.worker.at_most(10)
        body: dict[str, Any] = {"prompt": "a", "max_tokens": 100, "stream": True}
        answer = threads.submit(server.post, COMPLETIONS, body)
        server.wait_for_tokens(40)
        server.worker.die()
        response = answer.result()
        assert response.status_code == 200
        *_, error, done, end = response.text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "worker_lost"
        assert (done, end) == ("data: [DONE]", "")
        assert server.metric("truedraft_request_errors_total", code="worker_lost") == 1
        assert server.metric("truedraft_requests_aborted_total", reason="disconnect") == 0
        server.worker.go_on()
        server.wait_until_ready()


def test_sdk_sees_an_error_in_a_stream(start_server: StartServer) -> None:
    with (
        start_server() as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        server.worker.at_most(10)
        stream = sdk.completions.create(model=MODEL, prompt="a", max_tokens=100, stream=True)
        server.wait_for_tokens(40)
        server.worker.die()
        with pytest.raises(openai.APIError, match="exited with code 7"):
            list(stream)


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_of_the_engine_keeps_its_status(start_server: StartServer, stream: bool) -> None:
    with start_server("--refuse", "the prompt does not fit into the cache") as server:
        response = server.post(COMPLETIONS, {"prompt": ["a", "b"], "stream": stream})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "the prompt does not fit into the cache"
        assert server.engine.num_requests == 0


def test_port_is_open_while_the_models_load(start_server: StartServer) -> None:
    with start_server(wait=False) as server:
        assert server.get("/health").status_code == 200
        assert server.get("/ready").json() == {"status": "loading", "reason": "The models are loading."}
        assert server.metric("truedraft_ready") == 0
        assert server.post(COMPLETIONS, {"prompt": "a"}).status_code == 503
        server.worker.go_on()
        server.wait_until_ready()
        assert server.metric("truedraft_ready") == 1


async def test_a_tokenizer_that_loads_longer_than_the_worker(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    may_load = threading.Event()

    def load() -> Tokenizer:
        may_load.wait(TIMEOUT_SECONDS)
        return tokenizer

    app = fake_worker_app(model_folder, load)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        await app.state.services.models.first.engine.wait_until_ready()
        answer = await client.get("/ready")
        assert answer.status_code == 503
        assert answer.json() == {"status": "loading", "reason": "The tokenizer is loading."}
        gauge = 'truedraft_ready{model_name="tiny-model"}'
        assert f"{gauge} 0.0" in (await client.get("/metrics")).text
        may_load.set()
        await app.state.services.models.wait_until_ready()
        assert f"{gauge} 1.0" in (await client.get("/metrics")).text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--fail-at-start", "no such model"), "no such model"),
        (("--no-such-option",), "The worker exited with code 2 while loading; its own messages are above."),
    ],
)
def test_failed_load_is_told_and_not_repeated(
    start_server: StartServer, options: tuple[str, ...], reason: str
) -> None:
    with start_server(*options, wait=False) as server:
        wait_for(lambda: server.get("/ready").json()["status"] == "failed", "the failure")
        assert server.get("/ready").json()["reason"] == reason


@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_no_distribution_fail_their_request_only(
    start_server: StartServer, stream: bool
) -> None:
    options = ("--refuse", "the model gave no distribution", "--refusal-code", "invalid_logits")
    with start_server(*options) as server:
        response = server.post(COMPLETIONS, {"prompt": "a", "stream": stream})
        assert response.status_code == 500
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "invalid_logits")
        assert error["message"] == "the model gave no distribution"
        assert server.get("/ready").status_code == 200
        assert server.metric("truedraft_request_errors_total", code="invalid_logits") == 1


VLLM_NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    *(
        f"{name}_{part}"
        for name in (
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
        )
        for part in ("bucket", "sum", "count")
    ),
)
VLLM_LABELS = {
    "request_success_total": {"finished_reason": "length"},
    "spec_decode_num_accepted_tokens_per_pos_total": {"position": "0"},
}


def test_metrics_are_exact(start_server: StartServer) -> None:
    with start_server() as server:
        with server.one_step_at_a_time(40):
            server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 40})
        assert server.metric("truedraft_generation_tokens_total") == 40
        assert server.metric("truedraft_prompt_tokens_total") == 3
        assert server.metric("truedraft_request_success_total", finished_reason="length") == 1
        assert server.metric("truedraft_time_to_first_token_seconds_count") == 1
        assert server.metric("truedraft_request_queue_time_seconds_count") == 1
        assert server.metric("truedraft_request_queue_time_seconds_sum") == QUEUE_SECONDS
        assert server.metric("truedraft_e2e_request_latency_seconds_count") == 1
        latency = server.metric("truedraft_e2e_request_latency_seconds_sum")
        first = server.metric("truedraft_time_to_first_token_seconds_sum")
        decode = server.metric("truedraft_request_decode_time_seconds_sum")
        assert first + decode == pytest.approx(latency)
        prefill = server.metric("truedraft_request_prefill_time_seconds_sum")
        assert prefill == pytest.approx(max(0.0, first - QUEUE_SECONDS))
        # Ten rounds of four tokens: the first one has nothing before it.
        assert server.metric("truedraft_round_interval_seconds_count") == 9
        assert server.metric("truedraft_inter_token_latency_seconds_count") == 36
        interval = server.metric("truedraft_round_interval_seconds_sum")
        assert server.metric("truedraft_inter_token_latency_seconds_sum") == pytest.approx(interval)
        assert server.metric("truedraft_request_generation_tokens_sum") == 40
        assert server.metric("truedraft_request_acceptance_rate_count") == 1
        assert server.metric("truedraft_spec_decode_num_draft_tokens_total", method="draft_model") == 30
        assert server.metric("truedraft_spec_decode_num_accepted_tokens_total", method="draft_model") == 30
        assert server.metric("truedraft_spec_decode_num_draft_tokens_per_pos_total", position="0") == 10
        assert server.metric("truedraft_kv_cache_usage_perc") == 0
        assert server.metric("truedraft_phase_seconds_total", phase="score") == 1.0


def test_metrics_have_vllms_names(start_server: StartServer) -> None:
    """The names that vLLM's dashboards, KEDA examples and the Kubernetes inference gateway query."""
    with start_server(metrics_prefix="vllm:") as server:
        server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 8})
        server.post(COMPLETIONS, {"prompt": 3})
        for name in VLLM_NAMES:
            labels = VLLM_LABELS.get(name, {})
            assert server.has_metric(f"vllm:{name}", **labels), name
        assert server.metric("vllm:request_success_total", finished_reason="length") == 1
        assert server.metric("vllm:generation_tokens_total") == 8
        assert "truedraft_" not in server.get("/metrics").text


def test_http_requests_by_route_and_status(start_server: StartServer) -> None:
    def count(route: str, status: int) -> float:
        return server.metric("truedraft_http_requests_total", route=route, status=str(status))

    with start_server() as server:
        server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 8})
        server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 8, "stream": True})
        server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": -8})
        server.get("/v1/models/other")
        server.get("/no/such/path/1")
        server.get("/no/such/path/2")
        assert [count(COMPLETIONS, status) for status in (200, 400)] == [2, 1]
        assert count("/v1/models/{model_id:path}", 404) == 1
        assert "/no/such" not in server.get("/metrics").text, (
            "paths that clients make up would fill the memory"
        )


def test_metrics_of_both_processes(server: RunningServer) -> None:
    for process in ("server", "worker"):
        for name in ("resident_memory_bytes", "open_fds", "cpu_seconds_total"):
            assert server.metric(f"process_{name}", process=process) > 0


def test_stop_string_counts_only_what_counts(start_server: StartServer) -> None:
    with start_server() as server:
        server.worker.at_most(2)
        answer = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 40, "stop": "o"}).json()
        assert answer["usage"]["completion_tokens"] == 5
        assert server.metric("truedraft_generation_tokens_total") == 5
        assert server.metric("truedraft_request_success_total", finished_reason="stop") == 1


def test_metrics_formats(server: RunningServer) -> None:
    assert server.get("/metrics").headers["content-type"].startswith("text/plain")
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    response = server.get("/metrics", headers=accept)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


def test_version(server: RunningServer) -> None:
    version = server.get("/version").json()
    assert version["name"] == "truedraft"
    assert (version["model"], version["device"], version["dtype"]) == (MODEL, "cpu", "float32")
    assert version["forward"] == "fused layers in C"
    assert version["weights"] == ["Q4_1", "float32"]
    answer = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).json()
    assert version["system_fingerprint"] == answer["system_fingerprint"]


def test_series_begin_before_their_first_event(start_server: StartServer) -> None:
    """A counter that begins with its first event has not grown, so that no alert sees the event."""
    with start_server() as server:
        for code in ("worker_lost", "internal_error", "queue_full", "invalid_logits", "request_timeout"):
            assert server.has_metric("truedraft_request_errors_total", code=code)
        for status in ("200", "400", "429", "500", "503"):
            assert server.has_metric("truedraft_http_requests_total", route="/v1/completions", status=status)
        assert server.has_metric("truedraft_spec_decode_num_drafts_total", method="ngram")


def test_every_code_has_a_series() -> None:
    """Codes that the source gives to single errors are in the list, too, but for those that end a worker."""
    written = {
        code
        for folder in ("server", "engine")
        for path in (ROOT / folder).rglob("*.py")
        for code in re.findall(r'\bcode="([a-z_]+)"', path.read_text())
    }
    assert len(written) > 5
    assert written - {"model_load_failed", "rank_lost"} <= set(error_codes())


@pytest.mark.parametrize("serves", [0.0, worker_client.STABLE_SECONDS])
def test_workers_that_die_while_they_load_count_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch, serves: float
) -> None:
    config = EngineConfig(target="/srv/hidden/model")
    client = WorkerClient(config, WorkerMetrics(), max_restarts=2)
    num_runs = 0

    async def run(owner: Any, number: int) -> str:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 1 or (serves and num_runs < 8):
            client._receive(owner, number, READY)
            await asyncio.sleep(serves)
        else:
            await asyncio.sleep(2 * worker_client.STABLE_SECONDS)  # it is loading
        return "It died of /srv/hidden/model/config.json."

    async def failure() -> str:
        clock = SimpleNamespace(monotonic=asyncio.get_running_loop().time)
        monkeypatch.setattr(worker_client, "time", clock)
        client.start(Mock(), 0)
        return await client.failure()

    monkeypatch.setattr(client, "_run_worker", run)
    cause = in_virtual_time(failure())
    assert num_runs == (9 if serves else 3)
    assert "/srv/hidden/model/config.json" in cause  # the operator reads it
    assert "/srv" not in client.state.reason
    assert "It died of model/config.json." in client.state.reason


@pytest.mark.parametrize("setting", ["restart", "stop"])
def test_what_follows_when_weights_are_written_over(
    monkeypatch: pytest.MonkeyPatch, setting: Literal["restart", "stop"]
) -> None:
    """A worker that loads other weights than the one before it says so to who has a tokenizer of theirs."""
    client = WorkerClient(EngineConfig(target="m.gguf"), WorkerMetrics(), on_changed_weights=setting)
    num_runs = 0
    owner = Mock()

    async def run(_: Any, number: int) -> str:
        nonlocal num_runs
        num_runs += 1
        client._receive(owner, number, structs.replace(READY, fingerprint=f"weights {min(num_runs, 2)}"))
        client._weights_changed = False
        if num_runs == 1:
            client._receive(owner, number, Failed("", WEIGHTS_CHANGED, "m.gguf was written over"))
        return client._load_error or "It died."

    monkeypatch.setattr(client, "_run_worker", run)

    async def failure() -> str:
        client.start(owner, 0)
        return await client.failure()

    cause = in_virtual_time(failure())
    if setting == "stop":
        assert num_runs == 1
        assert "m.gguf was written over" in cause
        assert owner.weights_changed.call_count == 0
    else:
        assert num_runs == 6
        assert owner.weights_changed.call_count == 1


def test_other_weights_have_their_own_tokenizer(start_server: StartServer) -> None:
    with start_server() as server:
        before = server.model._tokenizer
        server.loop.call_soon_threadsafe(server.engine.weights_changed)
        wait_for(lambda: server.model._tokenizer is not before, "the other one")
        server.wait_until_ready()
        assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_signal_of_a_file_is_explained() -> None:
    said = worker_client._describe_exit(-signal.SIGBUS, was_ready=True)
    assert "killed by signal 7 (SIGBUS): a file that it reads while it serves was cut off" in said
    assert worker_client._describe_exit(-9, was_ready=True) == "The worker was killed by signal 9."


@pytest.mark.parametrize(
    ("target", "said", "public"),
    [
        (".", "It died. {absolute}/config.json is damaged.", "It died. here/config.json is damaged."),
        ("up/model", "It died of up/model.", "It died of model."),
        ("up/model", "It died of {absolute}/x.", "It died of model/x."),
        ("owner/name", "It died of owner/name.", "It died of owner/name."),
    ],
)
def test_reasons_name_models_without_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, said: str, public: str
) -> None:
    (tmp_path / "here" / "up" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    client = WorkerClient(EngineConfig(target=target), WorkerMetrics())
    absolute = Path(target).absolute()
    assert client._public(said.format(absolute=absolute)) == public

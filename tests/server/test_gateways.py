"""What gateways ask: metrics by the rules of their programs, prompts as token ids, load, probes."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import StartServer
from tests.server.running import MODEL, RunningServer
from tests.server.test_speculation_status import STATS, worker
from truedraft.server.observability.metrics import Metrics

PROMPT = {"prompt": ["ab", "c"], "max_tokens": 3, "temperature": 0.5, "n": 2}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def text_of(metrics: Metrics) -> str:
    return generate_latest(metrics.exposed).decode()


def first_series(text: str, name: str) -> Any:
    """Returns what llm-d's scheduler takes: of a family with that name the latest series, of equal times the
    first one."""
    for family in text_string_to_metric_families(text):
        if name in (family.name, f"{family.name}_info"):
            latest = max((sample.timestamp or 0 for sample in family.samples), default=0)
            return next(sample for sample in family.samples if (sample.timestamp or 0) == latest)
    raise LookupError(name)


def last_samples(text: str, names: Iterable[str]) -> dict[str, float]:
    """Returns what the router of vLLM's production stack takes: of each name the last sample."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in names
    }


def two_workers() -> Metrics:
    """Makes the metrics of a server of which the second worker is the fuller one."""
    metrics = Metrics("vllm:", {MODEL: 2})
    usages = ({"target": 0.1, "draft": 0.4}, {"target": 0.7, "draft": 0.2})
    for one, usage in zip(metrics.models[MODEL].workers, usages, strict=True):
        one.ready(worker())
        one.stats(msgspec.structs.replace(STATS, cache_usage=usage, num_running=2, num_waiting=3))
    return metrics


def test_rules_of_schedulers_find_one_number_for_the_whole_server() -> None:
    text = text_of(two_workers())
    expected = {
        "vllm:kv_cache_usage_perc": 0.7,
        "vllm:num_requests_waiting": 6,
        "vllm:num_requests_running": 4,
    }
    assert {name: first_series(text, name).value for name in expected} == expected
    assert last_samples(text, expected) == expected


def test_sizes_of_the_cache_are_labels() -> None:
    metrics = two_workers()
    labels = first_series(text_of(metrics), "vllm:cache_config_info").labels
    blocks = 2 * worker().num_target_blocks
    assert (int(labels["block_size"]), int(labels["num_gpu_blocks"])) == (worker().block_size, blocks)
    metrics.models[MODEL].workers[0].lost()
    labels = first_series(text_of(metrics), "vllm:cache_config_info").labels
    assert int(labels["num_gpu_blocks"]) == blocks // 2
    metrics.models[MODEL].workers[1].lost()
    assert "vllm:cache_config_info{" not in text_of(metrics)


def test_each_model_of_each_worker_has_a_series_of_its_own() -> None:
    families = {family.name: family for family in text_string_to_metric_families(text_of(two_workers()))}
    found = families["vllm:worker_kv_cache_usage_perc"].samples
    assert {(sample.labels["worker"], sample.labels["model"]): sample.value for sample in found} == {
        ("0", "target"): 0.1,
        ("0", "draft"): 0.4,
        ("1", "target"): 0.7,
        ("1", "draft"): 0.2,
    }


def test_a_dead_worker_has_no_load() -> None:
    metrics = two_workers()
    for one in metrics.models[MODEL].workers:
        one.lost()
    assert first_series(text_of(metrics), "vllm:num_requests_waiting").value == 0
    assert first_series(text_of(metrics), "vllm:kv_cache_usage_perc").value == 0


def test_a_live_servers_metrics_are_found_by_the_same_rules(start_server: StartServer) -> None:
    with start_server(metrics_prefix="vllm:") as server:
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
        text = server.get("/metrics").text
        for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
            assert first_series(text, f"vllm:{name}").value >= 0
        assert int(first_series(text, "vllm:cache_config_info").labels["block_size"]) == 16


def test_prompts_are_rendered_as_they_would_be_computed(server: RunningServer) -> None:
    rendered = server.post("/v1/completions/render", PROMPT).json()
    assert [each["token_ids"] for each in rendered] == [
        server.post("/tokenize", {"prompt": prompt}).json()["tokens"] for prompt in ("ab", "c")
    ]
    assert all(each["request_id"].startswith("cmpl-") and each["model"] == MODEL for each in rendered)
    assert rendered[0]["sampling_params"] == {"max_tokens": 3, "temperature": 0.5, "n": 2}
    one = server.post("/v1/completions/render", {"prompt": [1, 2, 3]}).json()
    assert [each["token_ids"] for each in one] == [[1, 2, 3]]


@pytest.mark.parametrize("more", [{}, {"tools": [{"type": "function", "function": {"name": "f"}}]}])
def test_conversations_are_rendered_as_they_would_be_computed(
    server: RunningServer, more: dict[str, Any]
) -> None:
    rendered = server.post("/v1/chat/completions/render", CHAT | more)
    if rendered.status_code == 400:  # a template without tools refuses them on both routes
        assert server.post("/v1/chat/completions", CHAT | more).status_code == 400
        return
    answer = server.post("/v1/chat/completions", CHAT | more | {"return_token_ids": True}).json()
    assert rendered.json()["token_ids"] == answer["prompt_token_ids"]
    assert rendered.json()["request_id"].startswith("chatcmpl-")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_refused_is_refused_when_rendered(server: RunningServer, path: str) -> None:
    for wrong in ({}, {"prompt": 5, "messages": 5}, {"model": "other", **PROMPT, **CHAT}):
        expected = server.post(path, wrong)
        found = server.post(f"{path}/render", wrong)
        assert (found.status_code, found.json()) == (expected.status_code, expected.json())


def test_probes_and_load(server: RunningServer) -> None:
    assert server.get("/ping").json() == server.get("/ready").json()
    assert server.get("/v1/health").json() == server.get("/health").json()
    assert server.get("/load").json() == {"server_load": 0}


def test_load_counts_what_is_not_answered(start_server: StartServer) -> None:
    with start_server() as server:
        server.worker.at_most(0)
        with server.unanswered("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 5}):
            server.wait_for_messages("Generate", 2)
            assert server.get("/load").json() == {"server_load": 1}


def test_probes_need_no_key(start_server: StartServer) -> None:
    with start_server(api_keys=["secret"]) as server:
        server.client.headers.pop("authorization", None)
        for path in ("/ping", "/v1/health", "/load"):
            assert server.client.get(path).status_code == 200
        for path in ("/v1/completions/render", "/invocations"):
            assert server.client.post(path, json=PROMPT).status_code == 401


def test_invocations_are_chats_and_completions(server: RunningServer) -> None:
    fixed = {"seed": 1, "max_tokens": 4}
    completion = server.post("/invocations", {"prompt": "x", **fixed}).json()
    assert completion["object"] == "text_completion"
    chat = server.post("/invocations", CHAT | fixed).json()
    assert chat["object"] == "chat.completion"
    streamed = server.post("/invocations", {"prompt": "x", "stream": True, **fixed})
    assert streamed.text.startswith("data: ")
    assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("body", [{}, [], {"input": "x"}])
def test_invocations_without_a_prompt_are_refused(server: RunningServer, body: Any) -> None:
    answer = server.client.post("/invocations", json=body)
    assert answer.status_code == 400
    assert "Give messages" in answer.json()["error"]["message"]


def test_invocations_are_held_to_the_same_rules(server: RunningServer) -> None:
    for wrong in ({"prompt": "x", "max_tokens": -1}, {"messages": []}):
        path = "/v1/completions" if "prompt" in wrong else "/v1/chat/completions"
        expected, found = server.post(path, wrong), server.post("/invocations", wrong)
        assert (found.status_code, found.json()) == (expected.status_code, expected.json())
    assert server.client.post("/invocations", content=b"{").status_code == 400

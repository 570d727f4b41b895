"""``GET /speculation`` and its gauge: what the policy says of itself, and what is known without one."""

import json
import math
from typing import Any

import msgspec
import pytest

from tests.server.conftest import StartServer
from tests.server.test_launch import WORKER, worker
from truedraft.engine.messages import DraftCounts, Stats
from truedraft.server.observability.metrics import WorkerMetrics
from truedraft.server.observability.speculation_status import speculation_status
from truedraft.server.settings import Settings

STATS = Stats(
    num_running=1,
    num_waiting=0,
    num_speculative_tokens=2.5,
    cache_usage={},
    num_preemptions=0,
    num_prefix_queries=0,
    num_prefix_hits=0,
    drafts={"draft_model": DraftCounts(10, 30, 12), "ngram": DraftCounts(5, 10, 8)},
    draft_tokens_per_position=[15, 15, 10, 0],
    accepted_tokens_per_position=[12, 6, 2, 0],
    phase_seconds={"draft": 1.0, "score": 2.0},
    num_rows={"c": 7, "phases": 1},
)
AUTO: dict[str, Any] = {
    "policy": "auto",
    "on": True,
    "why": "on: it pays",
    "predicted_speedup": 1.4,
    "tokens_per_second": {"achieved": 130.0, "plain": 100.0},
    "costs": {"score": [0.01]},
}


def test_auto_tells_what_it_measured() -> None:
    state = speculation_status(Settings(num_speculative_tokens="auto"), worker(), STATS, AUTO)
    assert (state.on, state.why, state.draft_length) == (True, "on: it pays", 2.5)
    assert (state.speedup.predicted, state.speedup.achieved) == (1.4, 1.3)
    assert state.policy["costs"] == {"score": [0.01]}
    assert state.acceptance_rate == 0.5
    assert [(entry.position, entry.rate) for entry in state.acceptance_by_position] == [
        (0, 0.8),
        (1, 0.4),
        (2, 0.2),
    ]


@pytest.mark.parametrize(
    ("fields", "num_tokens", "on", "why"),
    [
        ({}, 4, True, "on: the draft length is fixed"),
        ({}, 0, False, "off: num_speculative_tokens is 0"),
        ({"method": "none"}, 4, False, "off: no draft source is configured"),
    ],
)
def test_fixed_lengths_estimate_nothing(fields: dict[str, Any], num_tokens: int, on: bool, why: str) -> None:
    stats = msgspec.structs.replace(STATS, num_speculative_tokens=num_tokens)
    state = speculation_status(
        Settings(), worker(**fields), stats, {"policy": "fixed", "num_draft_tokens": num_tokens}
    )
    assert state.on is on
    assert state.why.startswith(why)
    assert (state.speedup.predicted, state.speedup.achieved) == (None, None)


def test_no_answer_has_a_number_that_json_lacks(start_server: StartServer) -> None:
    """Whatever the policy divides by zero; fixed lengths have no estimate at all."""
    with start_server(num_speculative_tokens=3) as server:

        def read() -> Any:
            return json.loads(server.get("/speculation").text, parse_constant=pytest.fail)

        assert read()["speedup"] == {"predicted": None, "achieved": None}
        rates = {"achieved": math.nan, "plain": 1.0}
        server.engine.workers[0].speculation.update(
            AUTO
            | {
                "predicted_speedup": math.nan,
                "tokens_per_second": rates,
                "costs": {"score": [math.inf, -math.inf]},
            }
        )
        answer = read()
        assert answer["speedup"] == {"predicted": None, "achieved": None}
        assert answer["policy"]["costs"] == {"score": [None, None]}


def test_before_anything_ran() -> None:
    state = speculation_status(Settings(), None, None, {})
    assert (state.on, state.why, state.acceptance_by_position) == (None, "no step has run yet", [])


def samples(metrics: WorkerMetrics, name: str) -> list[float]:
    families = list(metrics.collect())
    return [sample.value for family in families for sample in family.samples if sample.name == name]


def test_gauge_follows_the_policy() -> None:
    metrics = WorkerMetrics()
    name = "truedraft_estimated_speedup"
    assert math.isnan(samples(metrics, name)[0])
    metrics.speculation(AUTO)
    assert samples(metrics, name) == [1.4]
    metrics.speculation({"policy": "fixed"})
    assert math.isnan(samples(metrics, name)[0])


def test_a_dead_workers_cache_is_not_in_use() -> None:
    metrics = WorkerMetrics()
    metrics.stats(msgspec.structs.replace(STATS, cache_usage={"target": 0.5}))
    assert samples(metrics, "truedraft_worker_kv_cache_usage_perc") == [0.5]
    metrics.stats(msgspec.structs.replace(STATS, cache_usage={"target": 0.7}))
    metrics.lost()
    assert not samples(metrics, "truedraft_worker_kv_cache_usage_perc")


def test_what_a_worker_counted_before_it_died_is_kept() -> None:
    metrics = WorkerMetrics()
    for total in (2, 3):
        metrics.stats(msgspec.structs.replace(STATS, num_preemptions=total))
    metrics.lost()
    metrics.ready(WORKER)
    metrics.stats(msgspec.structs.replace(STATS, num_preemptions=4))
    assert samples(metrics, "truedraft_num_preemptions_total") == [7]

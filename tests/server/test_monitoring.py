"""The dashboard's queries find something in a real Prometheus, and the alerts fire when they should."""

import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.server.conftest import StartServer
from tests.server.prometheus import MONITORING, dashboard_queries, executable, run_prometheus
from tests.server.running import wait_for
from truedraft.server.turns import Turn, Turns

# Only the test can make the server's clock go so far.
LONG_SECONDS = 10_000.0
SERVER = 'instance="server:8000", model_name="m"'

# Alert -> a series that provokes it, sampled every minute for half an hour, and one that does not.
PROVOKING: dict[str, tuple[str, str, str]] = {
    "TruedraftDown": ('up{job="truedraft", instance="server:8000"}', "0x30", "1x30"),
    "TruedraftNotReady": (f"truedraft_ready{{{SERVER}}}", "0x30", "1 1 0 0 1x26"),
    "TruedraftWorkerRestarted": (f"truedraft_worker_restarts_total{{{SERVER}}}", "0x24 1x5", "3x30"),
    "TruedraftServerErrors": (
        f'truedraft_http_requests_total{{{SERVER}, route="/v1/completions", status="500"}}',
        "0+1x30",
        "5x30",
    ),
    "TruedraftStreamErrors": (
        f'truedraft_request_errors_total{{{SERVER}, code="worker_lost"}}',
        "0+1x30",
        "5x30",
    ),
    "TruedraftQueueFull": (
        f'truedraft_request_errors_total{{{SERVER}, code="queue_full"}}',
        "0+9x30",
        "9x30",
    ),
    "TruedraftSlowFirstToken": (
        f'truedraft_time_to_first_token_seconds_bucket{{{SERVER}, le="5"}}',
        "0x30",
        "0+9x30",
    ),
    "TruedraftSlowStage": (
        f'truedraft_request_stage_seconds_bucket{{{SERVER}, stage="turn", le="5"}}',
        "0x30",
        "0+9x30",
    ),
    "TruedraftEventLoopBlocked": (
        f'truedraft_event_loop_lag_seconds_bucket{{{SERVER}, le="1.0"}}',
        "0+600x27 16799+600x2",
        "0+600x30",
    ),
    "TruedraftCacheFull": (
        f'truedraft_worker_kv_cache_usage_perc{{{SERVER}, model="target"}}',
        "0.99x30",
        "0.9x30",
    ),
    "TruedraftPreemptions": (f"truedraft_num_preemptions_total{{{SERVER}}}", "0+60x30", "0+1x30"),
    "TruedraftLowAcceptance": (
        f'truedraft_spec_decode_num_accepted_tokens_total{{{SERVER}, method="draft_model"}}',
        "0+60x60",
        "0+600x60",
    ),
}
# These alerts may fire in tests: a machine that has much else to do holds up everything.
MACHINE = {"TruedraftEventLoopBlocked"}
# What else an alert looks at.
BESIDE = {
    "TruedraftSlowFirstToken": [
        {
            "series": f'truedraft_time_to_first_token_seconds_bucket{{{SERVER}, le="{le}"}}',
            "values": values,
        }
        for le, values in (("10", "0+9x30"), ("+Inf", "0+9x30"))
    ],
    "TruedraftSlowStage": [
        {
            "series": f'truedraft_request_stage_seconds_bucket{{{SERVER}, stage="turn", le="{le}"}}',
            "values": values,
        }
        for le, values in (("10", "0+9x30"), ("+Inf", "0+9x30"))
    ],
    "TruedraftEventLoopBlocked": [
        {"series": f"truedraft_event_loop_lag_seconds_count{{{SERVER}}}", "values": "0+600x30"}
    ],
    "TruedraftLowAcceptance": [
        {
            "series": f'truedraft_spec_decode_num_draft_tokens_total{{{SERVER}, method="draft_model"}}',
            "values": "0+1000x60",
        }
    ],
}


def alert_names() -> list[str]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule["alert"] for group in groups for rule in group["rules"]]


def test_every_alert_fires_when_provoked_and_not_otherwise(tmp_path: Path) -> None:
    promtool = executable("promtool")
    assert sorted(PROVOKING) == sorted(alert_names())
    tests = []
    for alert, (series, provoking, harmless) in PROVOKING.items():
        for values, fires in ((provoking, True), (harmless, False)):
            query = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
            tests.append(
                {
                    "name": f"{alert} {'fires' if fires else 'is silent'}",
                    "interval": "1m",
                    "input_series": [{"series": series, "values": values}, *BESIDE.get(alert, [])],
                    "promql_expr_test": [
                        {
                            "expr": query,
                            "eval_time": "45m" if alert == "TruedraftLowAcceptance" else "28m",
                            "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                        }
                    ],
                }
            )
    rules = {"rule_files": [str(MONITORING / "alerts.yml")], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(rules))
    result = subprocess.run(
        [promtool, "test", "rules", str(tmp_path / "tests.yml")], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_runbook_has_all_alerts() -> None:
    page = (Path(__file__).parents[2] / "docs/runbook.md").read_text(encoding="utf-8")
    assert re.findall("^## (.*)$", page, re.MULTILINE) == alert_names()


def test_prometheus_accepts_the_configuration() -> None:
    command = [executable("promtool"), "check", "config", str(MONITORING / "prometheus.yml")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_query_of_the_dashboard_finds_something(start_server: StartServer, tmp_path: Path) -> None:
    """A server is scraped while requests come, one of them wrong and one given up; then its worker dies."""
    with start_server() as server, run_prometheus(tmp_path, urlsplit(server.url).netloc) as prometheus:

        def work() -> None:
            server.post("/v1/completions", {"prompt": "x" * 40, "max_tokens": 40})
            server.post("/v1/completions", {"prompt": "x", "max_tokens": -1})

        def empty() -> list[str]:
            work()
            queries = dashboard_queries("4s").items()
            return [name for name, expression in queries if not prometheus.query(expression)]

        server.worker.at_most(0)
        with server.unanswered("/v1/completions", {"prompt": "x", "max_tokens": 8}):
            server.wait_for_requests(1)
        server.wait_for_messages("Abort", 1)
        server.worker.go_on()
        wait_for(lambda: not empty(), "queries that find something")
        assert prometheus.firing() <= MACHINE
        server.worker.die()
        wait_for(lambda: server.metric("truedraft_worker_restarts_total") > 0, "the worker's end")
        server.worker.go_on()
        server.wait_until_ready()
        wait_for(lambda: "TruedraftWorkerRestarted" in prometheus.firing(), "the alert")


def test_every_alert_fires_at_the_first_event_of_a_fresh_server(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has been counted before: a series that begins with its event would not be seen to grow."""
    limits = {"max_queued_sequences": 4, "request_timeout": LONG_SECONDS, "keep_alive_timeout": 100_000}
    started = start_server("--troubled", "--tokens-per-step", "1", **limits)
    ahead = 0.0
    measured = SimpleNamespace(perf_counter=lambda: time.perf_counter() + ahead)
    for module in ("stages", "observability.metrics", "observability.access_log", "http.protocol"):
        monkeypatch.setattr(f"truedraft.server.{module}.time", measured)
    with ExitStack() as stack:
        server = stack.enter_context(started)
        address = urlsplit(server.url).netloc
        prometheus = stack.enter_context(run_prometheus(tmp_path, address, window="20s"))
        threads = stack.enter_context(ThreadPoolExecutor())
        seen: set[str] = set()

        def has_fired(alert: str) -> bool:
            seen.update(prometheus.firing())
            return alert in seen

        def fires(alert: str) -> None:
            wait_for(lambda: has_fired(alert), alert)

        def ask(**fields: Any) -> int:
            return server.post("/v1/completions", {"prompt": "x", "max_tokens": 8} | fields).status_code

        wait_for(lambda: bool(prometheus.query("truedraft_ready == 1")), "the first scrape")
        assert prometheus.firing() <= MACHINE
        server.worker.at_most(5)
        with server.unanswered("/v1/completions", {"prompt": "x", "max_tokens": 99, "n": 4}):
            fires("TruedraftCacheFull")
            late = threads.submit(ask, n=4)
            wait_for(lambda: server.engine.num_http_requests == 2, "a full queue")
            assert ask() == 429
            fires("TruedraftQueueFull")
            server.pass_time(LONG_SECONDS)
            assert late.result() == 504
            fires("TruedraftServerErrors")
        slow = threads.submit(ask)
        server.wait_for_requests(1)
        ahead = 5.5
        server.worker.go_on()
        assert slow.result() == 200
        fires("TruedraftSlowFirstToken")
        begin = Turns.begin

        async def late_turn(*args: Any, **options: Any) -> Turn:
            nonlocal ahead
            ahead += 5.5
            return await begin(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Turns, "begin", late_turn)
            assert ask(prompt="x" * 3000) in (200, 400)
        fires("TruedraftSlowStage")
        server.loop.call_soon_threadsafe(time.sleep, 2.0)
        fires("TruedraftEventLoopBlocked")
        for _ in range(10):
            assert ask(n=4) == 200
        fires("TruedraftPreemptions")
        fires("TruedraftLowAcceptance")
        server.wait_for_requests(0)
        num_steps = server.metric("truedraft_num_preemptions_total")  # it reports one for each
        num_tokens = server.metric("truedraft_generation_tokens_total")
        server.worker.at_most(int(num_steps) + 3)
        with server.unanswered("/v1/completions", {"prompt": "x", "max_tokens": 8}):
            server.wait_for_tokens(int(num_tokens) + 3)
            server.worker.die()
            fires("TruedraftStreamErrors")
        fires("TruedraftWorkerRestarted")
        fires("TruedraftNotReady")
        server.services.drain()
        server.worker.go_on()
        target = tmp_path / "prometheus.yml"
        target.write_text(target.read_text().replace(address, "127.0.0.1:1"))
        prometheus.reload()
        fires("TruedraftDown")
        assert seen == set(alert_names())

"""Replicas of Ray Serve with the bundled pair: exact answers, the death of one, more of them under load.

Needs the extra ``ray``, which the extra ``dev`` does not have.
"""

import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.faults.watched import (
    CASES,
    COMPLETIONS,
    MODEL,
    STORY,
    ServerError,
    Texts,
    num_choices,
    read_stream,
    wait_for,
)
from truedraft.server.settings import Settings

ray = pytest.importorskip("ray", reason="Ray is not installed; it comes with pip install '.[ray]'")

pytestmark = pytest.mark.filterwarnings("default")

NUM_STREAMS = 32
RUNNING, WAITING = "truedraft_num_requests_running", "truedraft_num_requests_waiting"
SETTINGS = {"num_threads": 1, "cache_memory": "64MiB"}
LONG = STORY | {"max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Starts a proxy on one machine, with less than it has for each replica; yields its URL."""
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    root = str(Path(__file__).parents[2])
    ray.init(
        num_cpus=4,
        object_store_memory=100_000_000,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": root}},
        log_to_driver=False,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def run(**options: Any) -> None:
    from ray import serve

    from truedraft.server.ray_serve import deployment

    common: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.5}, "max_ongoing_requests": 64}
    serve.run(deployment(SETTINGS).options(**common, **options).bind())


def num_replicas() -> int:
    from ray import serve

    (application,) = serve.status().applications.values()
    return int(application.deployments["Truedraft"].replica_states.get("RUNNING", 0))


def replicas() -> list[int]:
    """Process ids: the parents of the engines' processes, where those are Ray's."""
    pids = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"truedraft.engine.process.spawned" in (process / "cmdline").read_bytes():
                pids.add(int((process / "stat").read_text().rpartition(")")[2].split()[1]))
        except OSError:  # it has just ended
            continue
    mine = [pid for pid in pids if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")]
    return sorted(mine)


def ask(url: str, case: dict[str, Any], on_start: Callable[[], None] = lambda: None) -> Texts:
    body = case | {"model": MODEL, "stream": True}
    with httpx.stream("POST", f"{url}{COMPLETIONS}", json=body, timeout=600) as response:
        response.raise_for_status()
        lines = response.iter_lines()
        first = next(lines)
        on_start()
        return read_stream(chain([first], lines), num_choices(case))


def num_running(url: str, replica: int) -> int:
    """HTTP requests of one replica, whose metrics are known by the start of its process."""
    born = psutil.Process(replica).create_time()
    while True:
        metrics = {
            sample.name: sample.value
            for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60).text)
            for sample in family.samples
            if sample.name in ("process_start_time_seconds", RUNNING, WAITING)
            and sample.labels.get("process", "server") == "server"
        }
        if abs(metrics["process_start_time_seconds"] - born) < 0.05:
            return int(metrics[RUNNING] + metrics[WAITING])


def test_two_replicas_and_the_death_of_one(url: str) -> None:
    run(num_replicas=2)
    references = [ask(url, case) for case in CASES]
    cases = [number % len(CASES) for number in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        answers = list(threads.map(lambda case: ask(url, CASES[case]), cases))
        assert answers == [references[case] for case in cases]

        victim, survivor = replicas()
        started: list[None] = []
        asked = [threads.submit(ask, url, LONG, lambda: started.append(None)) for _ in range(NUM_STREAMS)]
        wait_for(lambda: len(started) >= NUM_STREAMS * 3 // 4, lambda: "no load")
        num_lost_at_most = num_running(url, victim)
        os.kill(victim, signal.SIGKILL)
        outcomes: Counter[str] = Counter()
        long_answers = set()
        for one in asked:
            try:
                long_answers.add(one.result()[0])
                outcomes["exact"] += 1
            except (httpx.HTTPError, ServerError):
                outcomes["lost"] += 1
    assert len(long_answers) == 1, "all of them are greedy"
    assert 0 < outcomes["lost"] <= num_lost_at_most < NUM_STREAMS, "the streams of that replica"
    assert survivor in replicas()
    wait_for(lambda: len(replicas()) == 2 and num_replicas() == 2, lambda: "it was not replaced")
    assert [ask(url, case) for case in CASES] == references


def test_one_replica_becomes_two_under_load_and_one_again(url: str) -> None:
    """The second one ends what it has: no stream is cut."""
    autoscaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 2,
        "upscale_delay_s": 1,
        "downscale_delay_s": 2,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 2,
    }
    run(autoscaling_config=autoscaling, graceful_shutdown_timeout_s=60)
    wait_for(lambda: num_replicas() == 1, lambda: "not one replica")
    reference = ask(url, LONG)
    stop = threading.Event()

    def stay() -> int:
        number = 0
        while not stop.is_set():
            assert ask(url, LONG) == reference
            number += 1
        return number

    with ThreadPoolExecutor(9) as threads:
        staying = [threads.submit(stay) for _ in range(8)]
        try:
            wait_for(lambda: num_replicas() == 2, lambda: "no second replica")
        finally:
            stop.set()
        assert all(one.result() for one in staying)
        alone = threads.submit(lambda: [ask(url, LONG) == reference for _ in range(20)])
        wait_for(lambda: num_replicas() == 1, lambda: "the second replica stayed")
        assert all(alone.result())


def test_the_file_is_valid() -> None:
    from ray.serve.schema import ServeDeploySchema

    text = (Path(__file__).parents[2] / "deploy" / "ray_serve.yaml").read_text()
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    Settings(**application.args)
    assert [deployment.name for deployment in application.deployments] == ["Truedraft"]


def test_settings_of_the_proxy_are_refused() -> None:
    from truedraft.server.ray_serve import app

    with pytest.raises(ValueError, match="own configuration, not here: port"):
        app({"port": 1234})

"""Two workers behind one server, with the bundled pair: exact answers, and the death of one under load."""

import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.faults.watched import CASES, STORY, ServerError, Watched, wait_for, watched, workers_of

NUM_STREAMS = 32
# Too long to end before the worker is killed.
STORIES = [STORY | {"max_tokens": 200, "ignore_eos": True, "seed": number} for number in range(8)]
SETTINGS = (
    *("--workers", "2", "--num-threads", "2", "--cache-memory", "256MiB"),
    *("--heartbeat-timeout", "1000"),  # workers are stopped for a while
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched(tmp_path_factory.mktemp("workers"), *SETTINGS, cases=[*CASES, *STORIES]) as running:
        wait_for(lambda: num_ready(running) == 2, lambda: "one worker only")
        yield running


def health(server: Watched) -> list[dict[str, Any]]:
    workers: list[dict[str, Any]] = server.server.get("/health").json()["workers"]
    return workers


def num_ready(server: Watched) -> int:
    return sum(worker["status"] == "ready" for worker in health(server))


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def loads(server: Watched) -> list[int]:
    return [worker["sequences"] for worker in health(server)]


def ask_all(
    server: Watched, threads: ThreadPoolExecutor, cases: Sequence[dict[str, Any]]
) -> list[Future[bool]]:
    """Returns whether each answer is exact."""

    def is_exact(number: int) -> bool:
        case = cases[number % len(cases)]
        return server.ask(case, stream=True) == server.references[server.cases.index(case)]

    return [threads.submit(is_exact, number) for number in range(NUM_STREAMS)]


def test_streams_of_both_workers_are_exact(server: Watched) -> None:
    """The references are those of one worker, mostly; the load is divided."""
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        assert all(asked.result() for asked in ask_all(server, threads, CASES))
    lines = server.server.get("/metrics").text.splitlines()
    scored = [line for line in lines if line.startswith("truedraft_phase_seconds_total") and "score" in line]
    assert [line.partition('worker="')[2][0] for line in scored] == ["0", "1"]
    statuses = [server.server.get(f"/speculation?worker={number}").status_code for number in range(3)]
    assert statuses == [200, 200, 400]


def test_a_killed_worker_takes_no_stream_of_the_other_with_it(server: Watched) -> None:
    victim, survivor = workers_of(server.server.pid)
    outcomes: Counter[str] = Counter()
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        signal_all((victim, survivor), signal.SIGSTOP)  # so that all run together, however slowly they come
        asked = ask_all(server, threads, STORIES)
        wait_for(lambda: sum(loads(server)) == NUM_STREAMS, lambda: f"{loads(server)} sequences")
        held = max(loads(server))
        assert held < NUM_STREAMS
        signal_all((victim, survivor), signal.SIGCONT)
        wait_for(lambda: server.gauges()["num_requests_running"] > 0, lambda: "no tokens")
        os.kill(victim, signal.SIGKILL)
        for one in asked:
            try:
                assert one.result()
                outcomes["exact"] += 1
            except ServerError as error:
                outcomes[str(error)] += 1
    assert set(outcomes) <= {"exact", "worker_lost"}
    assert outcomes["worker_lost"] <= held, "more than one worker held"
    assert server.is_ready(), "the other one serves on"
    wait_for(lambda: num_ready(server) == 2, lambda: "it was not replaced")
    assert survivor in workers_of(server.server.pid)
    assert server.server.metric("truedraft_worker_restarts_total") == 1
    for case, reference in zip(server.cases, server.references, strict=True):
        assert server.ask(case) == reference
    wait_for(lambda: not any(server.gauges().values()), lambda: f"gauges: {server.gauges()}")
    assert loads(server) == [0, 0]

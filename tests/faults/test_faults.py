"""What goes wrong outside of the server, on a real one with the bundled pair, which is intact afterwards."""

import json
import os
import random
import resource
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.faults.watched import (
    CASES,
    COMPLETIONS,
    MODEL,
    STORY,
    ServerError,
    Texts,
    Watched,
    wait_for,
    watched,
)
from truedraft.engine.config import BUNDLED_PAIR

MAX_QUEUED = 24
NAN_TOKEN = 1999
LONG = {"prompt": "The cat sat. " * 150, "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """With a cache for about three long requests, and a token whose embedding is no number."""
    target = tmp_path_factory.mktemp("target")
    poison(target)
    settings = (
        *("--target", str(target), "--draft", str(BUNDLED_PAIR / "draft"), "--served-model-name", MODEL),
        *("--max-queued-sequences", str(MAX_QUEUED)),
        *("--heartbeat-timeout", "15"),  # a busy machine may keep a healthy worker silent for seconds
        *("--max-worker-restarts", "100"),
        *("--cache-memory", "24MiB"),
        *("--max-num-sequences", "8"),
    )
    with watched(tmp_path_factory.mktemp("faults"), *settings) as running:
        yield running


def poison(folder: Path) -> None:
    """The bundled target, with an embedding of ``NAN_TOKEN`` that the output layer does not share."""
    shutil.copytree(BUNDLED_PAIR / "target", folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][NAN_TOKEN] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))


@pytest.fixture(autouse=True)
def intact_afterwards(server: Watched) -> Iterator[None]:
    yield
    server.assert_intact()


def outcome(asked: Future[Texts], reference: Texts | None = None) -> str:
    """Returns the code of its error, or that it was answered, as expected."""
    try:
        texts = asked.result()
    except ServerError as error:
        return str(error)
    assert reference in (None, texts)
    return "answered"


def test_a_worker_killed_while_idle(server: Watched) -> None:
    first = server.worker
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: not server.is_ready(), lambda: "the death was not noticed")


def test_a_worker_killed_in_a_prefill_and_again_while_loading(server: Watched) -> None:
    """A request without a token survives one death; its own is the second one while the next worker loads."""
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(server.ask, LONG | {"max_tokens": 1})
        wait_for(lambda: server.gauges()["num_requests_running"] > 0 or asked.done(), lambda: "no request")
        first = server.worker
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: not server.is_ready(), lambda: "the death was not noticed")
        wait_for(lambda: has_other_worker(server, first), lambda: "no second worker")
        os.kill(server.worker, signal.SIGKILL)
        assert outcome(asked) in ("answered", "worker_lost")


def has_other_worker(server: Watched, first: int) -> bool:
    try:
        return server.worker != first
    except ValueError:  # none at the moment
        return False


def test_a_worker_killed_in_decoding(server: Watched) -> None:
    """The stream ends with an error event and [DONE]."""
    with server.server.stream(COMPLETIONS, LONG | {"model": MODEL}) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(server.worker, signal.SIGKILL)
        rest = [line for line in lines if line]
    assert '"code":"worker_lost"' in rest[-2].replace(" ", "")
    assert rest[-1] == "data: [DONE]"


def test_a_stopped_worker_is_replaced_under_load(server: Watched) -> None:
    stopped = server.worker
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(server.ask, LONG)
        os.kill(stopped, signal.SIGSTOP)
        assert outcome(asked) in ("answered", "worker_lost")
    wait_for(lambda: has_other_worker(server, stopped), lambda: "the stopped worker was not replaced")


def test_a_worker_that_gets_no_more_memory(server: Watched) -> None:
    """The allocator decides whether one request fails or the worker dies."""
    worker = server.worker
    with open(f"/proc/{worker}/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    unlimited = resource.prlimit(worker, resource.RLIMIT_AS, (size, size))
    assert unlimited[1] == resource.RLIM_INFINITY
    bodies = [LONG | {"prompt": f"{number} {LONG['prompt']}"} for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        outcomes = {outcome(asked) for asked in [threads.submit(server.ask, body) for body in bodies]}
    assert outcomes <= {"answered", "worker_lost", "engine_error", "not_ready"}
    if not has_other_worker(server, worker) and server.is_ready():
        os.kill(worker, signal.SIGKILL)  # it got along with what it had
        wait_for(lambda: not server.is_ready(), lambda: "the death was not noticed")


def test_a_row_without_numbers(server: Watched) -> None:
    """Its request fails; those that share its batches are exact."""
    with ThreadPoolExecutor(9) as threads:
        bodies = [{"prompt": [100 + number, NAN_TOKEN, 5], "max_tokens": 20} for number in range(3)]
        poisoned = [threads.submit(server.ask, body) for body in bodies]
        others = [threads.submit(server.ask, CASES[number]) for number in range(6)]
    assert [outcome(asked) for asked in poisoned] == ["invalid_logits"] * 3
    assert [asked.result() for asked in others] == server.references[:6]


def test_more_requests_than_the_queue_takes(server: Watched) -> None:
    with ThreadPoolExecutor(3 * MAX_QUEUED) as threads:
        asked = [threads.submit(server.ask, CASES[0]) for _ in range(3 * MAX_QUEUED)]
    outcomes = Counter(outcome(one, server.references[0]) for one in asked)
    assert set(outcomes) <= {"answered", "queue_full"}
    assert outcomes["answered"] >= MAX_QUEUED


def test_more_text_than_the_cache_holds(server: Watched) -> None:
    """Sequences are put back and computed again, and say what they would have said."""
    alone = server.ask(LONG)
    with ThreadPoolExecutor(8) as threads:
        together = [threads.submit(server.ask, LONG, stream=number % 2 == 0) for number in range(8)]
    assert [asked.result() for asked in together] == [alone] * 8


def test_two_hundred_clients_that_leave(server: Watched) -> None:
    """At random moments, of streams and whole answers, while others are answered exactly."""
    drawn = random.Random(0)
    delays = [drawn.uniform(0, 0.15) for _ in range(200)]

    def leave(delay: float) -> None:
        body = STORY | {"model": MODEL, "max_tokens": 100, "stream": delay < 0.1, "seed": 1}
        with socket.create_connection((url.hostname, url.port)) as connection:
            content = httpx.Request("POST", server.server.url, json=body).content
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            time.sleep(delay)

    url = urlsplit(server.server.url)
    stop = threading.Event()

    def stay() -> int:
        number = 0
        while not stop.is_set():
            case = number % 3
            answer = outcome(threads.submit(server.ask, CASES[case]), server.references[case])
            assert answer in ("answered", "queue_full")
            number += answer == "answered"
        return number

    with ThreadPoolExecutor(18) as threads:
        staying = threads.submit(stay)
        for left in [threads.submit(leave, delay) for delay in delays]:
            left.result()
        stop.set()
        assert staying.result() > 0


def test_clients_that_read_nothing(server: Watched) -> None:
    """They hold back neither each other nor those who read."""
    url = urlsplit(server.server.url)
    body = httpx.Request("POST", server.server.url, json=LONG | {"model": MODEL, "stream": True}).content
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with ExitStack() as stack:
        for _ in range(6):
            connection = stack.enter_context(socket.create_connection((url.hostname, url.port)))
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        for case, reference in zip(CASES[:3], server.references[:3], strict=True):
            assert server.ask(case, stream=True) == reference


def test_sigterm_under_load(tmp_path: Path) -> None:
    """What runs is finished exactly, what comes is refused, and nothing of the server is left."""
    cases = [STORY | {"max_tokens": 200, "ignore_eos": True, "seed": number} for number in range(6)]
    is_told = threading.Event()
    with (
        watched(tmp_path, "--drain-timeout", "1000", cases=cases) as server,
        ThreadPoolExecutor(len(cases)) as threads,
    ):

        def answered_late(case: dict[str, Any], reference: Texts) -> int:
            """Asks until it is refused; returns how many answers have ended after the signal."""
            late = 0
            while True:
                try:
                    assert server.ask(case, stream=True) == reference
                except (ServerError, httpx.ConnectError) as error:
                    if str(error) != "not_ready" and isinstance(error, ServerError):
                        raise
                    return late
                late += is_told.is_set()

        asking = [threads.submit(answered_late, *each) for each in zip(cases, server.references, strict=True)]
        wait_for(lambda: server.gauges()["num_requests_running"] > 2, lambda: "no load")
        is_told.set()
        os.kill(server.server.pid, signal.SIGTERM)
        assert sum(one.result() for one in asking) > 0
        wait_for(lambda: has_ended(server.server.pid), lambda: "it did not end")


def has_ended(pid: int) -> bool:
    """Its exit code is still to be read."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

"""The end of a server's life, as a process: running requests finish, new ones are refused."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.server.running import wait_for
from tests.server.serve_process import ServeProcess, body, serve_process
from tests.server.wire import events

# One token per step: a stream of a hundred tokens takes two seconds.
SLOW = ("--step-seconds", "0.02", "--tokens-per-step", "1")


class Reader:
    """A streaming client in a thread."""

    def __init__(self, serve: ServeProcess, **fields: Any) -> None:
        self.text = ""
        self.status = 0
        self.started = threading.Event()
        self.thread = threading.Thread(target=self._read, args=(serve, fields))
        self.thread.start()
        assert self.started.wait(10)

    def _read(self, serve: ServeProcess, fields: dict[str, Any]) -> None:
        request = {
            "method": "POST",
            "url": f"{serve.url}/v1/completions",
            "json": body(stream=True, **fields),
        }
        with httpx.stream(**request, timeout=30) as response:
            self.status = response.status_code
            for text in response.iter_text():
                self.text += text
                self.started.set()

    def wait(self) -> None:
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextmanager
def slow_server(model_folder: Path, tmp_path: Path, *settings: str) -> Iterator[ServeProcess]:
    with serve_process(model_folder, tmp_path, *settings, worker=SLOW) as serve:
        yield serve
        serve.process.wait(10)
        assert "Traceback" not in serve.log.read_text()


def tell_to_stop(serve: ServeProcess, number: int) -> None:
    serve.process.send_signal(number)
    wait_for(lambda: httpx.get(f"{serve.url}/ready").status_code == 503, "draining")


def test_running_requests_finish_and_new_ones_are_refused(model_folder: Path, tmp_path: Path) -> None:
    with slow_server(model_folder, tmp_path) as serve:
        reader = Reader(serve, max_tokens=100)
        tell_to_stop(serve, signal.SIGTERM)
        ready = httpx.get(f"{serve.url}/ready")
        assert ready.json()["status"] == "draining"
        assert "draining" in ready.json()["reason"]
        assert httpx.get(f"{serve.url}/health").status_code == 200
        refused = httpx.post(f"{serve.url}/v1/completions", json=body())
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert refused.json()["error"]["code"] == "not_ready"
        assert serve.process.poll() is None
        reader.wait()
        chunks = events(reader.text)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert serve.process.wait(10) == -signal.SIGTERM


def test_nothing_running_ends_at_once(model_folder: Path, tmp_path: Path) -> None:
    with slow_server(model_folder, tmp_path) as serve, httpx.Client() as idle:
        assert idle.get(f"{serve.url}/health").status_code == 200  # its connection stays open
        started = time.monotonic()
        serve.process.send_signal(signal.SIGTERM)
        serve.process.wait(10)
        assert time.monotonic() - started < 5


def test_unfinished_requests_get_an_error_when_the_time_is_over(model_folder: Path, tmp_path: Path) -> None:
    with slow_server(model_folder, tmp_path, "--drain-timeout", "0.5") as serve:
        reader = Reader(serve, max_tokens=400)
        serve.process.send_signal(signal.SIGTERM)
        reader.wait()
        assert reader.status == 200
        *_, last = events(reader.text)
        assert last["error"]["code"] == "worker_lost"
        assert "shutting down" in last["error"]["message"]


def test_second_signal_does_not_wait(model_folder: Path, tmp_path: Path) -> None:
    with slow_server(model_folder, tmp_path) as serve:
        reader = Reader(serve, max_tokens=400)
        tell_to_stop(serve, signal.SIGINT)
        started = time.monotonic()
        serve.process.send_signal(signal.SIGINT)
        assert serve.process.wait(10) == 130
        assert time.monotonic() - started < 5
        reader.wait()
        assert events(reader.text)[-1]["error"]["code"] == "worker_lost"

"""The end of a server's life, as a process: running requests finish, new ones are refused."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.server.running import TIMEOUT_SECONDS, wait_for
from tests.server.serve_process import ServeProcess, body, serve_process
from tests.server.wire import events

# So long that a test which waits for it fails.
FOR_EVER = ("--drain-timeout", "1000")


class Reader:
    """Streams in a thread. The client has read something, and the worker has stopped after that."""

    def __init__(self, serve: ServeProcess, **fields: Any) -> None:
        serve.worker.at_most(3)
        self.text = ""
        self.status = 0
        self.started = threading.Event()
        self.thread = threading.Thread(target=self._read, args=(serve, fields))
        self.thread.start()
        assert self.started.wait(TIMEOUT_SECONDS)

    def _read(self, serve: ServeProcess, fields: dict[str, Any]) -> None:
        request = {
            "method": "POST",
            "url": f"{serve.url}/v1/completions",
            "json": body(stream=True, **fields),
        }
        with httpx.stream(**request, timeout=TIMEOUT_SECONDS) as response:
            self.status = response.status_code
            for text in response.iter_text():
                self.text += text
                self.started.set()

    def wait(self) -> None:
        self.thread.join(TIMEOUT_SECONDS)
        assert not self.thread.is_alive()


@contextmanager
def server_that_ends(model_folder: Path, tmp_path: Path, *settings: str) -> Iterator[ServeProcess]:
    with serve_process(model_folder, tmp_path, *settings) as serve:
        yield serve
        serve.wait()
        assert "Traceback" not in serve.log.read_text()


def get(serve: ServeProcess, path: str) -> httpx.Response:
    return httpx.get(f"{serve.url}{path}", timeout=TIMEOUT_SECONDS)


def tell_to_stop(serve: ServeProcess, number: int) -> None:
    serve.process.send_signal(number)
    wait_for(lambda: get(serve, "/ready").status_code == 503, "draining")


def test_running_requests_finish_and_new_ones_are_refused(model_folder: Path, tmp_path: Path) -> None:
    with server_that_ends(model_folder, tmp_path, *FOR_EVER) as serve:
        reader = Reader(serve, max_tokens=100)
        tell_to_stop(serve, signal.SIGTERM)
        ready = get(serve, "/ready")
        assert ready.json()["status"] == "draining"
        assert "draining" in ready.json()["reason"]
        assert get(serve, "/health").status_code == 200
        assert 'truedraft_ready{model_name="tiny-model"} 0.0' in get(serve, "/metrics").text.splitlines()
        refused = httpx.post(f"{serve.url}/v1/completions", json=body(), timeout=TIMEOUT_SECONDS)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert refused.json()["error"]["code"] == "not_ready"
        assert serve.process.poll() is None
        serve.worker.go_on()
        reader.wait()
        chunks = events(reader.text)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert serve.wait() == 0


def test_nothing_running_ends_at_once(model_folder: Path, tmp_path: Path) -> None:
    with server_that_ends(model_folder, tmp_path, *FOR_EVER) as serve, httpx.Client() as idle:
        # Its connection stays open.
        assert idle.get(f"{serve.url}/health", timeout=TIMEOUT_SECONDS).status_code == 200
        serve.process.send_signal(signal.SIGTERM)
        serve.wait()


def test_unfinished_requests_get_an_error_when_the_time_is_over(model_folder: Path, tmp_path: Path) -> None:
    with server_that_ends(model_folder, tmp_path, "--drain-timeout", "0.5") as serve:
        reader = Reader(serve, max_tokens=400)
        serve.process.send_signal(signal.SIGTERM)
        reader.wait()
        assert reader.status == 200
        *_, last = events(reader.text)
        assert last["error"]["code"] == "shutting_down"
        assert "shutting down" in last["error"]["message"]


def test_second_signal_does_not_wait(model_folder: Path, tmp_path: Path) -> None:
    with server_that_ends(model_folder, tmp_path, *FOR_EVER) as serve:
        reader = Reader(serve, max_tokens=400)
        tell_to_stop(serve, signal.SIGINT)
        serve.process.send_signal(signal.SIGINT)
        assert serve.wait() == 130
        reader.wait()
        assert events(reader.text)[-1]["error"]["code"] == "shutting_down"

"""Runs the real application under uvicorn, in a thread, around the fake worker."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from server.app import create_app
from server.config import Settings
from server.engine_client import WorkerClient
from server.launch import bind
from server.metrics import Metrics
from server.services import Services
from server.tokenizer import Tokenizer

MODEL = "tiny-model"


@dataclass
class RunningServer:
    url: str
    client: httpx.Client
    services: Services
    worker_log: Path

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return self.client.post(path, json={"model": MODEL} | body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def metric(self, name: str, **labels: str) -> float:
        """Value of one sample; a sample that is not there yet counts as 0."""
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        return 0.0

    def messages_to_worker(self, kind: str) -> list[str]:
        return [line for line in self.worker_log.read_text().splitlines() if line.startswith(kind)]


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"gave up waiting for {what}"
        time.sleep(0.01)


@contextmanager
def run_server(
    model_folder: Path,
    tokenizer: Tokenizer,
    log_folder: Path,
    *worker_options: str,
    wait: bool = True,
    **settings: Any,
) -> Iterator[RunningServer]:
    """A server on a free port; ``wait`` until it can take requests."""
    worker_log = log_folder / "worker.log"
    worker_log.touch()
    command = (sys.executable, "-m", "tests.fake_worker", "--log", str(worker_log), *worker_options)
    configured = Settings(target=str(model_folder), **settings)
    metrics = Metrics()
    engine = WorkerClient(
        configured.engine_config(),
        metrics,
        max_queued_requests=configured.max_queued_requests,
        max_queued_tokens=configured.max_queued_tokens,
        worker_command=command,
        first_backoff_seconds=0.2,
    )
    app = create_app(configured, engine, metrics, load=lambda: tokenizer)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=2))
    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = httpx.Client(base_url=url, timeout=20, verify=False)
        running = RunningServer(url, client, app.state.services, worker_log)
        try:
            wait_for(lambda: server.started, "the port")
            if wait:
                wait_for(lambda: running.get("/ready").status_code == 200, "the worker")
            yield running
        finally:
            client.close()
            server.should_exit = True
            thread.join(timeout=15)
        assert not thread.is_alive()

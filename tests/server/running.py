"""Runs the real application under uvicorn, in a thread, around the fake worker."""

import asyncio
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvicorn
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from tests.server.orders import WorkerOrders
from truedraft.engine.config import EngineConfig
from truedraft.server.app import create_app
from truedraft.server.cli.launch import bind, http_config
from truedraft.server.models.registry import Limits, Models
from truedraft.server.models.served import Parts, ServedModel, TokenizerLoader
from truedraft.server.observability.metrics import Metrics
from truedraft.server.services import Services
from truedraft.server.settings import Settings
from truedraft.server.text.tokenizer import Tokenizer
from truedraft.server.workers.open_requests import QueueLimits
from truedraft.server.workers.worker_client import WorkerClient
from truedraft.server.workers.worker_pool import WorkerPool
from truedraft.server.workers.worker_process import WorkerTimeouts

MODEL = "tiny-model"

# Everything that has to happen some time gets this long. Only a failure takes it, so it may be more than
# enough for a machine that has much else to do, or that was stopped for a minute.
TIMEOUT_SECONDS = 300.0
POLL_SECONDS = 0.01


class ClockedLoop(asyncio.SelectorEventLoop):
    """Time passes as usual, and all at once where a test wants it to."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead

    def pass_time(self, seconds: float) -> None:
        self.ahead += seconds


@dataclass
class RunningServer:
    url: str
    client: httpx.Client
    services: Services
    worker_log: Path
    worker: WorkerOrders
    loop: ClockedLoop
    connections: set[Any]  # uvicorn's
    tasks: set[Any]  # uvicorn's as well: requests until they are written to the log

    @property
    def model(self) -> ServedModel:
        return self.services.models.first

    @property
    def engine(self) -> WorkerPool:
        """The workers of the first model, which must be loaded."""
        assert self.model.engine is not None
        return self.model.engine

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return self.client.post(path, json={"model": MODEL} | body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def metric(self, name: str, **labels: str) -> float:
        """Value of one sample; a sample that is not there yet counts as 0."""
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and sample.labels == {"model_name": MODEL} | labels:
                    return sample.value
        return 0.0

    def has_metric(self, name: str, **labels: str) -> bool:
        families = text_string_to_metric_families(self.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return any(sample.name == name and labels.items() <= sample.labels.items() for sample in samples)

    @contextmanager
    def unanswered(self, path: str, body: dict[str, Any]) -> Iterator[None]:
        """A request whose client does not read; it leaves at the end, and at no other time."""
        content = json.dumps({"model": MODEL} | body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        address = urlsplit(self.url)
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            yield

    def drop_connections(self) -> None:
        """Ends them as a killed server would, in the middle of what is sent."""

        def drop() -> None:
            for connection in list(self.connections):
                connection.transport.abort()

        self.loop.call_soon_threadsafe(drop)

    def pass_time(self, seconds: float) -> None:
        """Move the clock of the server's timers forward."""
        self.loop.call_soon_threadsafe(self.loop.pass_time, seconds)

    def wait_until_idle(self) -> None:
        """Waits until nothing of earlier requests can still be counted or logged."""
        wait_for(lambda: not self.tasks and not self.engine.num_requests, "earlier requests")

    def wait_for_requests(self, number: int) -> None:
        """Waits until the engine has ``number`` of them open; each prompt is one."""
        wait_for(lambda: self.engine.num_requests == number, f"{number} open requests")

    def wait_for_tokens(self, number: int) -> None:
        """Waits until ``number`` of them have come back from the worker, in all."""
        wait_for(lambda: self.metric("truedraft_generation_tokens_total") == number, f"{number} tokens")

    @contextmanager
    def one_step_at_a_time(self, num_tokens: int, tokens_per_step: int = 4) -> Iterator[None]:
        """Lets no step of the first request, of ``num_tokens``, begin before the tokens of the last one have
        been read, so that each has a chunk of its own."""

        def drive() -> None:
            for step in range(1, math.ceil(num_tokens / tokens_per_step) + 1):
                self.worker.at_most(step)
                self.wait_for_tokens(min(step * tokens_per_step, num_tokens))
            self.worker.go_on()

        self.worker.at_most(0)
        with ThreadPoolExecutor() as threads:
            driving = threads.submit(drive)
            yield
            driving.result()

    def wait_for_messages(self, kind: str, number: int) -> list[str]:
        wait_for(lambda: len(self.messages_to_worker(kind)) >= number, f"{number} times {kind}")
        return self.messages_to_worker(kind)

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.get("/ready").status_code == 200, "the worker")

    def messages_to_worker(self, kind: str) -> list[str]:
        return [line for line in self.worker_log.read_text().splitlines() if line.startswith(kind)]


@contextmanager
def serving(app: FastAPI) -> Iterator[httpx.Client]:
    """Serves an app that has workers of its own, once they are ready."""
    server = uvicorn.Server(http_config(app, app.state.services.settings))
    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as client:
            try:
                wait_for(lambda: server.started, "the port")
                wait_for(lambda: client.get("/ready").status_code == 200, "the worker")
                yield client
            finally:
                server.should_exit = True
                thread.join(TIMEOUT_SECONDS)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Each poll counts for a second at most: a machine that stood still has not been waited for."""
    waited = 0.0
    while waited < TIMEOUT_SECONDS:
        began = time.monotonic()
        if condition():
            return
        time.sleep(POLL_SECONDS)
        waited += min(time.monotonic() - began, 1.0)
    raise AssertionError(f"gave up waiting for {what}")


def fake_worker_app(
    model_folder: Path, load: TokenizerLoader, *worker_options: str, **settings: Any
) -> FastAPI:
    """The application whose lifespan starts the fake worker."""
    configured = Settings(target=str(model_folder), **settings)
    metrics = Metrics(configured.metrics_prefix, {configured.model_name: 1})
    of_model = metrics.models[configured.model_name]

    def assemble(_: EngineConfig) -> Parts:
        worker = WorkerClient(
            configured.engine_config(),
            of_model.workers[0],
            timeouts=WorkerTimeouts(configured.heartbeat_timeout, configured.step_timeout),
            max_restarts=configured.max_worker_restarts,
            worker_command=(sys.executable, "-m", "tests.fake_worker", *worker_options),
            first_backoff_seconds=0.2,
        )
        return Parts(WorkerPool([worker], QueueLimits.of(configured)), load)

    return create_app(
        configured, Models([ServedModel(configured, of_model, assemble)], Limits.of(configured)), metrics
    )


@contextmanager
def run_server(
    model_folder: Path,
    tokenizer: Tokenizer,
    log_folder: Path,
    *worker_options: str,
    wait: bool = True,
    **settings: Any,
) -> Iterator[RunningServer]:
    """Starts a server on a free port; ``wait`` until it is ready, or order its worker not to be."""
    worker_log, orders = log_folder / "worker.log", WorkerOrders(log_folder / "orders")
    worker_log.touch()
    if not wait:
        orders.die()
    files = ("--log", str(worker_log), "--orders", str(orders.path))
    app = fake_worker_app(model_folder, lambda: tokenizer, *files, *worker_options, **settings)
    server = uvicorn.Server(http_config(app, app.state.services.settings))
    loop = ClockedLoop()
    with bind("127.0.0.1", 0) as listener:

        def serve() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(server.serve(sockets=[listener]))

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS, verify=False)
        state = server.server_state
        running = RunningServer(
            url, client, app.state.services, worker_log, orders, loop, state.connections, state.tasks
        )
        try:
            wait_for(lambda: server.started, "the port")
            if wait:
                running.wait_until_ready()
            yield running
        finally:
            client.close()
            server.should_exit = True
            thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()

"""Runs the real application with several models, each with a fake worker that takes orders of its own."""

import asyncio
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from tests.server.orders import WorkerOrders
from tests.server.running import TIMEOUT_SECONDS, ClockedLoop, wait_for
from truedraft.engine.config import EngineConfig
from truedraft.engine.hub.fetch import Progress, Tell
from truedraft.server.app import create_app
from truedraft.server.cli.launch import bind, http_config
from truedraft.server.models.registry import Limits, Models
from truedraft.server.models.served import Fetch, Parts, ServedModel
from truedraft.server.observability.metrics import Metrics
from truedraft.server.services import Services
from truedraft.server.settings import Settings
from truedraft.server.text.tokenizer import Tokenizer
from truedraft.server.workers.open_requests import QueueLimits
from truedraft.server.workers.worker_client import WorkerClient
from truedraft.server.workers.worker_pool import WorkerPool

MIB = 1 << 20
FAKE_WORKER = (sys.executable, "-m", "tests.fake_worker")


@dataclass
class SeveralServer:
    url: str
    client: httpx.Client
    services: Services
    loop: ClockedLoop
    orders: Mapping[str, WorkerOrders]
    logs: Mapping[str, Path]
    starts: list[str] = field(default_factory=list)  # names of models, in the order of their loads

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def complete(self, model: str, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": model, "prompt": "x", "max_tokens": 4, **body})

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def states(self) -> dict[str, str]:
        return {card["id"]: card["status"]["value"] for card in self.get("/v1/models").json()["data"]}

    def model(self, name: str) -> ServedModel:
        return self.services.models.find(name)

    def wait_for_state(self, name: str, state: str) -> None:
        wait_for(lambda: self.states()[name] == state, f"{name} to be {state}")

    def wait_for_requests(self, name: str, number: int) -> None:
        """Waits until the workers of a model have so many."""

        def count() -> int:
            engine = self.model(name).engine
            return engine.num_requests if engine is not None else 0

        wait_for(lambda: count() == number, f"{number} requests of {name}")

    def wait_for_waiting(self, name: str, number: int) -> None:
        """Waits until so many requests wait for the load of a model."""
        uses = self.services.models._uses
        wait_for(lambda: uses[self.model(name)].num_waiting == number, f"{number} waiting for {name}")

    def metric(self, name: str, **labels: str) -> float:
        families = text_string_to_metric_families(self.get("/metrics").text)
        found = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return sum(found)

    def pass_time(self, seconds: float) -> None:
        self.loop.call_soon_threadsafe(self.loop.pass_time, seconds)


@contextmanager
def run_several(
    model_folder: Path,
    tokenizer: Tokenizer,
    log_folder: Path,
    names: tuple[str, ...] = ("a", "b", "c"),
    *,
    options: Mapping[str, tuple[str, ...]] | None = None,
    pinned: tuple[str, ...] = (),
    fetches: Mapping[str, Callable[[Tell], None]] | None = None,
    tokenizers: Mapping[str, Callable[[], Tokenizer]] | None = None,
    total: int | None = None,
    **settings: Any,
) -> Iterator[SeveralServer]:
    """Starts a server on a free port. ``options`` are those of each model's fake worker, ``total`` is all the
    memory that models may take."""
    entries = [
        {"name": name, "target": str(model_folder), "load": "always" if name in pinned else "on_demand"}
        for name in names
    ]
    configured = Settings(models=entries, **settings)
    metrics = Metrics(configured.metrics_prefix, dict.fromkeys(names, 1))
    orders = {name: WorkerOrders(log_folder / f"orders-{name}") for name in names}
    logs = {name: log_folder / f"log-{name}" for name in names}
    starts: list[str] = []

    def assemble(own: Settings, _: EngineConfig) -> Parts:
        name = own.model_name
        starts.append(name)
        files = ("--log", str(logs[name]), "--orders", str(orders[name].path))
        worker = WorkerClient(
            own.engine_config(),
            metrics.models[name].workers[0],
            max_restarts=own.max_worker_restarts,
            worker_command=(
                sys.executable,
                "-m",
                "tests.fake_worker",
                *files,
                *(options or {}).get(name, ()),
            ),
            first_backoff_seconds=0.2,
        )
        load = (tokenizers or {}).get(name, lambda: tokenizer)
        return Parts(WorkerPool([worker], QueueLimits.of(own)), load)

    def fetch_of(own: Settings) -> Fetch | None:
        fetch = (fetches or {}).get(own.model_name)
        if fetch is None:
            return None

        def run(tell: Tell) -> EngineConfig:
            fetch(tell)
            return own.engine_config()

        return run

    served = [
        ServedModel(
            own,
            metrics.models[own.model_name],
            partial(assemble, own),
            fetch_of(own),
            is_pinned=own.model_name in pinned,
        )
        for own in configured.of_models()
    ]
    limits = dataclasses.replace(Limits.of(configured), memory=lambda: total or 1 << 60)
    models = Models(served, limits, are_several=True)
    app = create_app(configured, models, metrics)
    server = uvicorn.Server(http_config(app, configured))
    loop = ClockedLoop()
    with bind("127.0.0.1", 0) as listener:

        def serve() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(server.serve(sockets=[listener]))

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS)
        running = SeveralServer(url, client, app.state.services, loop, orders, logs, starts)
        try:
            wait_for(lambda: server.started, "the port")
            yield running
        finally:
            client.close()
            server.should_exit = True
            for order in orders.values():
                order.go_on()
            thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()


def progress(done: int) -> Progress:
    return Progress("owner/model", done, 100)

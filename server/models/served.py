"""A served model is one object: its settings, its worker pool, its tokenizer, and what state they are in.

It knows nothing of other models; which of them are loaded is decided by ``server.models.registry``.
"""

import asyncio
import functools
import hashlib
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from truedraft.engine.messages import Ready
from truedraft.server.errors import NotReadyError
from truedraft.server.observability.metrics import ModelMetrics
from truedraft.server.settings import Settings
from truedraft.server.text.tokenizer import Tokenizer
from truedraft.server.version import package_version
from truedraft.server.workers.worker_pool import WorkerPool

T = TypeVar("T")

TokenizerLoader = Callable[[], Tokenizer]


class TokenizerFailedError(Exception):
    """Says why the tokenizer of a served model could not be loaded."""


class Parts(NamedTuple):
    """What a loaded model consists of: workers that have not been started, and how to get the tokenizer."""

    pool: WorkerPool
    load_tokenizer: TokenizerLoader


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model as routes see it."""

    name: str
    settings: Settings
    tokenizer: Tokenizer
    worker: Ready
    fingerprint: str
    engine: WorkerPool
    metrics: ModelMetrics


@dataclass(frozen=True, slots=True)
class Condition:
    """Says whether a model can take a request, and why not. Clients read the reason: it has no paths."""

    status: Literal["ready", "loading", "restarting", "failed", "stopped"]
    reason: str = ""


class ServedModel:
    def __init__(self, settings: Settings, metrics: ModelMetrics, assemble: Callable[[], Parts]) -> None:
        """``settings`` are the server's with this model's own."""
        self.settings = settings
        self.metrics = metrics
        self._pool, self._load_tokenizer = assemble()
        self._tokenizer: asyncio.Future[Tokenizer] | None = None
        self._pool.when_weights_changed = self._load_anew
        metrics.labelled.worker_pids = lambda: [worker.pid for worker in self._pool.workers]

    def _load_anew(self) -> None:
        """Other weights may have another tokenizer. No request is taken until it is there."""
        self._tokenizer = in_daemon_thread(self._load_tokenizer)

    @property
    def name(self) -> str:
        return self.settings.model_name

    @property
    def engine(self) -> WorkerPool:
        return self._pool

    def start(self) -> None:
        """Begins to load both; returns at once, so that the port opens before the models are there."""
        self._tokenizer = in_daemon_thread(self._load_tokenizer)
        self._pool.start()

    async def stop(self) -> None:
        await self._pool.stop()
        if self._tokenizer is not None:
            self._tokenizer.cancel()

    async def wait_until_ready(self) -> Ready:
        """Wait for the first load; raise ``WorkerFailedError`` or ``TokenizerFailedError``."""
        assert self._tokenizer is not None
        try:
            await asyncio.shield(self._tokenizer)
        except asyncio.CancelledError:
            if self._tokenizer.cancelled():
                raise TokenizerFailedError("The server is shutting down.") from None
            raise
        except Exception as error:
            raise TokenizerFailedError(f"The tokenizer could not be loaded: {error}") from error
        return await self._pool.wait_until_ready()

    @property
    def condition(self) -> Condition:
        state, tokenizer = self._pool.state, self._tokenizer
        if state.status != "ready":
            return Condition(state.status, state.reason)
        if tokenizer is None or not tokenizer.done():  # the engine may be ready before the tokenizer
            return Condition("loading", "The tokenizer is loading.")
        if tokenizer.cancelled():
            return Condition("stopped", "The server is shutting down.")
        if tokenizer.exception():
            return Condition("failed", "The tokenizer could not be loaded; the log says why.")
        return Condition("ready")

    @property
    def tokenizer(self) -> Tokenizer | None:
        """It is None until it is loaded, and if it could not be."""
        loaded = self._tokenizer
        if loaded is None or not loaded.done() or loaded.cancelled() or loaded.exception():
            return None
        return loaded.result()

    @property
    def worker(self) -> Ready | None:
        """What the worker said when it had loaded; None while there is none."""
        return self._pool.state.worker

    @property
    def fingerprint(self) -> str | None:
        """The ``system_fingerprint`` of answers; None while no worker is ready."""
        if (worker := self.worker) is None:
            return None
        settings = self.settings
        return system_fingerprint(settings.public_target, worker.fingerprint, settings.generation_config)

    def loaded(self) -> Model:
        """Returns the loaded model; ``NotReadyError`` while it is not."""
        condition, worker, tokenizer = self.condition, self.worker, self.tokenizer
        if condition.status != "ready" or worker is None or tokenizer is None:
            raise NotReadyError(condition.reason or "The models are loading.")
        fingerprint = self.fingerprint or ""
        return Model(self.name, self.settings, tokenizer, worker, fingerprint, self._pool, self.metrics)


def in_daemon_thread(load: Callable[[], T]) -> "asyncio.Future[T]":
    """Loads in a thread that, unlike those of asyncio's pool, does not delay a server that ends meanwhile."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(set_result: Callable[[Any], None], value: object) -> None:
        if not future.done():
            set_result(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], object] = future.set_result, load()
        except Exception as error:
            outcome = future.set_exception, error
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(finish, *outcome)

    threading.Thread(target=run, name="tokenizer", daemon=True).start()
    return future


@functools.cache
def system_fingerprint(target: str, worker: str, generation_config: str) -> str:
    """Names what a seed's tokens depend on: ``worker`` stands for weights, arithmetic, kernels and hardware.
    Neither the draft model nor how it is used is part of that."""
    configuration = "/".join([package_version(), target, worker, generation_config])
    return f"fp_{hashlib.sha256(configuration.encode()).hexdigest()[:12]}"

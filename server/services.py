"""One object has what every route needs: settings, engine, tokenizer, metrics, and whether they are ready.

Built by ``server.app``; routes get it through ``ServicesDep``.
"""

import asyncio
import functools
import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from truedraft.engine.messages import Ready
from truedraft.server.errors import NotReadyError
from truedraft.server.http.work import Work
from truedraft.server.observability.loop_lag import LoopMonitor, log_late
from truedraft.server.observability.metrics import Metrics
from truedraft.server.settings import Settings
from truedraft.server.text.grammar.validator import GrammarValidator
from truedraft.server.text.tokenizer import Tokenizer
from truedraft.server.version import package_version
from truedraft.server.workers.worker_pool import WorkerPool

T = TypeVar("T")

TokenizerLoader = Callable[[], Tokenizer]


class TokenizerFailedError(Exception):
    """The tokenizer could not be loaded, so the server cannot start."""


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model as the front end sees it."""

    tokenizer: Tokenizer
    worker: Ready
    fingerprint: str


class Services:
    def __init__(
        self, settings: Settings, engine: WorkerPool, metrics: Metrics, load_tokenizer: TokenizerLoader
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = metrics
        self.work = Work(settings)
        self.grammar_validator = GrammarValidator(settings)
        self.started = int(time.time())
        self._load_tokenizer = load_tokenizer
        self._tokenizer: asyncio.Future[Tokenizer] | None = None
        self._is_draining = False
        self._loop_monitor = LoopMonitor(
            lambda lag: metrics.requests.loop_lag.observe(lag.seconds),
            late_after=settings.loop_lag_warning,
            on_late=log_late,
        )
        metrics.requests.ready.set_function(lambda: self.not_ready_reason() is None)
        metrics.requests.running.set_function(lambda: engine.num_running)
        metrics.requests.waiting.set_function(lambda: engine.num_waiting)
        metrics.requests.waiting_for_turn.set_function(lambda: self.work.turns.num_waiting)
        metrics.exposed.worker_pids = lambda: [worker.pid for worker in engine.workers]

        engine.when_weights_changed = self._load_anew

    def _load_anew(self) -> None:
        """Other weights may have another tokenizer. No request is taken until it is there."""
        self._tokenizer = in_daemon_thread(self._load_tokenizer)

    async def start(self) -> None:
        """Begin to load both; returns at once, so that the port opens before the models are there."""
        self._loop_monitor.start()
        self._tokenizer = in_daemon_thread(self._load_tokenizer)
        self.engine.start()

    async def stop(self) -> None:
        self._loop_monitor.stop()
        await self.engine.stop()
        await self.grammar_validator.stop()
        self.work.stop()
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
        return await self.engine.wait_until_ready()

    def drain(self) -> None:
        """Take no more requests; those that are running go on."""
        self._is_draining = True

    @property
    def status(self) -> str:
        """Returns one word for ``/ready``."""
        if self._is_draining:
            return "draining"
        return "loading" if self._is_loading else self.engine.state.status

    @property
    def _is_loading(self) -> bool:
        """The engine may be ready before the tokenizer."""
        is_waiting = self._tokenizer is None or not self._tokenizer.done()
        return is_waiting and self.engine.state.status == "ready"

    def not_ready_reason(self) -> str | None:
        """Why a request cannot be taken now; None if it can."""
        state = self.engine.state
        if self._is_draining:
            return "The server is draining: it finishes what is running and takes no more requests."
        if state.status != "ready":
            return state.reason
        if self._tokenizer is None or not self._tokenizer.done():
            return "The tokenizer is loading."
        if self._tokenizer.cancelled():
            return "The server is shutting down."
        if self._tokenizer.exception():
            return "The tokenizer could not be loaded; the log says why."
        return None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """It is None until it is loaded, and if it could not be."""
        loaded = self._tokenizer
        if loaded is None or not loaded.done() or loaded.cancelled() or loaded.exception():
            return None
        return loaded.result()

    def fingerprint(self, worker: Ready) -> str:
        return system_fingerprint(
            self.settings.public_target, worker.fingerprint, self.settings.generation_config
        )

    def model(self) -> Model:
        """The loaded model, or ``NotReadyError``."""
        reason = self.not_ready_reason()
        worker = self.engine.state.worker
        if reason is not None or worker is None or self._tokenizer is None:
            raise NotReadyError(reason or "The models are loading.")
        return Model(self._tokenizer.result(), worker, self.fingerprint(worker))


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


def get_services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


async def _provide_services(request: Request) -> Services:
    """A coroutine, because FastAPI sends every plain function through a thread, for each request."""
    return get_services(request)


ServicesDep = Annotated[Services, Depends(_provide_services)]

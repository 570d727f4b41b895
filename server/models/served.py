"""A served model is one object: its settings, its worker pool, its tokenizer, and what state they are in.

It goes from unloaded to fetching, loading, ready, and through unloading back to unloaded or to sleeping; a
load may also end as failed. It knows nothing of other models: which of them are loaded is decided by
``server.models.registry``.
"""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

from truedraft.engine.config import EngineConfig
from truedraft.engine.hub.fetch import Progress, Tell
from truedraft.engine.hub.located import stage_of
from truedraft.engine.machine.heap import trim_heap
from truedraft.engine.messages import Adapter, Ready
from truedraft.server.errors import NotReadyError
from truedraft.server.models.adapters import ServedAdapters
from truedraft.server.observability.metrics import ModelMetrics
from truedraft.server.settings import Settings
from truedraft.server.text.tokenizer import Tokenizer
from truedraft.server.version import package_version
from truedraft.server.workers.worker_client import WorkerClient
from truedraft.server.workers.worker_pool import WorkerFailedError, WorkerPool

T = TypeVar("T")

TokenizerLoader = Callable[[], Tokenizer]
Status = Literal[
    "unloaded",
    "fetching",
    "loading",
    "ready",
    "restarting",
    "unloading",
    "sleeping",
    "failed",
    "stopped",
    "draining",  # the whole server is
]
# What a model that has no workers is at; with workers, these and the tokenizer say it.
Phase = Literal["unloaded", "fetching", "unloading", "sleeping", "failed", "stopped"]
REASONS: dict[Phase, str] = {
    "unloaded": "The model is not loaded; a request that names it loads it.",
    "fetching": "The model is being fetched.",
    "unloading": "The model is being unloaded.",
    "sleeping": "The model sleeps until POST /wake_up.",
    "failed": "The model could not be fetched; the log says why.",
    "stopped": "The server is shutting down.",
}
TOKENIZER_FAILED = "The tokenizer could not be loaded; the log says why."


class TokenizerFailedError(Exception):
    """Says why the tokenizer of a served model could not be loaded."""


class Parts(NamedTuple):
    """What a loaded model consists of: workers that have not been started, and how to get the tokenizer."""

    pool: WorkerPool
    load_tokenizer: TokenizerLoader


Assemble = Callable[[EngineConfig], Parts]
Fetch = Callable[[Tell], EngineConfig]


@dataclass(frozen=True, slots=True)
class Model:
    """Is a loaded model as routes see it, with the LoRA adapter that a request has named."""

    name: str
    settings: Settings
    tokenizer: Tokenizer
    worker: Ready
    fingerprint: str
    engine: WorkerPool
    metrics: ModelMetrics
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class Condition:
    """Says what a model is at, and why it cannot take a request. Clients read the reason: it has no paths."""

    status: Status
    reason: str = ""


class ServedModel:
    """Its owner calls ``fetch`` where ``must_fetch``, then ``start``, and ``unload``; others only look."""

    def __init__(
        self,
        settings: Settings,
        metrics: ModelMetrics,
        assemble: Assemble,
        fetch: Fetch | None = None,
        *,
        is_pinned: bool = False,
    ) -> None:
        """Holds an unloaded model. ``settings`` are the server's with this model's own. ``fetch`` is missing
        where the files are here already; it is called in a thread, and returns the engine's settings with
        paths. A pinned model is loaded at start, and is never unloaded for another one."""
        self.settings = settings
        self.is_pinned = is_pinned
        self.metrics = metrics
        self.adapters = ServedAdapters(settings)
        self.when_changed: Callable[[], None] = lambda: None
        self.progress: Progress | None = None  # what a fetch that goes on has told
        self.failure: WorkerFailedError | None = None  # why workers that had been ready are no more
        self.ready_at = 0.0
        self.load_seconds = 0.0
        self.memory: int | None = None  # what it takes at most, once that is known from a load
        self._assemble, self._fetch = assemble, fetch
        self._located = settings.engine_config() if fetch is None else None
        self._is_stopped = False
        self._phase: Phase = "unloaded"
        self._reason = REASONS["unloaded"]
        self._pool: WorkerPool | None = None
        self._load_tokenizer: TokenizerLoader | None = None
        self._tokenizer: asyncio.Future[Tokenizer] | None = None
        self._loading: asyncio.Task[Ready] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._fetching: asyncio.Future[EngineConfig] | None = None
        if settings.takes_adapters:
            metrics.adapters.max_loras = settings.max_loras
            metrics.adapters.names_in_use = lambda: self.adapters.names_in_use
        metrics.requests.loaded.set_function(lambda: self._pool is not None)
        metrics.labelled.worker_pids = lambda: [worker.pid for worker in self.workers]

    @property
    def name(self) -> str:
        return self.settings.model_name

    @property
    def engine(self) -> WorkerPool | None:
        """The workers; None unless the model is loaded or loading."""
        return self._pool

    @property
    def workers(self) -> Sequence[WorkerClient]:
        return self._pool.workers if self._pool is not None else ()

    @property
    def must_fetch(self) -> bool:
        return self._located is None

    @property
    def located(self) -> EngineConfig:
        """The engine's settings with paths of models; there must be nothing left to fetch."""
        assert self._located is not None
        return self._located

    async def fetch(self) -> None:
        """Fetches what is not here yet; raises what the fetch raises."""
        assert self._fetch is not None
        self._enter("fetching")
        loop = asyncio.get_running_loop()

        def tell(progress: Progress) -> None:
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(self._heard, progress)

        self._fetching = in_daemon_thread(partial(self._fetch, tell))
        try:
            self._located = await self._fetching
        except asyncio.CancelledError:
            raise
        except Exception:
            self._enter("failed")
            raise
        finally:
            self.progress = None
        self._enter("unloaded")

    def _heard(self, progress: Progress) -> None:
        if self._phase == "fetching":
            self.progress = progress
            self._enter("fetching", f"The model is being fetched: {stage_of(progress)}.")

    def start(self) -> None:
        """Begins to load; returns at once, so that a port can open before the model is there."""
        self.failure = None
        self._pool, self._load_tokenizer = self._assemble(self.located)
        self._pool.when_weights_changed = self._load_anew
        self._pool.when_changed = self._announce
        self._tokenizer = in_daemon_thread(self._load_tokenizer)
        self._pool.start()
        self._loading = asyncio.create_task(self._load(self._pool, self._tokenizer))
        self._loading.add_done_callback(_look_at)
        self._announce()

    def _load_anew(self) -> None:
        """Other weights may have another tokenizer. No request is taken until it is there."""
        assert self._load_tokenizer is not None
        self._tokenizer = in_daemon_thread(self._load_tokenizer)

    async def _load(self, pool: WorkerPool, tokenizer: "asyncio.Future[Tokenizer]") -> Ready:
        began = asyncio.get_running_loop().time()
        try:
            await asyncio.shield(tokenizer)
        except asyncio.CancelledError:
            if tokenizer.cancelled():
                raise TokenizerFailedError(REASONS["stopped"]) from None
            raise
        except Exception as error:
            raise TokenizerFailedError(f"The tokenizer could not be loaded: {error}") from error
        ready = await pool.wait_until_ready()
        self.ready_at = asyncio.get_running_loop().time()
        self.load_seconds = self.ready_at - began
        self.metrics.requests.loads.inc()
        states = [worker.state.worker for worker in pool.workers]
        self.memory = sum(each.worker_bytes + each.cache_bytes for each in states if each is not None) or None
        self._watching = asyncio.create_task(self._watch(pool))
        self._announce()
        return ready

    async def _watch(self, pool: WorkerPool) -> None:
        try:
            await pool.wait_until_failed()
        except WorkerFailedError as error:
            self.failure = error
            self._announce()

    async def wait(self) -> Ready:
        """Waits for the load that has begun; raises what it failed by."""
        assert self._loading is not None
        return await asyncio.shield(self._loading)

    def unload(
        self, to: Literal["unloaded", "sleeping", "failed"] = "unloaded", reason: str = ""
    ) -> "asyncio.Future[None]":
        """Ends the workers, and what has not finished with them. From now on nobody can get the model. The
        future ends when its memory is free; who gives up waiting for it changes nothing."""
        if self._unloading is None:
            pool, self._pool = self._pool, None
            assert pool is not None
            self._enter("unloading")
            self._unloading = asyncio.create_task(self._unload(pool, to, reason))
        return asyncio.shield(self._unloading)

    def rest(self, at: Literal["unloaded", "sleeping"]) -> None:
        """Has a model that is not loaded sleep, or wait for a request again."""
        assert self._pool is None
        self._enter(at)

    async def _unload(self, pool: WorkerPool, to: Phase, reason: str) -> None:
        try:
            await pool.stop()
            for worker in self.metrics.workers:
                worker.unloaded()
            await self._drop_tasks()
            # A vocabulary leaves tens of megabytes that the C library would keep.
            await in_daemon_thread(trim_heap)
        finally:
            self._unloading = None
            if not self._is_stopped:
                self._enter(to, reason)

    async def stop(self) -> None:
        """Ends everything: the server is shutting down."""
        self._is_stopped = True
        if self._unloading is not None:
            await self._unloading
        self._phase, self._reason = "stopped", REASONS["stopped"]
        if self._pool is not None:
            await self._pool.stop()
        if self._fetching is not None:
            self._fetching.cancel()
        await self._drop_tasks()

    async def _drop_tasks(self) -> None:
        tasks = [task for task in (self._watching, self._loading) if task is not None]
        for waits_for_ever in (self._tokenizer, self._watching):
            if waits_for_ever is not None:
                waits_for_ever.cancel()
        self._tokenizer = self._load_tokenizer = self._watching = None
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def phase(self) -> Phase | Literal["loaded"]:
        """Is ``loaded`` from the begin of a load on, whatever becomes of it, until it is unloaded."""
        return "loaded" if self._pool is not None else self._phase

    @property
    def condition(self) -> Condition:
        if self._pool is None or self._phase == "stopped":
            return Condition(self._phase, self._reason)
        state, tokenizer = self._pool.state, self._tokenizer
        if state.status != "ready":
            return Condition(state.status, state.reason)
        if tokenizer is None or not tokenizer.done():  # the engine may be ready before the tokenizer
            return Condition("loading", "The tokenizer is loading.")
        if tokenizer.cancelled():
            return Condition("stopped", REASONS["stopped"])
        if tokenizer.exception():
            return Condition("failed", TOKENIZER_FAILED)
        return Condition("ready")

    @property
    def stage(self) -> str:
        """Names what the first worker is loading; empty before it says so."""
        return self.workers[0].stage if self.workers else ""

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
        return self._pool.state.worker if self._pool is not None else None

    @property
    def fingerprint(self) -> str | None:
        """Returns the ``system_fingerprint`` of answers; None while no worker is ready."""
        if (worker := self.worker) is None:
            return None
        settings = self.settings
        return system_fingerprint(settings.public_target, worker.fingerprint, settings.generation_config)

    def loaded(self, name: str | None = None) -> Model:
        """Returns the loaded model, with the adapter that ``name`` means if it means one; ``NotReadyError``
        while it is not loaded."""
        condition, worker, tokenizer = self.condition, self.worker, self.tokenizer
        if condition.status != "ready" or worker is None or tokenizer is None or self._pool is None:
            raise NotReadyError(condition.reason or "The models are loading.")
        fingerprint, settings = self.fingerprint or "", self.settings
        adapter = None
        if name is not None and name not in settings.served_names:
            adapter = self.adapters.find(self.adapters.own_name(name) or name, worker)
            adapted = f"{worker.fingerprint}/{adapter.digest}"
            fingerprint = system_fingerprint(settings.public_target, adapted, settings.generation_config)
        return Model(self.name, settings, tokenizer, worker, fingerprint, self._pool, self.metrics, adapter)

    def _enter(self, phase: Phase, reason: str = "") -> None:
        self._phase, self._reason = phase, reason or REASONS[phase]
        self._announce()

    def _announce(self) -> None:
        self.when_changed()


def _look_at(task: "asyncio.Task[Any]") -> None:
    """Keeps asyncio from reporting an exception that nobody waits for."""
    if not task.cancelled():
        task.exception()


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


@cache
def system_fingerprint(target: str, worker: str, generation_config: str) -> str:
    """Names what a seed's tokens depend on: ``worker`` stands for weights, arithmetic, kernels and hardware.
    Neither the draft model nor how it is used is part of that."""
    configuration = "/".join([package_version(), target, worker, generation_config])
    return f"fp_{hashlib.sha256(configuration.encode()).hexdigest()[:12]}"

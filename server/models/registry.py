"""The registry knows all models of a server by the names that requests use, and which of them are loaded.

Who asks for a model gets it once it is loaded, and keeps it until the request has ended. Where there is no
room for one more, the least recently used model that no request uses makes room. If requests use all of them,
the one that has had its turn takes no new ones until the other has been loaded: nobody waits for ever.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Literal, NoReturn, Self

from pydantic import ByteSize

from truedraft.engine.machine.limits import total_memory
from truedraft.server.errors import (
    ApiError,
    ModelBusyError,
    ModelLoadFailedError,
    ModelNotFoundError,
    NotReadyError,
    ShuttingDownError,
)
from truedraft.server.models.memory import FRONT_END_BYTES, estimate
from truedraft.server.models.served import ServedModel
from truedraft.server.settings import Settings
from truedraft.server.workers.worker_pool import WorkerFailedError

logger = logging.getLogger("truedraft.models")

# A model that requests use all the time stays for so many times as long as its load took, before another one
# may take its place.
TURN = 4
# A wait for a turn's end lasts so long at least: a shorter one might not move the clock.
LEAST_SECONDS = 0.01
# A load that has failed is not tried again before this many seconds, unless it is asked for by /models/load.
RETRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of the same names, and the memory that all models together may take."""

    max_loaded_models: int | None = None
    idle_unload: float | None = None
    load_timeout: float = 600.0
    drain_timeout: float = 30.0
    memory: Callable[[], int] = lambda: total_memory() - FRONT_END_BYTES

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(
            settings.max_loaded_models, settings.idle_unload, settings.load_timeout, settings.drain_timeout
        )


@dataclass
class Use:
    """Says how a model is used: by how many requests, and since when by none."""

    num_requests: int = 0
    num_waiting: int = 0  # they wait for its load
    last: float = 0.0
    makes_room: bool = False  # it takes no new requests, since another model needs its place
    leaves: bool = False  # it takes none, since it was asked to leave
    failed_at: float | None = None
    failure: str = ""  # clients read it

    @property
    def takes_requests(self) -> bool:
        return not (self.makes_room or self.leaves)

    @property
    def is_idle(self) -> bool:
        """Requests that wait for a model that takes none will wait on until it is back."""
        return not self.num_requests and (not self.takes_requests or not self.num_waiting)


class Models:
    """Has one model or several; the first is meant where a probe names none."""

    def __init__(
        self, models: Sequence[ServedModel], limits: Limits | None = None, *, are_several: bool = False
    ) -> None:
        """A model that is not one of several is loaded at start, and what its load fails by ends the
        server."""
        self._models = models
        self.are_several = are_several
        self._limits = limits or Limits()
        self._by_name = {name: model for model in models for name in model.settings.served_names}
        self._uses = {model: Use() for model in models}
        self._loads: dict[ServedModel, asyncio.Task[None]] = {}
        self._timers: dict[ServedModel, asyncio.TimerHandle] = {}
        self.starts: list[asyncio.Task[None]] = []  # loads that begin with the server
        self._placing = asyncio.Lock()
        self._news = asyncio.Event()
        self._is_starting = True
        self._is_stopped = False
        for model in models:
            model.when_changed = self._has_news

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def first(self) -> ServedModel:
        return self._models[0]

    def names_for(self, allowed: frozenset[str] | None = None) -> list[str]:
        """Returns all names that a key may use, aliases and LoRA adapters included."""
        names = [name for name, model in self._by_name.items() if is_allowed(model, allowed)]
        adapters = [(name, model) for model in self._models for name in model.adapters.names]
        return names + [
            name for name, model in adapters if is_allowed(model, allowed) or name in (allowed or ())
        ]

    @property
    def num_requests(self) -> int:
        """Counts the HTTP requests that have been taken and are not answered yet."""
        return sum(model.engine.num_http_requests for model in self if model.engine is not None)

    def allowed(self, names: frozenset[str] | None) -> list[ServedModel]:
        """Returns the models that a key with these names may use; None is all."""
        return [model for model in self._models if is_allowed(model, names)]

    def find(self, name: str, allowed: frozenset[str] | None = None) -> ServedModel:
        """Returns the model that is served by this name, or has a LoRA adapter of it, or raises
        ``ModelNotFoundError``. With ``allowed`` there is only what has one of these names."""
        model = self._by_name.get(name)
        if model is not None and is_allowed(model, allowed):
            return model
        for each in self._models if model is None else ():
            own = each.adapters.own_name(name)
            if own is not None and (is_allowed(each, allowed) or own in (allowed or ())):
                return each
        names = self.names_for(allowed)
        raise ModelNotFoundError(
            f"The model '{name}' does not exist; this server has '{', '.join(names)}'.", param="model"
        )

    def start(self) -> None:
        """Begins to load the models that are loaded at start; returns at once."""
        if not self.are_several and not self.first.must_fetch:
            self.first.start()  # before anything else happens
        self.starts = [self._begin(model) for model in self.loaded_at_start]

    @property
    def loaded_at_start(self) -> list[ServedModel]:
        return [model for model in self._models if model.is_pinned or not self.are_several]

    async def wait_until_ready(self) -> None:
        """Waits for the models that are loaded at start. Raises what the load of a single one failed by; one
        of several may fail without the others."""
        try:
            await asyncio.gather(*self.starts, return_exceptions=self.are_several)
        except asyncio.CancelledError:
            if self._is_stopped:
                raise WorkerFailedError("The server is shutting down.") from None
            raise

    async def wait_until_failed(self) -> NoReturn:
        """Raises ``WorkerFailedError`` once no further worker of a single model will be started."""
        while self.are_several or self.first.failure is None:
            await self.news()
        raise self.first.failure

    async def stop(self) -> None:
        self.abandon()
        await asyncio.gather(*(model.stop() for model in self._models))

    def abandon(self) -> None:
        """Fails every request that is still open or waits for a model."""
        self._is_stopped = True
        for timer in self._timers.values():
            timer.cancel()
        for task in self._loads.values():
            task.cancel()
        for model in self._models:
            if model.engine is not None:
                model.engine.abandon()

    async def news(self, seconds: float | None = None) -> None:
        """Waits until something about a model changes, for so long at most."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)

    def must_wait(self, model: ServedModel) -> bool:
        """Tells whether a request would have to wait for the model."""
        return model.condition.status != "ready" or not self._uses[model].takes_requests

    async def take(self, model: ServedModel) -> None:
        """Returns once the model is loaded, which it then stays until it is given back. Use a ``Hold``."""
        use = self._uses[model]
        try:
            async with asyncio.timeout(self._limits.load_timeout):
                while not (use.takes_requests and model.condition.status in ("ready", "restarting")):
                    self._check_may_load(model)
                    await self._bring(model)
        except TimeoutError:
            raise NotReadyError(self._too_late(model)) from None
        use.num_requests += 1
        use.last = asyncio.get_running_loop().time()

    def give_back(self, model: ServedModel) -> None:
        use = self._uses[model]
        use.num_requests -= 1
        use.last = asyncio.get_running_loop().time()
        self._watch_idleness(model)
        self._has_news()

    async def load(self, model: ServedModel) -> None:
        """Loads the model as a request would, though it sleeps or has just failed."""
        self._uses[model].failed_at = None
        if model.phase == "sleeping":
            model.rest("unloaded")
        try:
            async with asyncio.timeout(self._limits.load_timeout):
                while model.condition.status != "ready":
                    self._check_may_load(model)
                    await self._bring(model)
        except TimeoutError:
            raise NotReadyError(self._too_late(model)) from None

    async def unload(self, model: ServedModel, to: Literal["unloaded", "sleeping"] = "unloaded") -> None:
        """Unloads the model once its requests have ended; ``ModelBusyError`` if that takes too long."""
        use = self._uses[model]
        if use.leaves:
            raise ModelBusyError(f"The model '{model.name}' is being unloaded already.")
        use.leaves = True
        try:
            async with asyncio.timeout(self._limits.drain_timeout):
                while model.condition.status in ("fetching", "loading", "unloading") or use.num_requests:
                    await self.news()
            if model.engine is None:
                model.rest(to)
            else:
                await self._unload(model, to)
        except TimeoutError:
            raise ModelBusyError(
                f"The model '{model.name}' was not unloaded: after {self._limits.drain_timeout:g} s "
                f"(drain_timeout) it is {model.condition.status}, with {use.num_requests} requests."
            ) from None
        finally:
            use.leaves = False
            self._has_news()

    def _check_may_load(self, model: ServedModel) -> None:
        """Raises what a request gets that is not to wait for the model."""
        use, condition = self._uses[model], model.condition
        if self._is_stopped:
            raise ShuttingDownError("The server is shutting down.")
        if condition.status == "sleeping" or (self._is_starting and not self.are_several):
            raise NotReadyError(condition.reason)
        now = asyncio.get_running_loop().time()
        if use.failed_at is not None and now - use.failed_at < RETRY_SECONDS:
            raise ModelLoadFailedError(f"The model '{model.name}' could not be loaded: {use.failure}")

    def _too_late(self, model: ServedModel) -> str:
        condition = model.condition
        return (
            f"The model '{model.name}' was not there after {self._limits.load_timeout:g} s (load_timeout). "
            f"It is {condition.status}: {condition.reason}"
        )

    def _begin(self, model: ServedModel) -> "asyncio.Task[None]":
        """Returns the one task that brings the model."""
        if (task := self._loads.get(model)) is None:
            # It has a context of its own: what the workers log later is of no request.
            task = asyncio.create_task(self._place_and_load(model), context=Context())
            self._loads[model] = task
            task.add_done_callback(lambda done: self._has_ended(model, done))
        return task

    def _has_ended(self, model: ServedModel, task: "asyncio.Task[None]") -> None:
        del self._loads[model]
        use = self._uses[model]
        use.failed_at = None
        if not task.cancelled() and (error := task.exception()) is not None:
            use.failed_at = asyncio.get_running_loop().time()
            use.failure = error.message if isinstance(error, ApiError) else model.condition.reason
            if self.are_several or not self._is_starting:
                logger.error("The model %s could not be loaded: %s", model.name, error)
        elif not task.cancelled():
            self._is_starting = False
        self._watch_idleness(model)
        self._has_news()

    async def _bring(self, model: ServedModel) -> None:
        """Waits for the task that brings the model; ``ModelLoadFailedError`` if that fails."""
        task, use = self._begin(model), self._uses[model]
        use.num_waiting += 1
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if not task.cancelled() or (this is not None and this.cancelling()):
                raise
        except Exception:
            self._check_may_load(model)
            raise
        finally:
            use.num_waiting -= 1
            if not use.num_waiting and model.phase in ("unloaded", "failed") and not model.is_pinned:
                task.cancel()  # nobody waits for a place any more

    async def _place_and_load(self, model: ServedModel) -> None:
        use = self._uses[model]
        if model.must_fetch:
            await model.fetch()
        async with self._placing:
            while use.leaves or model.phase == "unloading":
                await self.news()
            if model.phase == "loaded" and model.condition.status == "failed":
                await model.unload()
            if model.phase in ("unloaded", "failed"):
                await self._make_room(model)
            if model.phase == "sleeping":  # it was told to meanwhile
                return
            if model.phase != "loaded":
                model.start()
        began = asyncio.get_running_loop().time()
        try:
            await model.wait()
        except Exception:
            if self.are_several or not self._is_starting:
                await model.unload("failed", model.condition.reason)
            raise
        if self.are_several:
            seconds = asyncio.get_running_loop().time() - began
            size = f", {ByteSize(model.memory).human_readable()} with full caches" if model.memory else ""
            logger.info("The model %s is loaded: %.1f s%s.", model.name, seconds, size)

    async def _make_room(self, model: ServedModel) -> None:
        if not self.are_several:
            return
        self._check_fits(model)
        try:
            while self._lacks_room(model):
                idle = [each for each in self._movable() if self._uses[each].is_idle]
                if idle:
                    await self._unload(min(idle, key=lambda each: self._uses[each].last))
                else:
                    await self._ask_for_room()
        finally:
            for use in self._uses.values():
                use.makes_room = False
            self._has_news()

    async def _ask_for_room(self) -> None:
        """Waits until something changes, or until a model that requests use has had its turn. It then takes
        no new ones."""
        now = asyncio.get_running_loop().time()
        busy = [each for each in self._movable() if each.condition.status == "ready"]
        ends = {each: each.ready_at + TURN * each.load_seconds for each in busy}
        over = [each for each in busy if ends[each] <= now]
        if over and not any(self._uses[each].makes_room for each in busy):
            self._uses[min(over, key=lambda each: ends[each])].makes_room = True
            return
        soonest = min((max(end - now, LEAST_SECONDS) for end in ends.values() if end > now), default=None)
        await self.news(soonest)

    def _movable(self) -> list[ServedModel]:
        """Returns what may make room: loaded models but those that are always so."""
        return [
            model
            for model in self._models
            if model.phase == "loaded" and model.condition.status != "loading" and not model.is_pinned
        ]

    def _lacks_room(self, model: ServedModel) -> bool:
        present = [each for each in self._models if each.phase in ("loaded", "unloading")]
        most = self._limits.max_loaded_models
        if most is not None and len(present) >= most:
            return True
        return sum(map(memory_of, (*present, model))) > self._limits.memory()

    def _check_fits(self, model: ServedModel) -> None:
        """Refuses what would not fit if all others that may make room did."""
        staying = [each for each in self._models if each.is_pinned and each is not model]
        taken = sum(memory_of(each) for each in staying if not each.must_fetch)
        needed, there = memory_of(model), self._limits.memory()
        if taken + needed > there:
            sizes = [ByteSize(max(0, number)).human_readable() for number in (needed, there - taken)]
            raise ModelLoadFailedError(
                f"The model '{model.name}' may take {sizes[0]} of memory, but there are {sizes[1]} for it. "
                "Set its cache_memory to less, or use a smaller quantisation."
            )

    def _unload(
        self, model: ServedModel, to: Literal["unloaded", "sleeping"] = "unloaded"
    ) -> "asyncio.Future[None]":
        logger.info("The model %s is being unloaded.", model.name)
        return model.unload(to)

    def _watch_idleness(self, model: ServedModel) -> None:
        """Sees to it that the model is unloaded once nobody has used it for so long."""
        seconds = self._limits.idle_unload
        if seconds is None or self._is_stopped or (self.are_several and model.is_pinned):
            return
        if (timer := self._timers.pop(model, None)) is not None:
            timer.cancel()
        if not self._uses[model].num_requests and model.phase == "loaded":
            loop = asyncio.get_running_loop()
            self._timers[model] = loop.call_later(seconds, self._unload_if_idle, model)

    def _unload_if_idle(self, model: ServedModel) -> None:
        if self._uses[model].is_idle and model.condition.status == "ready":
            self._unload(model)

    def _has_news(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class Hold:
    """Keeps one model loaded, from ``take`` to ``release``. Whoever makes it releases it in any case."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self.model: ServedModel | None = None

    async def take(self, model: ServedModel) -> None:
        """Waits for the model; a hold on another one ends."""
        self.release()
        await self._models.take(model)
        self.model = model

    def release(self) -> None:
        if self.model is not None:
            self._models.give_back(self.model)
            self.model = None


def is_allowed(model: ServedModel, allowed: frozenset[str] | None) -> bool:
    """Tells whether a key that may use ``allowed`` models may use this one."""
    return allowed is None or not allowed.isdisjoint(model.settings.served_names)


def memory_of(model: ServedModel) -> int:
    """Returns what a model takes at most: as its last load has told, or else estimated."""
    return model.memory or estimate(model.settings.worker_configs(model.located))

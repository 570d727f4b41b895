"""The engine as the routes see it: one or several workers, and the requests that are divided among them.

A request goes to the worker where it costs least: each open sequence of a worker counts 1, and every 256
tokens of the prompt that its prefix cache probably holds count -1. When a worker dies, its requests that
have not received a token go to the others, or wait for its replacement. Knows token ids, neither text nor
HTTP routes. Built by ``server.cli.launch``.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, overload

import msgspec

from truedraft.engine.messages import (
    Abort,
    Adapter,
    AdapterLoaded,
    Embed,
    Embedded,
    Generate,
    LoadAdapter,
    Ready,
    TokenOutput,
    UnloadAdapter,
)
from truedraft.server.errors import ApiError, NotReadyError, ShuttingDownError
from truedraft.server.workers.engine_stream import EngineRequest, EngineStream, Output
from truedraft.server.workers.open_requests import OpenRequests, QueueLimits
from truedraft.server.workers.prefix_affinity import KnownPrefixes, prefixes_of
from truedraft.server.workers.worker_client import EngineState, WorkerClient

logger = logging.getLogger("truedraft.worker")

# Prompt tokens in a worker's prefix cache that outweigh one of its open sequences.
TOKENS_PER_SEQUENCE = 256

# States of workers that are not ready; the pool's is the first of those that there are.
NOT_READY = ("loading", "restarting", "failed", "stopped")


class WorkerFailedError(Exception):
    """No worker is left, so the server ends."""


class WorkerPool:
    """Hands requests to workers. ``shares_prefixes`` says whether these have prefix caches."""

    def __init__(
        self,
        workers: Sequence[WorkerClient],
        limits: QueueLimits | None = None,
        *,
        shares_prefixes: bool = True,
    ) -> None:
        self.workers = workers
        self._requests = OpenRequests(limits or QueueLimits())
        self._looks_at_prefixes = shares_prefixes and len(workers) > 1
        self._known_prefixes = [KnownPrefixes() for _ in workers]
        # Answers about adapters that are awaited, with the numbers of the workers that were asked.
        self._asked: dict[str, tuple[int, asyncio.Future[Adapter]]] = {}
        self.when_weights_changed: Callable[[], None] = lambda: None
        self.when_changed: Callable[[], None] = lambda: None  # the state of a worker has

    @property
    def state(self) -> EngineState:
        """Returns the state of the ready worker with the smallest caches, or of one that is not ready."""
        states = [worker.state for worker in self.workers]
        ready = [(state.worker.num_target_blocks, state) for state in states if state.worker is not None]
        if ready:
            return min(ready, key=lambda pair: pair[0])[1]
        return min(states, key=lambda state: NOT_READY.index(state.status))

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_http_requests(self) -> int:
        """Unfinished HTTP requests, of which some have several prompts."""
        return self._requests.num_http_requests

    def num_sequences(self, number: int) -> int:
        """Unfinished sequences of worker ``number``."""
        return self._requests.num_sequences(number)

    def start(self) -> None:
        for number, worker in enumerate(self.workers):
            worker.start(self, number)

    async def wait_until_ready(self) -> Ready:
        """Waits for the first worker; raises ``WorkerFailedError`` if none can load."""
        for first in asyncio.as_completed([worker.first_load() for worker in self.workers]):
            if (ready := (await first).worker) is not None:
                return ready
        raise WorkerFailedError(self.state.cause or self.state.reason)

    async def wait_until_failed(self) -> NoReturn:
        """Raise ``WorkerFailedError`` once no further worker will be started."""
        *_, reason = await asyncio.gather(*(worker.failure() for worker in self.workers))
        raise WorkerFailedError(reason)

    async def stop(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self.workers))
        self.abandon()

    def abandon(self) -> None:
        self._fail_asked(ShuttingDownError("The server is shutting down."))
        self._requests.fail_all(ShuttingDownError("The server is shutting down."))

    def check_room(self, num_sequences: int, num_tokens: int = 0, key: str = "") -> None:
        self._requests.check_room(num_sequences, num_tokens, key)

    @overload
    def submit(self, requests: Sequence[Generate], key: str = "") -> EngineStream[TokenOutput]: ...

    @overload
    def submit(self, requests: Sequence[Embed], key: str = "") -> EngineStream[Embedded]: ...

    def submit(self, requests: Sequence[EngineRequest], key: str = "") -> EngineStream[Any]:
        state = self.state
        if state.status != "ready":
            raise NotReadyError(state.reason)
        num_tokens = sum(request.num_prompt_tokens for request in requests)
        self.check_room(sum(request.n for request in requests), num_tokens, key)
        requests = [self._in_line(request, key) for request in requests]
        stream: EngineStream[Any] = EngineStream(requests, self._abort)
        try:
            for request in requests:
                self._requests.add(request, stream)
                self._assign(request)
        except Exception:
            stream.close()  # aborts the parts that were submitted
            raise
        return stream

    async def load_adapter(self, name: str, path: str) -> list[Adapter | BaseException]:
        """Has every worker that is ready load an adapter; others do so when they are asked for it. Returns
        what each of them has loaded, or why it has not."""
        if not (numbers := self._ready()):
            raise NotReadyError(self.state.reason)
        ids = {f"adapter-{uuid.uuid4().hex}": number for number in numbers}
        answers: list[asyncio.Future[Adapter]] = []
        for request_id, number in ids.items():
            answers.append(asyncio.get_running_loop().create_future())
            self._asked[request_id] = number, answers[-1]
            self.workers[number].send(LoadAdapter(request_id, name, path))
        try:
            return await asyncio.gather(*answers, return_exceptions=True)
        finally:
            for request_id in ids:
                self._asked.pop(request_id, None)

    def unload_adapter(self, digest: str) -> None:
        """Has the workers forget an adapter; one that restarts knows none but those of its settings."""
        for worker in self.workers:
            worker.send(UnloadAdapter(digest))

    async def clear_prefixes(self) -> None:
        """Lets all workers that are ready forget their prefixes; others have none yet."""
        if not (ready := self._ready()):
            raise NotReadyError(self.state.reason)
        for number in ready:
            self._known_prefixes[number].clear()
        await asyncio.gather(*(self.workers[number].clear_prefixes() for number in ready))

    def _in_line(self, request: EngineRequest, key: str) -> EngineRequest:
        """Returns the request with its key, and its place in that one's line."""
        if not key:
            return request
        if isinstance(request, Embed):
            return msgspec.structs.replace(request, tenant=key)
        return msgspec.structs.replace(request, tenant=key, place=self._requests.place(request, key))

    def _assign(self, request: EngineRequest) -> None:
        """Assigns a request to the ready worker where it costs least; there must be one."""
        looks = self._looks_at_prefixes
        prefixes = prefixes_of(request) if looks and isinstance(request, Generate) else []

        def cost(number: int) -> float:
            saved = self._known_prefixes[number].longest(prefixes) / TOKENS_PER_SEQUENCE
            return self._requests.num_sequences(number) - saved

        number = min(self._ready(), key=cost)
        self._known_prefixes[number].add(prefixes)
        self._requests.assign(request, number)
        self.workers[number].send(request)

    def _ready(self) -> list[int]:
        return [number for number, worker in enumerate(self.workers) if worker.state.status == "ready"]

    def _abort(self, request_id: str, index: int | None) -> None:
        number = self._requests.worker_of(request_id)
        if number is not None:
            self.workers[number].send(Abort(request_id, index))
        self._requests.forget_if_finished(request_id)

    # What the workers report.

    def outputs(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self._requests.deliver(output)

    def adapter_loaded(self, answer: AdapterLoaded) -> None:
        _, future = self._asked.get(answer.request_id, (0, None))
        if future is not None and not future.done():
            future.set_result(answer.adapter)

    def request_failed(self, request_id: str, error: ApiError) -> None:
        _, future = self._asked.get(request_id, (0, None))
        if future is None:
            self._requests.fail(request_id, error)
        elif not future.done():
            future.set_exception(error)

    def _fail_asked(self, error: ApiError, number: int | None = None) -> None:
        for asked, future in self._asked.values():
            if number in (None, asked) and not future.done():
                future.set_exception(error)

    def weights_changed(self) -> None:
        self.when_weights_changed()

    def worker_ready(self, number: int) -> None:
        for request in self._requests.unassigned():
            self._assign(request)
        self.when_changed()

    def worker_lost(self, number: int, error: ApiError, *, was_ready: bool) -> None:
        self._known_prefixes[number].clear()
        self._fail_asked(error, number)
        self._requests.lose_worker(number, error)
        state = self.workers[number].state
        if self._ready():
            if state.status == "failed":
                logger.error("%s The others serve on without worker %d.", state.cause, number)
            self.worker_ready(number)
        elif not was_ready or self.state.status == "failed":  # when the next will be ready is unknown
            self._requests.fail_all(error)
        self.when_changed()

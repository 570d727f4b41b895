"""The front end's side of the engine: submit requests, fan outputs out, keep a worker alive.

``EngineClient`` is what the rest of the server sees; ``WorkerClient`` implements it with a supervised
worker process. Knows token ids and processes, neither text nor HTTP routes. Built by ``server.launch``.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from engine.config import EngineConfig
from engine.messages import (
    Abort,
    Failed,
    FromWorker,
    Generate,
    Ready,
    SpeculationState,
    Stats,
    StepOutput,
)
from server.engine_stream import EngineStream
from server.errors import (
    ApiError,
    EngineError,
    InvalidRequestError,
    NotReadyError,
    WorkerLostError,
)
from server.open_requests import OpenRequests
from server.worker_process import WorkerProcess

logger = logging.getLogger("foretoken.worker")

WORKER_COMMAND = (sys.executable, "-m", "engine.worker")

# Codes of ``Failed`` that say that the request cannot be served as it is.
REFUSAL_CODES = frozenset(
    {"context_length_exceeded", "empty_prompt", "invalid_token_id", "speculation_unavailable"}
)

# A worker that served this long before it died is restarted without delay.
STABLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class EngineState:
    """Whether the engine can take a request, and why not."""

    status: Literal["loading", "ready", "restarting", "failed", "stopped"]
    reason: str
    worker: Ready | None = None


class EngineObserver(Protocol):
    """Told what happens to the worker; implemented by ``server.metrics``."""

    def worker_ready(self, ready: Ready) -> None: ...

    def worker_lost(self) -> None: ...

    def stats(self, stats: Stats) -> None: ...

    def speculation(self, state: Mapping[str, Any]) -> None: ...


class EngineClient(Protocol):
    @property
    def state(self) -> EngineState: ...

    @property
    def num_requests(self) -> int:
        """Requests the engine has not finished."""
        ...

    @property
    def speculation(self) -> dict[str, Any]:
        """What the worker last said of its draft lengths; empty before the first step."""
        ...

    @property
    def stats(self) -> Stats | None:
        """What the worker last counted; None before its first step."""
        ...

    async def start(self) -> None: ...

    async def wait_until_ready(self) -> Ready:
        """Wait for the first load; raise ``WorkerFailedError`` if that fails."""
        ...

    async def stop(self) -> None: ...

    def abandon(self) -> None:
        """End every request with an error."""
        ...

    def submit(self, requests: Sequence[Generate]) -> EngineStream:
        """Hand over the prompts of one HTTP request, or raise ``NotReadyError`` or ``QueueFullError``."""
        ...


class WorkerFailedError(Exception):
    """The worker could not load, so the server cannot start."""


class WorkerClient:
    def __init__(
        self,
        config: EngineConfig,
        observer: EngineObserver,
        *,
        max_queued_requests: int,
        max_queued_tokens: int | None = None,
        worker_command: Sequence[str] = WORKER_COMMAND,
        first_backoff_seconds: float = 0.5,
        max_backoff_seconds: float = 30.0,
    ) -> None:
        self._config = config
        self._observer = observer
        self._worker_command = worker_command
        self._first_backoff_seconds = first_backoff_seconds
        self._max_backoff_seconds = max_backoff_seconds
        self._state = EngineState("loading", "The models are loading.")
        self._first_load_over = asyncio.Event()
        self._worker: WorkerProcess | None = None
        self._load_error = ""
        self._speculation: dict[str, Any] = {}
        self._stats: Stats | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._requests = OpenRequests(max_queued_requests, max_queued_tokens)

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def speculation(self) -> dict[str, Any]:
        return self._speculation

    @property
    def stats(self) -> Stats | None:
        return self._stats

    async def start(self) -> None:
        self._supervision = asyncio.create_task(self._supervise())

    async def wait_until_ready(self) -> Ready:
        await self._first_load_over.wait()
        if self._state.worker is None:
            raise WorkerFailedError(self._state.reason)
        return self._state.worker

    async def stop(self) -> None:
        self._state = EngineState("stopped", "The server is shutting down.")
        if self._worker is not None:
            await self._worker.stop()
        if self._supervision is not None:
            self._supervision.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervision
        self._first_load_over.set()
        self.abandon()

    def abandon(self) -> None:
        self._requests.fail_all(WorkerLostError("The server is shutting down."))

    def submit(self, requests: Sequence[Generate]) -> EngineStream:
        if self._state.status != "ready" or self._worker is None:
            raise NotReadyError(self._state.reason)
        self._requests.check_room(requests)
        stream = EngineStream(requests, self._abort)
        try:
            for request in requests:
                self._requests.add(request, stream)
                self._worker.send(request)
        except Exception:
            stream.close()  # a part of the request is not wanted
            raise
        return stream

    def _abort(self, request_id: str, index: int | None) -> None:
        if self._worker is not None and request_id in self._requests:
            self._worker.send(Abort(request_id, index))
        self._requests.forget_if_finished(request_id)

    async def _supervise(self) -> None:
        """Run worker after worker; give up only if the very first never becomes ready."""
        backoff = self._first_backoff_seconds
        number = 0
        while True:
            started = time.monotonic()
            reason = await self._run_worker(number)
            if self._state.status == "stopped":
                return
            lost = WorkerLostError(f"The request was lost. {reason}")
            if self._state.status == "ready":
                self._requests.fail_lost(lost)
            else:  # nobody knows when a worker will load again
                self._requests.fail_all(lost)
            if not self._first_load_over.is_set():
                self._state = EngineState("failed", reason)
                self._first_load_over.set()
                return
            self._state = EngineState("restarting", f"{reason} It is being restarted.")
            self._observer.worker_lost()
            if time.monotonic() - started >= STABLE_SECONDS:
                backoff = self._first_backoff_seconds
            logger.error("%s Restarting in %.1f s.", reason, backoff)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, self._max_backoff_seconds)
            number += 1

    async def _run_worker(self, number: int) -> str:
        """One worker from spawn to death; returns why it died."""
        self._load_error = ""
        try:
            self._worker = await WorkerProcess.start(self._worker_command, self._config, number)
            exit_code = await self._worker.run(self._receive)
        except Exception as error:
            logger.exception("The connection to the worker broke")
            return f"The worker could not be run: {error}."
        finally:
            self._worker = None
        return self._load_error or _describe_exit(exit_code, was_ready=self._state.status == "ready")

    def _receive(self, message: FromWorker) -> None:
        match message:
            case StepOutput():
                self._stats = message.stats
                self._observer.stats(message.stats)
                for output in message.outputs:
                    self._requests.deliver(output)
            case Failed(request_id=""):  # not one request: the worker itself cannot go on
                self._load_error = f"The worker failed: {message.message}"
            case Failed():
                self._requests.fail(message.request_id, _error_from(message))
            case SpeculationState():
                self._speculation = message.state
                self._observer.speculation(message.state)
            case Ready():
                assert self._worker is not None
                self._speculation, self._stats = {}, None
                self._state = EngineState("ready", "The server is ready.", message)
                self._observer.worker_ready(message)
                self._first_load_over.set()
                for request in self._requests.submit_again():
                    self._worker.send(request)


def _error_from(failed: Failed) -> ApiError:
    """A request beyond the engine's limits is the client's fault, everything else ours."""
    if failed.code in REFUSAL_CODES:
        return InvalidRequestError(failed.message, code=failed.code)
    return EngineError(failed.message, code=failed.code)


def _describe_exit(exit_code: int, *, was_ready: bool) -> str:
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"
    when = "" if was_ready else " while loading; its own messages are above"
    return f"The worker {how}{when}."

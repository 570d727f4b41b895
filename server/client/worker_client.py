"""The front end's side of the engine: submit requests, fan outputs out, keep a worker alive.

The worker process is started again when it dies, and killed first when it hangs. Knows token ids and
processes, neither text nor HTTP routes. Built by ``server.launch``.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import msgspec

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
from server.client.engine_stream import EngineStream
from server.client.open_requests import OpenRequests, QueueLimits
from server.client.worker_process import Patience, WorkerHungError, WorkerProcess
from server.errors import (
    ApiError,
    EngineError,
    InvalidRequestError,
    NotReadyError,
    ShuttingDownError,
    WorkerLostError,
)
from server.metrics import Metrics

logger = logging.getLogger("foretoken.worker")

# -P: the current folder is no place to import from; an engine.py there is not ours.
WORKER_COMMAND = (sys.executable, "-P", "-m", "engine.spawned")

# Codes of ``Failed`` that say that the request cannot be served as it is.
REFUSAL_CODES = frozenset(
    {"context_length_exceeded", "empty_prompt", "invalid_grammar", "invalid_token_id"}
    | {"speculation_unavailable", "unsupported_parameter"}
)

# Above every place in a line of ``FairShare``, and small enough for priorities of 32 bits.
MAX_PLACE = 2**31

# A worker that served this long before it died is restarted without delay.
STABLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class EngineState:
    """Whether the engine can take a request, and why not."""

    status: Literal["loading", "ready", "restarting", "failed", "stopped"]
    reason: str
    worker: Ready | None = None


class WorkerFailedError(Exception):
    """The worker could not load, so the server cannot start."""


class WorkerClient:
    """Keeps a worker process alive and hands requests to it."""

    def __init__(
        self,
        config: EngineConfig,
        observer: Metrics,
        *,
        limits: QueueLimits | None = None,
        worker_command: Sequence[str] = WORKER_COMMAND,
        patience: Patience | None = None,
        max_restarts: int = 5,
        first_backoff_seconds: float = 0.5,
        max_backoff_seconds: float = 30.0,
    ) -> None:
        self._config = config
        self._observer = observer
        self._worker_command = worker_command
        self._patience = patience
        self._max_restarts = max_restarts
        self._first_backoff_seconds = first_backoff_seconds
        self._max_backoff_seconds = max_backoff_seconds
        self._state = EngineState("loading", "The models are loading.")
        self._first_load_over = asyncio.Event()
        self._has_failed = asyncio.Event()
        self._worker: WorkerProcess | None = None
        self._load_error = ""
        self._speculation: dict[str, Any] = {}
        self._stats: Stats | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._requests = OpenRequests(limits or QueueLimits())

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

    @property
    def num_running(self) -> int:
        """HTTP requests of which a token has come back."""
        return self._requests.num_http_requests - self._requests.num_waiting

    @property
    def num_waiting(self) -> int:
        """HTTP requests that wait for their first token."""
        return self._requests.num_waiting

    @property
    def worker_pid(self) -> int | None:
        return None if self._worker is None else self._worker.pid

    async def start(self) -> None:
        self._supervision = asyncio.create_task(self._supervise())

    async def wait_until_ready(self) -> Ready:
        await self._first_load_over.wait()
        if self._state.worker is None:
            raise WorkerFailedError(self._state.reason)
        return self._state.worker

    async def wait_until_failed(self) -> NoReturn:
        """Raise ``WorkerFailedError`` once no further worker will be started."""
        await self._has_failed.wait()
        raise WorkerFailedError(self._state.reason)

    async def stop(self) -> None:
        was_ready = self._state.status == "ready"
        self._state = EngineState("stopped", "The server is shutting down.")
        if self._worker is not None:
            await self._worker.stop(at_once=not was_ready)
        if self._supervision is not None:
            self._supervision.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervision
        self._first_load_over.set()
        self.abandon()

    def abandon(self) -> None:
        self._requests.fail_all(ShuttingDownError("The server is shutting down."))

    def check_room(self, num_sequences: int, num_tokens: int = 0, key: str = "") -> None:
        self._requests.check_room(num_sequences, num_tokens, key)

    def submit(self, requests: Sequence[Generate], key: str = "") -> EngineStream:
        if self._state.status != "ready" or self._worker is None:
            raise NotReadyError(self._state.reason)
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self.check_room(sum(request.n for request in requests), num_tokens, key)
        requests = [self._in_line(request, key) for request in requests]
        stream = EngineStream(requests, self._abort, key)
        try:
            for request in requests:
                self._requests.add(request, stream)
                self._worker.send(request)
        except Exception:
            stream.close()  # a part of the request is not wanted
            raise
        return stream

    def _in_line(self, request: Generate, key: str) -> Generate:
        """With the request's own priority first, and then its key's place."""
        place = self._requests.priority(request, key)
        if not place:
            return request
        return msgspec.structs.replace(request, priority=request.priority * MAX_PLACE + place)

    def _abort(self, request_id: str, index: int | None) -> None:
        if self._worker is not None and request_id in self._requests:
            self._worker.send(Abort(request_id, index))
        self._requests.forget_if_finished(request_id)

    async def _supervise(self) -> None:
        """Run worker after worker; give up if the first never becomes ready, or if too many die in a row."""
        backoff = self._first_backoff_seconds
        number = num_in_a_row = 0
        while True:
            started = time.monotonic()
            reason = await self._run_worker(number)
            if self._state.status == "stopped":
                return
            lost = WorkerLostError(f"The request was lost. {reason}")
            if self._state.status == "ready":
                self._requests.fail_lost(lost)
            else:  # when a worker will load again is unknown
                self._requests.fail_all(lost)
            if not self._first_load_over.is_set():
                self._state = EngineState("failed", reason)
                self._first_load_over.set()
                return
            self._observer.worker_lost()
            if time.monotonic() - started >= STABLE_SECONDS:
                backoff, num_in_a_row = self._first_backoff_seconds, 0
            num_in_a_row += 1
            if num_in_a_row > self._max_restarts:
                self._state = EngineState(
                    "failed",
                    f"{reason} It had been restarted {self._max_restarts} times (max_worker_restarts).",
                )
                self._requests.fail_all(lost)
                self._has_failed.set()
                return
            self._state = EngineState("restarting", f"{reason} It is being restarted.")
            logger.error("%s Restarting in %.1f s.", reason, backoff)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, self._max_backoff_seconds)
            number += 1

    async def _run_worker(self, number: int) -> str:
        """One worker from spawn to death; returns why it died."""
        self._load_error = ""
        try:
            self._worker = await WorkerProcess.start(self._worker_command, self._config, number)
            exit_code = await self._worker.run(self._receive, self._patience)
        except WorkerHungError as error:
            return str(error)
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

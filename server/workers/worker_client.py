"""The front end keeps one worker alive from here, and passes its messages on.

The worker process is started again when it dies, and killed first when it hangs. What that means for requests
is decided by ``server.workers.worker_pool``. Built by ``server.cli.launch``.
"""

import asyncio
import logging
import math
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from truedraft.engine.config import EngineConfig, adapter_entry
from truedraft.engine.messages import (
    WEIGHTS_CHANGED,
    AdapterLoaded,
    Cleared,
    ClearPrefixes,
    Embedded,
    Failed,
    FromWorker,
    Loading,
    Ready,
    SpeculationState,
    Stats,
    StepOutput,
    ToWorker,
)
from truedraft.server.errors import (
    ApiError,
    EngineError,
    InvalidRequestError,
    NotClearedError,
    WorkerLostError,
)
from truedraft.server.observability.metrics import WorkerMetrics
from truedraft.server.settings import OnChangedWeights, public_name
from truedraft.server.workers.engine_stream import Output
from truedraft.server.workers.worker_process import WorkerHungError, WorkerProcess, WorkerTimeouts

logger = logging.getLogger("truedraft.worker")

# -P: the current folder is no place to import from; an engine.py there is not ours.
WORKER_COMMAND = (sys.executable, "-P", "-m", "truedraft.engine.process.spawned")

# Codes of ``Failed`` that say that the request cannot be served as it is.
REFUSAL_CODES = frozenset(
    {"context_length_exceeded", "empty_prompt", "invalid_grammar", "invalid_token_id"}
    | {"speculation_unavailable", "unsupported_parameter", "adapter_unavailable"}
)

# What signals of a worker's end tell.
SIGNALS: dict[int, str] = {
    signal.SIGBUS: " (SIGBUS): a file that it reads while it serves was cut off or cannot be read any more. "
    "Replace files of weights by renaming another one over them",
}

# A worker that served this long before it died is restarted without delay. Loading does not count.
STABLE_SECONDS = 60.0
NOT_CLEARED = (
    "The memory has forgotten all prefixes, but the files of prefix_cache_dir could not be cleared: {}. They "
    "are not read until they are cleared, or the server starts again: remove them before that."
)


@dataclass(frozen=True, slots=True)
class EngineState:
    """Says whether a worker can take a request, and why not."""

    status: Literal["ready", "loading", "restarting", "failed", "stopped"]
    reason: str  # clients read it: it has no paths
    worker: Ready | None = None
    cause: str = ""  # the operator reads it, if a worker has died


class WorkerListener(Protocol):
    """Is told of a worker's outputs, failures and death; implemented by the pool of workers."""

    def outputs(self, outputs: Sequence[Output]) -> None: ...

    def adapter_loaded(self, answer: AdapterLoaded) -> None: ...

    def request_failed(self, request_id: str, error: ApiError) -> None: ...

    def worker_ready(self, number: int) -> None: ...

    def worker_lost(self, number: int, error: ApiError, *, was_ready: bool) -> None: ...

    def weights_changed(self) -> None:
        """A worker has loaded other weights than the one before it."""
        ...


class WorkerClient:
    """Keeps a worker process alive and passes messages."""

    def __init__(
        self,
        config: EngineConfig,
        observer: WorkerMetrics,
        *,
        environment: Mapping[str, str] | None = None,
        worker_command: Sequence[str] = WORKER_COMMAND,
        timeouts: WorkerTimeouts | None = None,
        max_restarts: int = 5,
        on_changed_weights: OnChangedWeights = "restart",
        first_backoff_seconds: float = 0.5,
        max_backoff_seconds: float = 30.0,
    ) -> None:
        """``environment`` has variables in addition to those of this process."""
        self._config = config
        self._observer = observer
        self._environment = environment
        self._worker_command = worker_command
        self._timeouts = timeouts
        self._max_restarts = max_restarts
        self._on_changed_weights = on_changed_weights
        self._weights_changed = False  # they did while the last worker read them
        self._fingerprint = ""  # the last worker's that was ready
        self._first_backoff_seconds = first_backoff_seconds
        self._max_backoff_seconds = max_backoff_seconds
        self._state = EngineState("loading", "The models are loading.")
        self._first_load_over = asyncio.Event()
        self._has_failed = asyncio.Event()
        self._worker: WorkerProcess | None = None
        self._load_error = ""
        self._stage = ""
        self._ready_since = math.inf  # the running worker's
        self._speculation: dict[str, Any] = {}
        self._stats: Stats | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._clearings: deque[asyncio.Future[None]] = deque()

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def stage(self) -> str:
        """Names what the worker is loading; empty before it says so."""
        return self._stage

    @property
    def speculation(self) -> dict[str, Any]:
        return self._speculation

    @property
    def stats(self) -> Stats | None:
        return self._stats

    @property
    def pid(self) -> int | None:
        return None if self._worker is None else self._worker.pid

    def start(self, listener: WorkerListener, number: int) -> None:
        """``number`` is what ``listener`` knows it by."""
        self._supervision = asyncio.create_task(self._supervise(listener, number))

    async def first_load(self) -> EngineState:
        """The state once the first load is over, however it ended."""
        await self._first_load_over.wait()
        return self._state

    async def failure(self) -> str:
        """Why no further worker will be started, once that is so."""
        await self._has_failed.wait()
        return self._state.cause or self._state.reason

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

    def send(self, message: ToWorker) -> None:
        """Nothing where there is no process: what it was asked for ended with it."""
        if self._worker is not None:
            self._worker.send(message)

    async def clear_prefixes(self) -> None:
        """Lets the worker, which is ready, forget its prefixes, and returns when it has. ``WorkerLostError``
        if it ends before, ``NotClearedError`` if files are still there."""
        clearing = asyncio.get_running_loop().create_future()
        self._clearings.append(clearing)
        self.send(ClearPrefixes())
        await clearing

    def _cleared(self, error: ApiError | None = None) -> None:
        """Tells the one that has waited longest, who may have gone."""
        clearing = self._clearings.popleft()
        if clearing.done():
            return
        if error is None:
            clearing.set_result(None)
        else:
            clearing.set_exception(error)

    async def _supervise(self, listener: WorkerListener, number: int) -> None:
        """Run worker after worker; give up if the first never becomes ready, or if too many die in a row."""
        backoff = self._first_backoff_seconds
        num_in_a_row = 0
        while True:
            self._ready_since = math.inf
            reason = await self._run_worker(listener, number)
            if self._state.status == "stopped":
                return
            was_ready = self._state.status == "ready"
            if time.monotonic() - self._ready_since >= STABLE_SECONDS:
                backoff, num_in_a_row = self._first_backoff_seconds, 0
            num_in_a_row += 1
            must_stop = self._weights_changed and self._on_changed_weights == "stop"
            if must_stop or not self._first_load_over.is_set():
                self._state = self._state_after("failed", reason)
            elif num_in_a_row > self._max_restarts:
                again = f"It had been restarted {self._max_restarts} times (max_worker_restarts)."
                self._state = self._state_after("failed", f"{reason} {again}")
            else:
                self._state = self._state_after("restarting", f"{reason} It is being restarted.")
            if self._first_load_over.is_set():
                self._observer.lost()
            listener.worker_lost(
                number, WorkerLostError(f"The request was lost. {self._public(reason)}"), was_ready=was_ready
            )
            if self._state.status == "failed":
                self._first_load_over.set()
                self._has_failed.set()
                return
            logger.error("%s Restarting in %.1f s (worker %d).", reason, backoff, number)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, self._max_backoff_seconds)

    def _state_after(self, status: Literal["failed", "restarting"], cause: str) -> EngineState:
        return EngineState(status, self._public(cause), cause=cause)

    def _public(self, reason: str) -> str:
        """Returns a reason as clients may read it: with the names of models, without their paths."""
        adapters = [adapter_entry(entry)[1] for entry in self._config.lora_modules]
        for path in filter(None, (self._config.target, self._config.draft, *adapters)):
            for written in (str(Path(path).expanduser().absolute()), path):
                if "/" in written.strip("./"):  # else it is no path, but may be a part of any sentence
                    reason = reason.replace(written, public_name(path))
        return reason

    async def _run_worker(self, listener: WorkerListener, number: int) -> str:
        """Runs one worker from spawn to death; returns why it died."""
        self._load_error, self._weights_changed = "", False
        try:
            self._worker = await WorkerProcess.start(
                self._worker_command,
                self._config,
                partial(self._receive, listener, number),
                self._environment,
            )
            exit_code = await self._worker.run(self._timeouts)
        except WorkerHungError as error:
            return str(error)
        except OSError as error:
            return f"The worker could not be started: {error}."
        except Exception as error:
            logger.exception("The connection to worker %d broke", number)
            return f"The worker could not be run: {error}."
        finally:
            self._worker = None
            while self._clearings:
                self._cleared(WorkerLostError("The worker ended before the prefix cache was cleared."))
        return self._load_error or _describe_exit(exit_code, was_ready=self._state.status == "ready")

    def _receive(self, listener: WorkerListener, number: int, message: FromWorker) -> None:
        match message:
            case StepOutput():
                self._stats = message.stats
                self._observer.stats(message.stats)
                listener.outputs(message.outputs)
            case Embedded():
                listener.outputs([message])
            case AdapterLoaded():
                listener.adapter_loaded(message)
            case Failed(request_id=""):  # not one request: the worker itself cannot go on
                self._load_error = message.message
                self._weights_changed = message.code == WEIGHTS_CHANGED
            case Failed():
                listener.request_failed(message.request_id, _error_from(message))
            case Cleared(error=error):
                self._cleared(NotClearedError(NOT_CLEARED.format(error)) if error else None)
            case Loading():
                self._stage = message.stage
            case SpeculationState():
                self._speculation = message.state
                self._observer.speculation(message.state)
            case Ready():
                self._speculation, self._stats = {}, None
                self._state = EngineState("ready", "The server is ready.", message)
                self._ready_since = time.monotonic()
                self._observer.ready(message)
                self._first_load_over.set()
                if self._fingerprint not in ("", message.fingerprint):
                    listener.weights_changed()
                self._fingerprint = message.fingerprint
                listener.worker_ready(number)


def _error_from(failed: Failed) -> ApiError:
    """A request beyond the engine's limits is the client's fault, everything else ours."""
    if failed.code in REFUSAL_CODES:
        return InvalidRequestError(failed.message, code=failed.code)
    return EngineError(failed.message, code=failed.code)


def _describe_exit(exit_code: int, *, was_ready: bool) -> str:
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"
    how += SIGNALS.get(-exit_code, "")
    when = "" if was_ready else " while loading; its own messages are above"
    return f"The worker {how}{when}."

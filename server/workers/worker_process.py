"""Runs the worker process once: spawns it, talks to it over a pair of sockets, watches it, waits for its end.

Knows the border's bytes but not what the messages mean; ``server.workers.worker_client`` starts a new run
when one dies.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from truedraft.engine.config import EngineConfig
from truedraft.engine.machine.lifeline import PARENT_VARIABLE
from truedraft.engine.machine.openmp import spin_settings
from truedraft.engine.messages import (
    FromWorker,
    Heartbeat,
    Inbox,
    Shutdown,
    ToWorker,
    decode_from_worker,
    framed,
)
from truedraft.server.settings import ENV_PREFIX

# A dead worker's connection ends within this time, unless a process that it left behind holds it.
LAST_MESSAGES_SECONDS = 2.0
# An orderly end has no need of a worker; one that is in a long step hears nothing.
STOP_SECONDS = 1.5
# Seconds between two checks of a worker, about as many as between its heartbeats.
POLL_SECONDS = 1.0


class WorkerHungError(Exception):
    """The worker runs and does nothing; the message says how that was noticed."""


@dataclass(frozen=True, slots=True)
class WorkerTimeouts:
    """Limits in seconds: ``heartbeat`` for a worker's silence after its first sign of life, ``step`` for one
    step of its loop."""

    heartbeat: float = 30.0
    step: float = 600.0


class WorkerProtocol(asyncio.Protocol):
    """Receives what the worker sends: heartbeats, other messages, the end of the connection."""

    def __init__(self, on_message: Callable[[FromWorker], None]) -> None:
        self._on_message = on_message
        self._inbox = Inbox()
        self.heartbeats: asyncio.Queue[Heartbeat] = asyncio.Queue()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._inbox.add(data):
                self._take(decode_from_worker(message))
        except Exception as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)

    def _take(self, message: FromWorker) -> None:
        if isinstance(message, Heartbeat):
            self.heartbeats.put_nowait(message)
        else:
            self._on_message(message)

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None or isinstance(error, ConnectionError):  # it died: its exit code tells how
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class WorkerProcess:
    """A spawned worker. Create it with ``start``, then await ``run`` until the process ends."""

    def __init__(
        self, process: asyncio.subprocess.Process, protocol: WorkerProtocol, transport: asyncio.Transport
    ) -> None:
        self._process = process
        self._protocol = protocol
        self._transport = transport

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        config: EngineConfig,
        on_message: Callable[[FromWorker], None],
        environment: Mapping[str, str] | None = None,
    ) -> "WorkerProcess":
        """Every message is passed to ``on_message``; ``environment`` has variables in addition to those of
        this process."""
        ours, theirs = socket.socketpair()
        with theirs:
            transport, protocol = await asyncio.get_running_loop().create_unix_connection(
                lambda: WorkerProtocol(on_message), sock=ours
            )
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    *("--socket", str(theirs.fileno()), "--config", config.model_dump_json()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the front end, which then stops the worker
                    env=worker_environment(os.environ) | dict(environment or {}),
                )
            except BaseException:
                transport.abort()
                raise
        return cls(process, protocol, transport)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        """Never blocks: the transport buffers what the worker does not read. Does nothing once it is gone."""
        if not self._transport.is_closing():
            self._transport.write(framed(message))

    async def run(self, timeouts: WorkerTimeouts | None = None) -> int:
        """Waits until the process has ended and all that it sent has been passed on; returns its exit code.

        Raises ``WorkerHungError`` once it has taken longer than ``timeouts`` allow.
        """
        exited = asyncio.create_task(self._process.wait())
        watching = asyncio.create_task(self._watch(timeouts or WorkerTimeouts()))
        ended = self._protocol.ended
        running: set[asyncio.Future[Any]] = {exited, watching, ended}
        try:
            while exited in running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    future.result()  # watching ends by an error only, and the connection may
            await asyncio.wait([ended], timeout=LAST_MESSAGES_SECONDS)
            if ended.done():
                ended.result()
            return exited.result()
        finally:
            for task in (exited, watching):
                task.cancel()
            await asyncio.gather(exited, watching, return_exceptions=True)
            await self._end()

    async def stop(self, *, at_once: bool) -> None:
        """Ask the process to leave, then make it; ``run`` returns afterwards. Not asked ``at_once``: while it
        loads it would not hear."""
        if not at_once:
            self.send(Shutdown())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
                return
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _watch(self, timeouts: WorkerTimeouts) -> None:
        """Watches from the first heartbeat on, which comes once the worker has imported the engine.

        Polls are counted, not seconds: a front end that stood still itself has not waited.
        """
        poll = min(POLL_SECONDS, timeouts.heartbeat)
        silence = None
        while True:
            try:
                message = await asyncio.wait_for(self._protocol.heartbeats.get(), poll)
            except TimeoutError:
                if silence is None:
                    continue
                silence += poll
                if silence >= timeouts.heartbeat:
                    raise WorkerHungError(
                        f"The worker gave no sign of life for {timeouts.heartbeat:g} s (heartbeat_timeout)."
                    ) from None
                continue
            if message.step_seconds > timeouts.step:
                raise WorkerHungError(
                    f"The worker has been in one step for {message.step_seconds:.0f} s (step_timeout)."
                )
            silence = 0.0

    async def _end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._transport.abort()


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Leaves out this server's settings: the worker gets its own by argument, and keys are none of them."""
    kept = {name: value for name, value in environ.items() if not name.upper().startswith(ENV_PREFIX)}
    return kept | spin_settings(environ) | {PARENT_VARIABLE: str(os.getpid())}

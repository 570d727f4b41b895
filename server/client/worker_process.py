"""One run of the worker process: spawn it, talk to it over a ZeroMQ pair, watch it, wait for its end.

Knows the border's bytes but not what the messages mean; ``server.client.worker_client`` starts a new run
when one dies.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from engine.config import EngineConfig
from engine.lifeline import PARENT_VARIABLE
from engine.messages import (
    FromWorker,
    Heartbeat,
    Shutdown,
    ToWorker,
    decode_from_worker,
    encode,
    heartbeat_address,
)
from server.client.temp_folders import SocketFolder
from server.settings import ENV_PREFIX

# How long to wait for the end of a dead worker's connection. One that never had any takes as long.
LAST_MESSAGES_SECONDS = 2.0
STOP_SECONDS = 5.0
# How often a worker is looked at; its heartbeats come about as often.
LOOK_SECONDS = 1.0


class WorkerHungError(Exception):
    """The worker runs and does nothing; the message says how that was noticed."""


@dataclass(frozen=True, slots=True)
class Patience:
    """In seconds. ``heartbeat`` is how long a worker may be silent after its first sign of life, ``step`` how
    long its loop may be in one step."""

    heartbeat: float = 30.0
    step: float = 600.0


class Border:
    """The front end's sockets for one run of a worker, in a folder of their own: messages, the end of their
    connection, heartbeats."""

    def __init__(self, number: int) -> None:
        """``number`` tells runs apart."""
        self._folder = SocketFolder()
        self.address = f"ipc://{self._folder.path / f'worker-{number}.sock'}"
        self._context = zmq.asyncio.Context()
        self.messages = self._context.socket(zmq.PAIR)
        # The front end limits its queue itself; a full socket would only hide tokens.
        self.messages.set_hwm(0)
        self.messages.linger = 0
        self.connection_ends = self.messages.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.heartbeats = self._context.socket(zmq.PULL)

    def bind(self) -> None:
        self.messages.bind(self.address)
        self.heartbeats.bind(heartbeat_address(self.address))

    def close(self) -> None:
        self.messages.disable_monitor()
        for socket in (self.connection_ends, self.messages, self.heartbeats):
            socket.close()
        self._context.term()
        self._folder.close()


class WorkerProcess:
    """A spawned worker. Create it with ``start``, then await ``run`` until the process ends."""

    def __init__(self, process: asyncio.subprocess.Process, border: Border) -> None:
        self._process = process
        self._border = border
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        config: EngineConfig,
        number: int,
        environment: Mapping[str, str] | None = None,
    ) -> "WorkerProcess":
        """``number`` tells runs apart; ``environment`` are variables beside those of this process."""
        border = Border(number)
        try:
            border.bind()
            process = await asyncio.create_subprocess_exec(
                *command,
                *("--socket", border.address, "--config", config.model_dump_json()),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the front end, which then stops the worker in order
                env=worker_environment(os.environ) | dict(environment or {}),
            )
        except BaseException:
            border.close()
            raise
        return cls(process, border)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        """Encoded at once: a message that cannot be is the error of who sends it, not of the connection."""
        self._outbox.put_nowait(encode(message))

    async def run(self, on_message: Callable[[FromWorker], None], patience: Patience | None = None) -> int:
        """Pass on every message until the process has ended; return its exit code.

        Raises ``WorkerHungError`` once it has taken longer than ``patience`` has.
        """
        exited = asyncio.create_task(self._process.wait())
        receiving = asyncio.create_task(self._receive(on_message))
        sending = asyncio.create_task(self._send())
        watching = asyncio.create_task(self._watch(patience or Patience()))
        tasks: set[asyncio.Task[Any]] = {exited, receiving, sending, watching}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                await self._let_arrive(receiving)
            for task in (receiving, sending, watching):
                if task.done():
                    task.result()  # none of these loops ends but by an error
            return await self._process.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
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

    async def _let_arrive(self, receiving: "asyncio.Task[None]") -> None:
        """A dead worker's last messages. All have come once the connection ends, however long that takes."""
        ended = asyncio.ensure_future(self._border.connection_ends.recv_multipart())
        tasks: set[asyncio.Future[Any]] = {ended, receiving}
        await asyncio.wait(tasks, timeout=LAST_MESSAGES_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        while not receiving.done() and self._has_message():
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # the last one is still on its way to ``receiving``

    def _has_message(self) -> bool:
        events = self._border.messages.get(zmq.EVENTS)
        return isinstance(events, int) and bool(events & zmq.POLLIN)

    async def _receive(self, on_message: Callable[[FromWorker], None]) -> None:
        while True:
            on_message(decode_from_worker(await self._border.messages.recv()))

    async def _watch(self, patience: Patience) -> None:
        """From the first heartbeat on, which comes once the worker has imported the engine.

        Looks are counted, not seconds: a front end that stood still itself has not waited.
        """
        look = min(LOOK_SECONDS, patience.heartbeat)
        silence = None
        while True:
            try:
                message = decode_from_worker(await asyncio.wait_for(self._border.heartbeats.recv(), look))
            except TimeoutError:
                if silence is None:
                    continue
                silence += look
                if silence >= patience.heartbeat:
                    raise WorkerHungError(
                        f"The worker gave no sign of life for {patience.heartbeat:g} s (heartbeat_timeout)."
                    ) from None
                continue
            assert isinstance(message, Heartbeat)
            if message.step_seconds > patience.step:
                raise WorkerHungError(
                    f"The worker has been in one step for {message.step_seconds:.0f} s (step_timeout)."
                )
            silence = 0.0

    async def _send(self) -> None:
        while True:
            await self._border.messages.send(await self._outbox.get())

    async def _end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._border.close()


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without this server's settings: the worker gets its own by argument, and keys are none of them.

    torch's OpenMP threads look for more work for microseconds before they sleep, unless ``environ`` says
    otherwise. By default they do so for milliseconds, on processors that the engine's own threads need.
    """
    kept = {name: value for name, value in environ.items() if not name.upper().startswith(ENV_PREFIX)}
    spin = {} if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys() else {"GOMP_SPINCOUNT": "1000"}
    return kept | spin | {PARENT_VARIABLE: str(os.getpid())}

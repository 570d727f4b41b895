"""One run of the worker process: spawn it, talk to it over a ZeroMQ pair, wait for its end.

Knows the border's bytes but not what the messages mean; ``server.engine_client`` starts a new run when one
dies.
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from engine.config import EngineConfig
from engine.messages import FromWorker, Shutdown, ToWorker, decode_from_worker, encode

# How long to wait for the end of a dead worker's connection. One that never had any takes as long.
LAST_MESSAGES_SECONDS = 2.0
STOP_SECONDS = 5.0


class WorkerProcess:
    """A spawned worker. Create it with ``start``, then await ``run`` until the process ends."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        context: zmq.asyncio.Context,
        socket: zmq.asyncio.Socket,
        connection_ends: zmq.asyncio.Socket,
        folder: "tempfile.TemporaryDirectory[str]",
    ) -> None:
        self._process = process
        self._context = context
        self._socket = socket
        self._connection_ends = connection_ends
        self._folder = folder
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()

    @classmethod
    async def start(cls, command: Sequence[str], config: EngineConfig, number: int) -> "WorkerProcess":
        folder = tempfile.TemporaryDirectory(prefix="foretoken-")
        address = f"ipc://{Path(folder.name) / f'worker-{number}.sock'}"
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.PAIR)
        socket.set_hwm(0)  # the front end limits its queue itself; a full socket would only hide tokens
        socket.linger = 0
        connection_ends = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.bind(address)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                *("--socket", address, "--config", config.model_dump_json()),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the front end, which then stops the worker in order
            )
        except BaseException:
            _close(context, socket, connection_ends, folder)
            raise
        return cls(process, context, socket, connection_ends, folder)

    def send(self, message: ToWorker) -> None:
        """Encoded at once: a message that cannot be is the error of who sends it, not of the connection."""
        self._outbox.put_nowait(encode(message))

    async def run(self, on_message: Callable[[FromWorker], None]) -> int:
        """Pass on every message until the process has ended; return its exit code."""
        exited = asyncio.create_task(self._process.wait())
        receiving = asyncio.create_task(self._receive(on_message))
        sending = asyncio.create_task(self._send())
        tasks: set[asyncio.Task[Any]] = {exited, receiving, sending}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                await self._let_arrive(receiving)
            for task in (receiving, sending):
                if task.done():
                    task.result()  # neither loop ends but by an error
            return await self._process.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end()

    async def stop(self) -> None:
        """Ask the process to leave, then make it; ``run`` returns afterwards."""
        self.send(Shutdown())
        for action in (None, self._process.terminate, self._process.kill):
            if action is not None:
                with suppress(ProcessLookupError):
                    action()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
                return

    async def _let_arrive(self, receiving: "asyncio.Task[None]") -> None:
        """A dead worker's last messages. All have come once the connection ends, however long that takes."""
        ended = asyncio.ensure_future(self._connection_ends.recv_multipart())
        tasks: set[asyncio.Future[Any]] = {ended, receiving}
        await asyncio.wait(tasks, timeout=LAST_MESSAGES_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        while not receiving.done() and self._has_message():
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # the last one is still on its way to ``receiving``

    def _has_message(self) -> bool:
        events = self._socket.get(zmq.EVENTS)
        return isinstance(events, int) and bool(events & zmq.POLLIN)

    async def _receive(self, on_message: Callable[[FromWorker], None]) -> None:
        while True:
            on_message(decode_from_worker(await self._socket.recv()))

    async def _send(self) -> None:
        while True:
            await self._socket.send(await self._outbox.get())

    async def _end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        _close(self._context, self._socket, self._connection_ends, self._folder)


def _close(
    context: zmq.asyncio.Context,
    socket: zmq.asyncio.Socket,
    connection_ends: zmq.asyncio.Socket,
    folder: "tempfile.TemporaryDirectory[str]",
) -> None:
    socket.disable_monitor()
    connection_ends.close()
    socket.close()
    context.term()
    folder.cleanup()

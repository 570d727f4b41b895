"""Ends servers by random orders of signals, clients that come and go, and workers that fail or never load.

python -m tests.faults.shutdown_orders --orders 1000

Everything happens within 200 ms. uvicorn, its sockets and the server's own end are real; the application and
the engine are not, so that many servers end at the same time. Each must end by itself, whatever the order.
"""

import argparse
import asyncio
import io
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from types import SimpleNamespace
from typing import Any, NoReturn

import uvicorn
from starlette.types import Receive, Scope, Send

from truedraft.engine.messages import Ready
from truedraft.server.cli import draining
from truedraft.server.cli.draining import Server
from truedraft.server.cli.launch import bind, serve
from truedraft.server.settings import Settings
from truedraft.server.workers.worker_pool import WorkerFailedError

WITHIN_SECONDS = 0.2
DRAIN_TIMEOUT = 0.3
SETTINGS = Settings(drain_timeout=DRAIN_TIMEOUT)
READY = Ready(
    target="target",
    draft=None,
    device="cpu",
    dtype="float32",
    vocab_size=260,
    max_model_len=512,
    num_target_blocks=64,
    num_draft_blocks=0,
    block_size=16,
    methods=[],
    method="none",
)
HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class QuietServer(Server):
    """Hears no signal of the process: the order gives it its own."""

    def capture_signals(self) -> Any:
        return nullcontext()


class ForgetfulServer(QuietServer):
    """Plants the bug that a signal takes back an end that was decided."""

    def handle_exit(self, sig: int, frame: Any) -> None:
        super().handle_exit(sig, frame)
        self.should_exit = self.force_exit = self.num_signals > 2


class OneModel:
    """Stands for the models of a server: one, which fails when it is told to."""

    starts = are_several = False

    def __init__(self) -> None:
        self.loaded: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.failed: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()
        self.abandoned = asyncio.Event()
        self.first = SimpleNamespace(name="target", engine=self, stage=None, worker=READY, settings=SETTINGS)

    def __iter__(self) -> Iterator[Any]:
        return iter([self.first])

    async def wait_until_ready(self) -> None:
        await asyncio.shield(self.loaded)

    async def wait_until_failed(self) -> NoReturn:
        return await asyncio.shield(self.failed)

    def abandon(self) -> None:
        self.abandoned.set()


class Application:
    """Answers after a while, at the latest when it is abandoned; a stuck one only when it is cancelled."""

    def __init__(self, models: OneModel, drawn: random.Random) -> None:
        self._models = models
        self._seconds = drawn.choice([0.0, 0.05, 0.25, 100.0])
        self._is_stuck = drawn.random() < 0.1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if self._is_stuck:
            await asyncio.sleep(100.0)
        waits = (asyncio.sleep(self._seconds), receive_end(receive), self._models.abandoned.wait())
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        await send({"type": "http.response.body", "body": b"x"})


async def receive_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def one_order(seed: int, kind: type[Server], timeout: float) -> float:
    """Returns the seconds from the first signal or failure to the end.

    Raises ``TimeoutError`` if there is none within ``timeout`` seconds.
    """
    drawn = random.Random(seed)
    loop, models = asyncio.get_running_loop(), OneModel()
    services: Any = SimpleNamespace(settings=SETTINGS, models=models, drain=lambda: None)
    config = uvicorn.Config(
        Application(models, drawn),
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=draining.CLOSING_SECONDS,
    )
    left: list[int] = []
    server = kind(config, DRAIN_TIMEOUT, left.append)
    began: list[float] = []

    def begin() -> None:
        began.append(time.monotonic())

    def hear(number: int) -> None:
        begin()
        server.handle_exit(number, None)

    def fail(future: asyncio.Future[Any]) -> None:
        begin()
        if not future.done():
            future.set_exception(WorkerFailedError("It failed."))

    clients: list[socket.socket] = []

    def come(address: tuple[str, int]) -> None:
        with suppress(OSError):
            client = socket.create_connection(address)
            client.send(HEAD[: drawn.choice([0, 10, len(HEAD)])])
            clients.append(client)

    def go() -> None:
        if clients:
            clients.pop(drawn.randrange(len(clients))).close()

    with bind("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        is_loaded = drawn.random() < 0.7
        events: list[Callable[[], None]] = []
        for _ in range(drawn.randint(0, 3)):
            events += [lambda: come(address), go]
        ends = [lambda: hear(drawn.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))] * drawn.randint(
            0, 4
        )
        if drawn.random() < 0.3 or not ends:
            ends.append(lambda: fail(models.failed if is_loaded else models.loaded))
        serving = asyncio.ensure_future(serve(server, listener, services))
        while not server.started:
            await asyncio.sleep(0.001)
        if is_loaded:
            models.loaded.set_result(READY)
        for event in (*events, *ends):
            loop.call_later(drawn.choice([0.0, WITHIN_SECONDS * drawn.random()]), event)
        try:
            with suppress(WorkerFailedError):
                await asyncio.wait_for(serving, timeout)
        finally:
            server.has_ended()
            for client in clients:
                client.close()
            for future in (models.loaded, models.failed):
                future.cancel()
    assert not left, f"order {seed} had to be ended"
    return time.monotonic() - began[0]


async def all_orders(
    seeds: Sequence[int], kind: type[Server] = QuietServer, *, together: int = 40, timeout: float = 60.0
) -> list[float]:
    """Ends one server after each order, ``together`` at a time."""
    allowed = asyncio.Semaphore(together)

    async def end_one(seed: int) -> float:
        async with allowed:
            return await one_order(seed, kind, timeout)

    return list(await asyncio.gather(*map(end_one, seeds)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=int, default=1000)
    options = parser.parse_args()
    with redirect_stdout(io.StringIO()):  # the servers' own introductions
        held = asyncio.run(all_orders(range(options.orders)))
    bound = DRAIN_TIMEOUT + 5
    print(f"{len(held)} orders: longest end {max(held):.2f} s, median {sorted(held)[len(held) // 2]:.2f} s")
    print(f"over {bound:g} s: {sum(each > bound for each in held)}")


if __name__ == "__main__":
    main()

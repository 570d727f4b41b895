"""The connection to a worker process: nothing that it said is lost when it dies."""

import asyncio
import sys

import pytest

from engine.config import EngineConfig
from engine.messages import Failed, FromWorker
from server.client import worker_process
from server.client.worker_process import WorkerProcess
from tests.server.running import PATIENCE_SECONDS

# Its messages come when it is dead already, as from a connection that has been slow: a child brings them.
LATE = """
import os, sys, time
import zmq
from engine.messages import Failed, encode
parent = os.getpid()
if os.fork():
    os._exit(3)
while os.getppid() == parent:
    time.sleep(0.01)
time.sleep(0.2)
with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
    socket.linger = 60_000
    socket.connect(sys.argv[sys.argv.index("--socket") + 1])
    for number in range(100):
        socket.send(encode(Failed(str(number), "code", "message")))
"""


async def run(code: str) -> tuple[int, list[str]]:
    """The worker's exit code, and the requests it named."""
    read: list[str] = []

    def on_message(message: FromWorker) -> None:
        assert isinstance(message, Failed)
        read.append(message.request_id)

    process = await WorkerProcess.start((sys.executable, "-c", code), EngineConfig(target="x"), 0)
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await process.run(on_message), read


async def test_a_dead_workers_last_messages_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its connection ends, not for some time."""
    monkeypatch.setattr(worker_process, "LAST_MESSAGES_SECONDS", 1000 * PATIENCE_SECONDS)
    assert await run(LATE) == (3, [str(number) for number in range(100)])


async def test_a_worker_that_never_connects_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "LAST_MESSAGES_SECONDS", 0.1)
    assert await run("exit(4)") == (4, [])

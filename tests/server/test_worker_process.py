"""The connection to a worker process loses nothing that it said when it dies."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest

from tests.server.running import TIMEOUT_SECONDS
from tests.server.virtual_time import in_virtual_time
from truedraft.engine.config import EngineConfig
from truedraft.engine.messages import Failed, FromWorker, Heartbeat
from truedraft.server.workers import worker_process
from truedraft.server.workers.worker_process import (
    WorkerHungError,
    WorkerProcess,
    WorkerProtocol,
    WorkerTimeouts,
)

# Its messages come when it is dead already, as from a connection that has been slow: a child brings them.
LATE = """
import os, sys, time
from truedraft.engine.process.connection import Connection
from truedraft.engine.messages import Failed
parent = os.getpid()
if os.fork():
    os._exit(3)
while os.getppid() == parent:
    time.sleep(0.01)
time.sleep(0.2)
connection = Connection(int(sys.argv[sys.argv.index("--socket") + 1]))
for number in range(100):
    connection.send(Failed(str(number), "code", "message"))
"""

# Its child keeps the connection, and says nothing.
SILENT = """
import os, time
if os.fork():
    os._exit(4)
time.sleep(5)
"""

# What arrives is no message.
BROKEN = """
import os, sys, time
os.write(int(sys.argv[sys.argv.index("--socket") + 1]), bytes(8) + bytes(8))
time.sleep(1000)
"""


async def run(code: str) -> tuple[int, list[str]]:
    """The worker's exit code, and the requests it named."""
    read: list[str] = []

    def on_message(message: FromWorker) -> None:
        assert isinstance(message, Failed)
        read.append(message.request_id)

    process = await WorkerProcess.start((sys.executable, "-c", code), EngineConfig(target="x"), on_message)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        return await process.run(), read


async def test_a_dead_workers_last_messages_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait ends with its connection, not after some time."""
    monkeypatch.setattr(worker_process, "LAST_MESSAGES_SECONDS", 1000 * TIMEOUT_SECONDS)
    assert await run(LATE) == (3, [str(number) for number in range(100)])


async def test_a_connection_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "LAST_MESSAGES_SECONDS", 0.1)
    assert await run(SILENT) == (4, [])


async def test_a_worker_that_says_nothing() -> None:
    assert await run("exit(4)") == (4, [])


async def test_bytes_that_are_no_message_end_the_worker() -> None:
    with pytest.raises(msgspec.DecodeError):
        await run(BROKEN)


async def watched(step_seconds: Sequence[float]) -> float:
    """Returns the seconds until a worker is given up that says every second how long its step has taken."""
    protocol = WorkerProtocol(lambda _: None)
    process = WorkerProcess(cast(Any, None), protocol, cast(Any, None))

    async def say() -> None:
        for seconds in step_seconds:
            protocol.heartbeats.put_nowait(Heartbeat(seconds))
            await asyncio.sleep(1.0)

    async with asyncio.TaskGroup() as tasks:
        saying = tasks.create_task(say())
        with pytest.raises(WorkerHungError):
            await process._watch(WorkerTimeouts(heartbeat=5.0, step=60.0))
        given_up = asyncio.get_running_loop().time()
        saying.cancel()
    return given_up


@pytest.mark.parametrize(
    ("step_seconds", "given_up"),
    [([0.5] * 1000, 999 + 5), ([0.5, *range(62)], 62)],  # after its last word; in the step of 61 s
    ids=["idle, then silent", "hung"],
)
def test_a_worker_is_given_up_for_silence_or_for_one_long_step(
    step_seconds: Sequence[float], given_up: float
) -> None:
    assert in_virtual_time(watched(step_seconds)) == given_up

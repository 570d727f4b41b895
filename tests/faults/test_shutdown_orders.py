"""A server ends after any order of signals, disconnects and failures, and does not take an end back."""

import asyncio
import time
from typing import Any

import pytest
import uvicorn

from tests.faults.shutdown_orders import ForgetfulServer, all_orders
from truedraft.server.cli import draining
from truedraft.server.cli.draining import Phase, Server


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stuck ends sooner, and a slow machine ends it by itself."""
    monkeypatch.setattr(draining, "CLOSING_SECONDS", 1)
    monkeypatch.setattr(draining, "END_SECONDS", 60.0)


def test_every_order_ends() -> None:
    asyncio.run(all_orders(range(80)))


def test_an_end_that_is_taken_back_is_noticed() -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(all_orders(range(80), ForgetfulServer, timeout=2.0))


async def advanced(leave: Any, *phases: Phase) -> Server:
    server = Server(uvicorn.Config(lambda: None, log_config=None), drain_timeout=0.1, leave=leave)
    for phase in phases:
        server.advance(phase)
    return server


def test_phases_only_go_forward() -> None:
    async def run() -> None:
        server = await advanced(lambda code: None, Phase.LEAVING, Phase.DRAINING, Phase.CLOSING)
        assert (server.phase, server.should_exit, server.force_exit) == (Phase.LEAVING, True, True)
        server.has_ended()

    asyncio.run(run())


def test_an_end_that_is_stuck_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop, which the signal interrupts, does not go on."""
    monkeypatch.setattr(draining, "END_SECONDS", 0.1)
    left: list[int] = []

    async def run() -> None:
        server = await advanced(left.append)
        server.handle_exit(15, None)
        until = time.monotonic() + 60
        while not left and time.monotonic() < until:
            time.sleep(0.01)

    asyncio.run(run())
    assert left == [1]

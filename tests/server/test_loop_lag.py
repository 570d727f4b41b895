"""Whoever holds the event loop is named, while it is held and afterwards; processor time is told apart."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.conftest import StartServer
from truedraft.server.observability import loop_lag
from truedraft.server.observability.loop_lag import Lag, LoopMonitor


@pytest.fixture(autouse=True)
def names_tests_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "PACKAGE", str(Path(__file__).parent))


def hold_by_work(until: Callable[[], bool]) -> None:
    while not until():
        pass


def hold_by_sleep(until: Callable[[], bool]) -> None:
    while not until():
        time.sleep(0.001)


def lags_of(hold: Callable[[Callable[[], bool]], None]) -> tuple[list[Lag], list[Lag]]:
    """Returns the lags that were reported, and those of a loop still held, which ``hold`` waits for."""
    reported: list[Lag] = []
    late: list[Lag] = []
    was_late = threading.Event()

    def on_late(lag: Lag) -> None:
        late.append(lag)
        if len(late) == 2:
            was_late.set()

    async def main() -> None:
        monitor = LoopMonitor(reported.append, late_after=0.05, on_late=on_late, period=0.001)
        monitor.start()
        while not reported:
            await asyncio.sleep(0.001)
        hold(was_late.is_set)
        before = len(reported)
        while len(reported) <= before:
            await asyncio.sleep(0.001)
        monitor.stop()

    asyncio.run(main())
    return reported, late


def test_a_function_that_computes_is_named() -> None:
    reported, late = lags_of(hold_by_work)
    longest = max(reported)
    assert "hold_by_work" in late[0].where
    assert "hold_by_work" in longest.where
    assert longest.seconds >= late[1].seconds >= 2 * 0.05
    assert late[1].seconds > late[0].seconds


def test_a_function_that_waits_has_used_no_processor_time() -> None:
    longest = max(lags_of(hold_by_sleep)[0])
    assert "hold_by_sleep" in longest.where
    assert longest.cpu_seconds < longest.seconds / 2


def test_a_free_loop_has_lags_without_a_place() -> None:
    reported, _ = lags_of(hold_by_work)
    assert any(not lag.where for lag in reported)


def test_the_server_logs_who_holds_its_loop(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    with start_server(loop_lag_warning=0.05) as server:
        told = threading.Event()

        def of_work() -> list[logging.LogRecord]:
            """Returns what was logged of this function; a busy machine may hold the loop in another one."""
            return [record for record in caplog.records if "hold_by_work" in record.getMessage()]

        def has_told() -> bool:
            return bool(of_work())

        def hold() -> None:
            hold_by_work(has_told)
            told.set()

        server.loop.call_soon_threadsafe(hold)
        assert told.wait(300)
    (record, *_) = of_work()
    assert record.name == "truedraft.loop"
    assert "hold_by_work" in vars(record)["fields"]["where"]

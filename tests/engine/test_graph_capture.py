"""Capturing by torch.cuda, as far as it can be looked at without a device."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch

from truedraft.engine.rounds.capture.capture import WARM_UP_RUNS, CudaCapture


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaCapture]:
    for name in ("Stream", "CUDAGraph", "current_stream", "graph_pool_handle", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(CudaCapture, "has_failed", False)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7, 8))
    for name in ("device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    yield CudaCapture(torch.device("cuda"))
    gc.enable()


def test_no_garbage_is_collected_during_a_capture(capture: CudaCapture) -> None:
    collected: list[bool] = []
    capture.record(lambda: collected.append(gc.isenabled()))
    assert collected == [True] * WARM_UP_RUNS + [False]
    assert gc.isenabled()


def test_it_is_again_after_a_failed_one(capture: CudaCapture) -> None:
    def fail() -> None:
        if not gc.isenabled():
            raise RuntimeError

    with pytest.raises(RuntimeError):
        capture.record(fail)
    assert gc.isenabled()


def test_who_collects_none_finds_it_so(capture: CudaCapture) -> None:
    gc.disable()
    capture.record(lambda: None)
    assert not gc.isenabled()


def test_after_a_failed_capture_there_is_none(capture: CudaCapture) -> None:
    """In the whole process; and the allocator is not asked for what it would refuse (torch up to 2.11)."""
    runs: list[int] = []

    def fail() -> None:
        runs.append(1)
        if len(runs) > WARM_UP_RUNS:
            raise RuntimeError("operation not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        capture.record(fail)
    assert capture.free_memory() == 7
    assert not torch.cuda.empty_cache.called  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="an earlier capture of this process has failed"):
        CudaCapture(torch.device("cuda")).record(lambda: runs.append(2))
    assert 2 not in runs


def test_what_fails_before_a_capture_spoils_none(capture: CudaCapture) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        capture.record(fail)
    capture.record(lambda: None)
    capture.free_memory()
    assert torch.cuda.empty_cache.called  # type: ignore[attr-defined]

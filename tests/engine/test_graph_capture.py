"""Capturing by torch.cuda, as far as it can be looked at without a device."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch

from engine.models.graph_capture import WARM_UP_RUNS, CudaCapture


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaCapture]:
    for name in ("Stream", "CUDAGraph", "current_stream", "graph_pool_handle", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
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

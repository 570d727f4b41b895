"""What ``CudaCapture`` asks of ``torch.cuda``, in which order. Whether a GPU does it is for ``test_cuda``."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self

import pytest
import torch

from engine.models import graph_capture
from engine.models.graph_capture import WARM_UP_RUNS, CudaCapture, make_capture

SIGNATURE = inspect.signature(torch.cuda.graph)


class FakeCuda:
    """``torch.cuda`` with one current stream and a log of what happens."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.current = "usual"

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return Entered(self.log, "device")

    def graph_pool_handle(self) -> str:
        return "pool"

    def Stream(self) -> Any:  # noqa: N802
        return FakeStream(self, "side")

    def current_stream(self, device: torch.device | None = None) -> Any:
        return FakeStream(self, self.current)

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return OnStream(self, stream.name)

    def set_stream(self, stream: Any) -> None:
        self.current = stream.name

    def CUDAGraph(self) -> Any:  # noqa: N802
        return FakeGraph(self)

    def graph(self, *arguments: Any, **named: Any) -> AbstractContextManager[None]:
        bound = SIGNATURE.bind(*arguments, **named).arguments
        assert (bound["pool"], bound["stream"].name) == ("pool", "side")
        self.log.append("capture")
        return OnStream(self, "side", restores=False)

    def Event(self) -> Any:  # noqa: N802
        return FakeEvent(self)

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def empty_cache(self) -> None:
        self.log.append("empty_cache")

    def mem_get_info(self) -> tuple[int, int]:
        return 5, 10


class Entered(AbstractContextManager[None]):
    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name

    def __exit__(self, *_: object) -> None:
        pass


class OnStream(AbstractContextManager[None]):
    """As ``torch.cuda.graph`` does: after an exception in a capture its stream stays."""

    def __init__(self, cuda: FakeCuda, name: str, restores: bool = True) -> None:
        self.cuda, self.name, self.restores = cuda, name, restores

    def __enter__(self) -> None:
        self.before, self.cuda.current = self.cuda.current, self.name

    def __exit__(self, kind: object, *_: object) -> None:
        if self.restores or kind is None:
            self.cuda.current = self.before


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: Self) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def replay(self) -> None:
        self.cuda.log.append("replay")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self, stream: FakeStream) -> None:
        self.cuda.log.append(f"event on {stream.name}")

    def synchronize(self) -> None:
        self.cuda.log.append("wait for event")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in [name for name in vars(FakeCuda) if not name.startswith("_")]:
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(graph_capture.torch.cuda, name, getattr(fake, name))
    return fake


def capture() -> CudaCapture:
    made = make_capture(torch.device("cuda:0"))
    assert isinstance(made, CudaCapture)
    return made


def test_warms_up_and_captures_on_its_own_stream(cuda: FakeCuda) -> None:
    replay = capture().record(lambda: cuda.log.append(f"runs on {cuda.current}"))
    assert cuda.current == "usual"
    assert cuda.log == [
        "side waits for usual",
        *["runs on side"] * WARM_UP_RUNS,
        "usual waits for side",
        "capture",
        "runs on side",
    ]
    replay()
    assert cuda.log[-1] == "replay"


@pytest.mark.parametrize("failing_run", range(1, WARM_UP_RUNS + 2))
def test_the_usual_stream_is_back_after_a_failure(cuda: FakeCuda, failing_run: int) -> None:
    runs = []

    def step() -> None:
        runs.append(1)
        if len(runs) == failing_run:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        capture().record(step)
    assert cuda.current == "usual"


def test_a_buffer_is_sent_without_waiting_and_written_again_after_it(cuda: FakeCuda) -> None:
    numbers, host = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    wait: Callable[[], None] = capture().send(numbers, host)
    assert numbers.tolist() == [0, 1, 2]
    assert cuda.log == ["event on usual"]
    wait()
    assert cuda.log[-1] == "wait for event"


def test_memory_that_the_allocator_keeps_is_free(cuda: FakeCuda) -> None:
    assert capture().free_memory() == 5
    assert cuda.log == ["synchronize", "empty_cache"]


def test_no_graphs_on_a_cpu() -> None:
    assert make_capture(torch.device("cpu")) is None

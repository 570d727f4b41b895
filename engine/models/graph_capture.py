"""Capturing a function's work on the device, to be replayed in one launch.

A captured function must not look at what it computes, must not wait for the device, and sees the same
addresses for ever (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

# Libraries set themselves up in the first runs, which must not be captured.
WARM_UP_RUNS = 2

logger = logging.getLogger(__name__)


class Capture(Protocol):
    def host_buffer(self, size: int) -> torch.Tensor:
        """int64 [size] on the host, for ``send``."""
        ...

    def send(self, numbers: torch.Tensor, host: torch.Tensor) -> Callable[[], None]:
        """Start to copy ``host`` to ``numbers``, before whatever is launched next. What it returns waits
        until ``host`` may be written again."""
        ...

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run ``function`` and return what does its work again, on the same tensors."""
        ...

    def mark(self) -> Any:
        """A point between what has been launched and what will be, for ``seconds``. Does not wait."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """From one mark to the other, which the device must have passed: the host has read what came before
        it. The host's own clock cannot tell, as it launches and goes on."""
        ...

    def free_memory(self) -> int:
        """Bytes of the device's memory that nobody holds."""
        ...


class SentNumbers:
    """int64 ``numbers`` [size] in one place on the device, filled in ``host`` and sent without waiting."""

    def __init__(self, size: int, device: torch.device, capture: Capture) -> None:
        self.capture = capture
        self.host = capture.host_buffer(size)
        self.numbers = torch.zeros(size, dtype=torch.int64, device=device)
        self._wait: Callable[[], None] = lambda: None

    def wait(self) -> None:
        """Until ``host`` may be written again."""
        self._wait()

    def send(self, size: int) -> None:
        """The first ``size`` of them."""
        self._wait = self.capture.send(self.numbers[:size], self.host[:size])


class CudaCapture:
    """For all models of one engine: their replays follow each other on one stream, so one pool of memory
    serves them all. What a replay leaves in the pool is gone with the next one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64, pin_memory=True)

    def send(self, numbers: torch.Tensor, host: torch.Tensor) -> Callable[[], None]:
        numbers.copy_(host, non_blocking=True)
        sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        sent.record(torch.cuda.current_stream(self.device))
        return sent.synchronize

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self.device):
            usual_stream = torch.cuda.current_stream()
            try:
                self.stream.wait_stream(usual_stream)
                with torch.cuda.stream(self.stream):
                    for _ in range(WARM_UP_RUNS):
                        function()
                usual_stream.wait_stream(self.stream)
                graph = torch.cuda.CUDAGraph()
                with without_garbage_collection(), torch.cuda.graph(graph, self.pool, self.stream):
                    function()
            finally:
                # After a failed capture torch.cuda.graph leaves its own stream in place.
                torch.cuda.set_stream(usual_stream)
        return graph.replay

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1000

    def free_memory(self) -> int:
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what the allocator keeps for later is nobody's
            free, _ = torch.cuda.mem_get_info()
        return free


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Among the garbage may be old graphs and kernels. The driver refuses to destroy them during a capture,
    and fails it (https://github.com/pytorch/pytorch/pull/161037)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def make_capture(device: torch.device) -> Capture | None:
    """None for devices that have no graphs."""
    return CudaCapture(device) if device.type == "cuda" else None


Shape = TypeVar("Shape")
Shape_contra = TypeVar("Shape_contra", contravariant=True)
Texts = TypeVar("Texts")


class Captured(Protocol[Shape_contra]):
    def add(self, shape: Shape_contra, /) -> None:
        """Capture one more."""
        ...

    @property
    def replays(self) -> Mapping[Any, Callable[[], None]]:
        """By what is captured."""
        ...


Made = TypeVar("Made", bound=Captured[Any])


def capture_planned(
    what: str,
    usual: str,
    planned: Sequence[Shape],
    make: Callable[[], Made],
    texts_for: Callable[[Shape, int], list[Texts]],
    is_right: Callable[[Made, Shape, list[Texts]], bool],
    capture: Capture,
    deadline: float,
    min_free: int,
) -> Made | None:
    """What ``make`` makes, with the ``planned`` ones captured in order, until ``deadline`` (monotonic) or
    until fewer than ``min_free`` bytes are free. None, and a line in the log, if anything goes wrong: nothing
    of it is to be used.

    ``is_right`` says whether one does what the ``usual`` one does, by ``texts_for`` the n-th; none if such a
    batch does not fit into the cache. ``what`` and ``usual`` are for people.
    """
    started = time.monotonic()
    try:
        made = make()
        for number, shape in enumerate(planned):
            if time.monotonic() > deadline or capture.free_memory() < min_free:
                break
            texts = texts_for(shape, number)
            if not texts:
                continue
            made.add(shape)
            if not is_right(made, shape, texts):
                logger.warning(
                    "Captured %s differ from the usual %s (%s) and are not used", what, usual, shape
                )
                return None
    except Exception as error:  # drivers and kernels fail in many ways; the usual way needs none of this
        logger.warning("%s cannot be captured and are not used: %s", what[0].upper() + what[1:], error)
        return None
    took = time.monotonic() - started
    logger.info("Captured %d of %d %s in %.1f s", len(made.replays), len(planned), what, took)
    return made if made.replays else None

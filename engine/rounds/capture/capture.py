"""Captures a function's work on the device, to be replayed in one launch.

A captured function must not look at its results, must not wait for the device, and sees the same addresses
for ever (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch

# Libraries set themselves up in the first runs, which must not be captured.
WARM_UP_RUNS = 2


class Mark(Protocol):
    """Marks a moment on the device. Its time is known once the host has read something that was computed
    after it."""

    def elapsed_time(self, later: Any, /) -> float:
        """Returns milliseconds."""


class Capture(Protocol):
    def host_buffer(self, size: int) -> torch.Tensor:
        """Returns int64 [size] on the host, for ``send``."""

    def send(self, numbers: torch.Tensor, host: torch.Tensor) -> Callable[[], None]:
        """Starts to copy ``host`` to ``numbers``, before the next launch. Returns a function that waits until
        ``host`` may be written again."""

    def launch(self, function: Callable[[], object]) -> None:
        """Runs ``function`` on the device, after the numbers that were sent."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Runs ``function`` and returns a function that repeats its work on the same tensors."""

    def mark(self) -> Mark: ...

    def free_memory(self) -> int:
        """Returns the bytes of the device's memory that are free."""


class CudaCapture:
    """Captures for all models of one engine: their replays follow each other on one stream, so one pool of
    memory serves them all. The next replay overwrites the results of a replay in the pool.

    ``has_failed`` remembers a failure: up to torch 2.11 the allocator believes for ever that a capture which
    failed is under way (https://github.com/pytorch/pytorch/pull/180395). ``empty_cache`` would fail then, and
    so would every later capture of the process: neither is tried again.
    """

    has_failed: ClassVar[bool] = False

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

    def launch(self, function: Callable[[], object]) -> None:
        function()

    def mark(self) -> Mark:
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    @torch.inference_mode()
    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        if CudaCapture.has_failed:
            raise RuntimeError("an earlier capture of this process has failed")
        with torch.cuda.device(self.device):
            usual_stream = torch.cuda.current_stream()
            try:
                self.stream.wait_stream(usual_stream)
                with torch.cuda.stream(self.stream):
                    for _ in range(WARM_UP_RUNS):
                        function()
                usual_stream.wait_stream(self.stream)
                graph = torch.cuda.CUDAGraph()
                CudaCapture.has_failed = True
                # Other threads of the process may allocate meanwhile.
                with (
                    without_garbage_collection(),
                    torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"),
                ):
                    function()
                CudaCapture.has_failed = False
            finally:
                # After a failed capture torch.cuda.graph leaves its own stream in place.
                torch.cuda.set_stream(usual_stream)
        return graph.replay

    def free_memory(self) -> int:
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            if not CudaCapture.has_failed:
                torch.cuda.empty_cache()  # Memory that the allocator keeps for later counts as free.
            free, _ = torch.cuda.mem_get_info()
        return free


class SentNumbers:
    """Keeps int64 ``numbers`` [size] in one place on the device; they are filled in ``host`` and sent
    without waiting."""

    def __init__(self, size: int, device: torch.device, capture: Capture) -> None:
        self.capture = capture
        self.host = capture.host_buffer(size)
        self.numbers = torch.zeros(size, dtype=torch.int64, device=device)
        self._wait: Callable[[], None] = lambda: None

    def wait(self) -> None:
        """Waits until ``host`` may be written again."""
        self._wait()

    def send(self, end: int) -> None:
        """Sends the first ``end`` numbers."""
        self._wait = self.capture.send(self.numbers[:end], self.host[:end])


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Keeps garbage where it is, as old graphs and kernels may be part of it. The driver refuses to destroy
    them during a capture, and fails it (https://github.com/pytorch/pytorch/pull/161037)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def make_capture(device: torch.device) -> Capture | None:
    """Returns a ``Capture``; None for devices that have no graphs."""
    return CudaCapture(device) if device.type == "cuda" else None

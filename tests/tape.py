"""A stand-in for CUDA graphs on any device: a tape of torch's operations.

Like a graph it runs the function once, remembers what was launched on which tensors, and launches that again:
Python is not asked a second time, so whatever it decided or computed is frozen. What a graph cannot hold,
because the host would have to look at a result, is refused. What torch does not see, such as calls into the
native kernels, is not on the tape.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

# They wait for the device, copy from the host, or have an output whose size depends on the data.
REFUSED = (
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "item",
    "lift_fresh",
    "masked_select",
    "multinomial",
    "nonzero",
    "unique",
)


class NotCapturableError(RuntimeError):
    pass


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(REFUSED) or _indexes_by_mask(name, args):
            raise NotCapturableError(f"operation not permitted when stream is capturing: {func}")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        made: dict[int, torch.Tensor] = {}

        def again(x: Any) -> Any:
            return made.get(id(x), x) if isinstance(x, torch.Tensor) else x

        for func, args, kwargs, result in self.calls:
            anew = func(*tree_map(again, args), **tree_map(again, kwargs))
            for old, new in zip(tree_flatten(result)[0], tree_flatten(anew)[0], strict=True):
                if old is not new:
                    made[id(old)] = new


def _indexes_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    if name not in ("index", "index_put", "index_put_"):
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])


class ClockMark:
    """An event marks a moment of the host's clock: operations are over when they return."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, later: "ClockMark") -> float:
        return 1000 * (later.seconds - self.seconds)


class TapeCapture:
    """In place of ``CudaCapture``. Sends late, as a device does: the host's numbers are read when the replay
    begins, or when somebody waits for them."""

    num_warm_ups = 0  # runs before a capture; a device needs some

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_recorded = 0
        self.names: list[str] = []  # recorded operations
        self._late: list[Callable[[], object]] = []

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64)

    def send(self, numbers: torch.Tensor, host: torch.Tensor) -> Callable[[], None]:
        self._late.append(lambda: numbers.copy_(host))
        return self._arrive

    def launch(self, function: Callable[[], object]) -> None:
        self._late.append(function)

    def mark(self) -> ClockMark:
        return ClockMark()

    @torch.inference_mode()
    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self._arrive()
        for _ in range(self.num_warm_ups):
            function()
        tape = Tape()
        with tape:
            function()
        self.num_recorded += 1
        self.names += [func.overloadpacket.__name__ for func, *_ in tape.calls]

        def replay() -> None:
            self._arrive()
            with torch.inference_mode():
                tape.replay()

        return replay

    def free_memory(self) -> int:
        return 0

    def _arrive(self) -> None:
        late, self._late = self._late, []
        for copy in late:
            copy()

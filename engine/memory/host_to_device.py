"""Moves numbers between host and device without waiting for the device's earlier work."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

NUMPY_TYPES = {torch.int64: np.int64, torch.float32: np.float32}


def on_device(
    values: Sequence[float] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Returns ``torch.tensor(values, device=device)``, sent by ``send``. numpy reads lists three times
    faster."""
    return send(torch.from_numpy(np.array(values, dtype=NUMPY_TYPES[dtype])), device)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns ``tensor.to(device)``, which for a GPU would copy from pageable memory, and wait."""
    if device.type == "cpu":
        return tensor
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Starts a copy to the host; what is returned waits for it, but not for what is launched after this."""
    if tensor.device.type != "cuda":
        return lambda: tensor
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copied.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))

    def read() -> torch.Tensor:
        event.synchronize()
        return copied

    return read

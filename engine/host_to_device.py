"""Numbers from the host to a device, without waiting until the device has done what it was given before."""

from collections.abc import Sequence

import torch


def on_device(
    values: Sequence[float] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """``torch.tensor(values, device=device)``, as ``send`` sends it."""
    return send(torch.tensor(values, dtype=dtype), device)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor.to(device)``, which for a GPU would copy from pageable memory, and wait."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)

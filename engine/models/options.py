"""Says how a model is loaded."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LoadOptions:
    """With a ``device_map`` accelerate places the layers, and ``device`` has no say. ``compact_weights``:
    keep quantised weights quantised, and on a CPU others in 16 bits where that loses nothing.
    ``bf16_linears``: linear layers round their weights and inputs to bfloat16, in kernels that multiply in
    it. ``self_check``: refuse a model that over our cache deviates from itself. ``quantize``: to fp8,
    int8 or int4, or ``none``. ``cache_dtype`` as in ``BatchingSettings``. ``max_model_len``: tokens of the
    longest text that will be served, None: the model's context."""

    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    device_map: str | dict[str, str | int] | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    native_kernels: bool = True
    compact_weights: bool = True
    bf16_linears: bool = False
    self_check: bool = True
    quantize: str = "none"
    cache_dtype: str = "auto"
    max_model_len: int | None = None

"""Says how a model is loaded, and decides it from the settings and the machine."""

from dataclasses import dataclass, replace

import torch

from truedraft.engine.config import SELF_DRAFTS, EngineConfig
from truedraft.engine.errors import ModelLoadError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The first NVIDIA devices that compute in bfloat16.
BFLOAT16_CAPABILITY = (8, 0)


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

    @property
    def is_on_cpu(self) -> bool:
        return self.device.type == "cpu" and self.device_map is None


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError(f"device is {name!r}, but torch finds no CUDA device")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    has_bfloat16 = not is_nvidia or torch.cuda.get_device_capability(device) >= BFLOAT16_CAPABILITY
    return torch.bfloat16 if has_bfloat16 else torch.float16


def load_options(config: EngineConfig) -> LoadOptions:
    """Returns those of the target and of drafts of their own; ``ModelLoadError`` if the device is not
    there."""
    device = resolve_device(config.device)
    return LoadOptions(
        dtype=resolve_dtype(config.dtype, device),
        device=device,
        device_map=config.device_map,
        trust_remote_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
        native_kernels=config.native_kernels,
        # float32 by name is for comparisons: else 16 bits are kept where they lose nothing. On a GPU a type
        # of 16 bits says what is computed in, whatever the weights are kept in.
        compact_weights=config.dtype == "auto" or (device.type == "cuda" and config.dtype != "float32"),
        self_check=config.self_check,
        quantize=config.quantize,
        cache_dtype=_cache_dtype(config, device),
        max_model_len=config.max_model_len,
    )


def _cache_dtype(config: EngineConfig, device: torch.device) -> str:
    """Returns the setting, which is float32 by itself where that is asked for by name."""
    is_exact = config.dtype == "float32" and device.type == "cpu"
    return "float32" if is_exact and config.cache_dtype == "auto" else config.cache_dtype


def draft_source(config: EngineConfig) -> tuple[str, LoadOptions]:
    """The draft's checkpoint, and how it is loaded."""
    options = load_options(config)
    assert config.target is not None
    assert config.draft is not None
    if config.draft not in SELF_DRAFTS:
        return config.draft, options
    # Whatever the target computes in, only few bits make a draft of it.
    return config.target, replace(options, quantize=SELF_DRAFTS[config.draft], compact_weights=True)

"""Decides how a model is loaded, from the settings and the machine."""

from dataclasses import dataclass, replace

import torch

from truedraft.engine.config import SELF_DRAFTS, EngineConfig
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.parallel.group import Group

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
# NVIDIA devices compute in bfloat16 from this capability on.
BFLOAT16_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class LoadOptions:
    """Says how a model is loaded.

    With a ``device_map`` accelerate places the layers, and ``device`` has no effect. ``compact_weights``
    keeps quantised weights quantised, and on a CPU others in 16 bits where that loses nothing.
    ``bf16_linears`` lets linear layers round their weights and inputs to bfloat16, in kernels that multiply
    in it. ``self_check`` refuses a model whose results over our cache deviate from its own. ``quantize`` is
    fp8, int8, int4 or ``none``. ``cache_dtype`` is as in ``BatchingSettings``. ``max_model_len`` is the
    longest text that will be served, in tokens; None: the model's context. With a ``group`` a rank's share
    is loaded.
    """

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
    group: Group | None = None

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
    """Returns the options of the target and of separate drafts; raises ``ModelLoadError`` if the device does
    not exist."""
    device = resolve_device(config.device)
    if config.draft_cache_dtype != "auto" and device.type != "cpu":
        raise ModelLoadError(
            f"draft_cache_dtype is {config.draft_cache_dtype}, but on a GPU caches have the model's type: "
            "leave it out"
        )
    return LoadOptions(
        dtype=resolve_dtype(config.dtype, device),
        device=device,
        device_map=config.device_map,
        trust_remote_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
        native_kernels=config.native_kernels,
        # Naming float32 is for comparisons; otherwise 16 bits are kept where they lose nothing. On a GPU a
        # type of 16 bits is the type of arithmetic, however the weights are kept.
        compact_weights=config.dtype == "auto" or (device.type == "cuda" and config.dtype != "float32"),
        self_check=config.self_check,
        quantize=config.quantize,
        cache_dtype=_cache_dtype(config, device),
        max_model_len=config.max_model_len,
    )


def _cache_dtype(config: EngineConfig, device: torch.device) -> str:
    """Returns the setting; its default is float32 where the user names float32 as dtype."""
    is_exact = config.dtype == "float32" and device.type == "cpu"
    return "float32" if is_exact and config.cache_dtype == "auto" else config.cache_dtype


def draft_source(config: EngineConfig) -> tuple[str, LoadOptions]:
    """Returns the draft's checkpoint, and the options with which it is loaded."""
    options = load_options(config)
    if config.draft_cache_dtype != "auto":
        options = replace(options, cache_dtype=config.draft_cache_dtype)
    assert config.target is not None
    assert config.draft is not None
    if config.draft not in SELF_DRAFTS:
        return config.draft, options
    # The target's weights become a draft only by fewer bits, whatever the target computes in.
    return config.target, replace(options, quantize=SELF_DRAFTS[config.draft], compact_weights=True)

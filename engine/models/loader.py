"""Checkpoint folder, hub id or GGUF file to a model that attends through our cache.

Models of known families are read by the names of their tensors (``reader``) and computed by layers of ours,
others by transformers' module. What goes wrong with a user's path or checkpoint becomes a ``ModelLoadError``
that says so in a sentence.
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from truedraft.engine.checkpoints.account import check_loaded, check_tokens, has_all, untie
from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.checkpoints.eight_bit import compact_linears
from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.checkpoints.packed import PackedCheckpoint
from truedraft.engine.checkpoints.quantise import LAYER_TYPES, QuantisedCheckpoint, ScaledCheckpoint
from truedraft.engine.checkpoints.quantization import (
    check_method,
    dequantise_for_cpu,
    open_for_gpu,
    open_quantised,
)
from truedraft.engine.checkpoints.stacks import stored_in, stored_tensors
from truedraft.engine.config import SELF_DRAFTS, EngineConfig
from truedraft.engine.cuda.scaled import multiplies_fp8
from truedraft.engine.cuda.triton_run import serves
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.families.fit import (
    can_be_quantised,
    check_settings,
    corrected,
    has_experts,
    has_family,
    reads_columns,
    with_stacks,
)
from truedraft.engine.families.head_order import to_grouped
from truedraft.engine.families.linear import replace_linears
from truedraft.engine.families.table import FAMILIES
from truedraft.engine.formats.gguf_file import GgufError, is_gguf
from truedraft.engine.gguf.checkpoint import check_complete, generation_config, open_gguf
from truedraft.engine.layers.attention import ATTENTION_NAME
from truedraft.engine.layers.linear import TorchLinears
from truedraft.engine.models.architecture import (
    Architecture,
    check_layers,
    check_memory,
    plain_skeleton,
    read_architecture,
)
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.fused import count, fuse_module, load_fused, multiplies_bfloat16
from truedraft.engine.models.hf.decoder_only import DecoderModel
from truedraft.engine.models.hf.encoder_decoder import EncoderDecoderModel
from truedraft.engine.models.hf.self_check import self_check
from truedraft.engine.models.load_errors import check_folder, stage
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.models.positions import choose_rotary_factors
from truedraft.engine.native.linear import linear_library
from truedraft.engine.native.linears import NativeLinears

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The first NVIDIA devices that compute in bfloat16.
BFLOAT16_CAPABILITY = (8, 0)
NOT_QUANTISED = (
    "{} cannot be quantised: that needs a model of a fused family (docs/models.md), in float32 and with a C "
    "compiler on a CPU, or on a GPU of compute capability 8.0 with Triton"
)
NO_FP8 = (
    "{} cannot be quantised to fp8: that needs bfloat16 and Triton on a GPU of compute capability 8.9 or "
    "higher; quantize to int8 instead"
)


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


def load_model(path: str, options: LoadOptions) -> Model:
    """Loads the model at ``path`` by the fastest way that computes what transformers' own module does."""
    has_kernels = options.native_kernels or options.device.type == "cuda"
    if options.quantize != "none" and not (
        options.compact_weights and has_kernels and options.device_map is None
    ):
        raise ModelLoadError(
            f"{path} cannot be quantised: that needs dtype auto, native_kernels and no device_map"
        )
    if options.quantize == "fp8" and not multiplies_fp8(options.dtype, options.device):
        raise ModelLoadError(NO_FP8.format(path))
    if options.cache_dtype != "auto" and options.device.type != "cpu":
        raise ModelLoadError(
            f"cache_dtype is {options.cache_dtype}, but on a GPU caches have the model's type: leave it out"
        )
    if is_gguf(path):
        return _load_gguf(path, options)
    found = _find(path, options)
    check_tokens(found.path, found.config, found.generation_config())
    with stage(path, "building the model"):
        return _load_found(found, options)


def _load_found(found: Architecture, options: LoadOptions) -> Model:
    skeleton = _fused_skeleton(found, options.dtype) if options.device_map is None else None
    if skeleton is not None and options.quantize != "none" and not can_be_quantised(skeleton.config):
        raise ModelLoadError(
            f"{found.path} cannot be quantised: its experts have outputs in an order of their own"
        )
    # Where ours would run one by one, transformers' products of all experts at once suit a GPU better.
    is_mixed = skeleton is not None and has_experts(skeleton.config) and options.device.type != "cpu"
    if is_mixed and not serves([], options.dtype, options.device):
        skeleton = None
    if skeleton is not None:
        check_memory(found.path, skeleton, options)
        checkpoint = _named_tensors(found, skeleton, options)
        model = None if checkpoint is None else _load_fused(found, checkpoint, options)
        if model is not None and not (is_mixed and model.runs_lone_experts and options.quantize == "none"):
            return model
        del model
    if options.quantize != "none":
        raise ModelLoadError(NOT_QUANTISED.format(found.path))
    if skeleton is not None and not is_mixed:
        logger.warning("%s is served by transformers' layers, not by the fused ones: slower", found.path)
    return _load_by_module(found, options)


def _load_by_module(found: Architecture, options: LoadOptions) -> Model:
    if options.cache_dtype != "auto" and DTYPES[options.cache_dtype] != options.dtype:
        raise ModelLoadError(
            f"{found.path} is served by transformers' layers, whose caches have the model's type: leave out "
            f"cache_dtype, which is {options.cache_dtype}"
        )
    if not found.has_own_code:
        check_memory(found.path, _check_without_weights(found, options), options)
    model = load_decoder(found, options)
    # Families of encoder-decoder models are known by name; what they share with generate() is tested.
    if not isinstance(model, DecoderModel):
        return model
    if options.self_check:
        self_check(model)
    config = model.module.config
    is_known = has_family(model.module) and not (has_experts(config) or reads_columns(config))
    if model.is_quantised and options.device_map is None and is_known:
        return fuse_module(model, options) or model
    return model


def check_config(path: str, options: LoadOptions) -> None:
    """``ModelLoadError`` if config.json alone, without weights, tells that the model cannot be served."""
    found = read_architecture(path, options)
    if _fused_skeleton(found, options.dtype) is None:
        _check_without_weights(found, options)


def _check_without_weights(found: Architecture, options: LoadOptions) -> Any:
    """Refuses from the config what no weights could change; returns the module without weights."""
    with stage(found.path, "config.json"):
        module = found.skeleton(options.dtype, ATTENTION_NAME)
    if not found.is_encoder_decoder:
        check_layers(module)
    return module


def load_if_rounded(path: str, options: LoadOptions) -> FusedDecoder | None:
    """Returns the model at ``path`` if it rounds what transformers' layers do not: inputs of quantised
    layers, products in bfloat16, keys and values."""
    has_kernels = options.native_kernels or options.device.type == "cuda"
    if options.device_map is not None or not has_kernels:
        return None
    if options.quantize == "none" and not multiplies_bfloat16(options) and not _may_round(path, options):
        return None
    model = load_model(path, options)
    return model if isinstance(model, FusedDecoder) and model.rounds else None


def _may_round(path: str, options: LoadOptions) -> bool:
    """Tells whether a model may have quantised layers, or caches of fewer bits than it is computed in."""
    compact, cached = options.compact_weights, options.cache_dtype
    if is_gguf(path):
        return compact or cached == "float16"
    found = _find(path, options)
    if cached == "float16" or (cached == "auto" and compact and _is_on_cpu(options)):
        return _fused_skeleton(found, options.dtype) is not None
    quantised = _find_quantised(found, options) if compact else None
    return quantised is not None and isinstance(quantised[0], PackedCheckpoint)


def _load_gguf(path: str, options: LoadOptions) -> FusedDecoder:
    if options.device_map is not None:
        raise ModelLoadError(f"{path} is a GGUF file, which is not spread over devices: leave out device_map")
    with stage(path, ""):
        file = _open_gguf(path, options)
        make_skeleton = partial(plain_skeleton, file.config)
        check_complete(make_skeleton(options.dtype), file)
        model = load_fused(make_skeleton, requantised(file, options), generation_config(file), options)
    if model is None:
        words = "its logits are not those of transformers' model"
        raise ModelLoadError(
            f"{path} cannot be served: {words}" if options.quantize == "none" else NOT_QUANTISED.format(path)
        )
    file.release()
    return model


def requantised(checkpoint: Checkpoint, options: LoadOptions) -> Checkpoint:
    """Returns the checkpoint as the setting ``quantize`` asks for it."""
    if options.quantize == "none":
        return checkpoint
    if options.quantize == "fp8":
        return ScaledCheckpoint(checkpoint)
    return QuantisedCheckpoint(checkpoint, LAYER_TYPES[options.quantize])


def _fused_skeleton(found: Architecture, dtype: torch.dtype) -> Any:
    """Returns transformers' module without weights, if its family is computed by layers of ours; else
    None."""
    with stage(found.path, "config.json"):
        config = found.fused_config
        if config is None or config.model_type not in FAMILIES:
            return None
        check_settings(config)
        module = plain_skeleton(config, dtype)
        return module if has_family(module) else None


def _named_tensors(found: Architecture, skeleton: Any, options: LoadOptions) -> Checkpoint | None:
    """Returns a checkpoint that has all tensors of ``skeleton`` by their names; None where transformers has
    to rename, dequantise or explain."""
    with stage(found.path, "weights"):
        checkpoint: Checkpoint | None
        if getattr(found.config, "quantization_config", None):
            checkpoint, _ = _find_quantised(found, options) or (None, None)
        else:
            checkpoint = found.checkpoint(options.allow_pickle)
        if checkpoint is None:
            return None
        untie(skeleton, checkpoint)
        checkpoint = with_stacks(checkpoint, skeleton)
        return checkpoint if has_all(skeleton, checkpoint) else None


def _load_fused(found: Architecture, checkpoint: Checkpoint, options: LoadOptions) -> FusedDecoder | None:
    def make_skeleton(dtype: torch.dtype) -> Any:
        module = plain_skeleton(found.fused_config, dtype)
        untie(module, checkpoint)
        return module

    generation = found.generation_config()
    with stage(found.path, "weights"):
        return load_fused(make_skeleton, requantised(checkpoint, options), generation, options)


def load_decoder(found: Architecture | str, options: LoadOptions) -> DecoderModel | EncoderDecoderModel:
    """The model by transformers' module, with linear layers of our own on a CPU."""
    found = _find(found, options) if isinstance(found, str) else found
    module = _load_module(found, options, ATTENTION_NAME)
    device = module.get_input_embeddings().weight.device
    facts = ModelFacts(module.config, module.generation_config, count(module), options.dtype, device)
    if device.type == "cpu" and options.dtype == torch.float32 and options.device_map is None:
        library = linear_library() if options.native_kernels else None
        compact = options.compact_weights
        replace_linears(module, TorchLinears() if library is None else NativeLinears(library, compact))
    served = EncoderDecoderModel if found.is_encoder_decoder else DecoderModel
    return served(module, facts)


def _find(path: str, options: LoadOptions) -> Architecture:
    """What the folder or repository ``path`` holds, by its config.json."""
    with stage(path, ""):
        check_folder(path, allow_pickle=options.allow_pickle)
        expanded = str(Path(path).expanduser()) if path.startswith("~") else path
    return read_architecture(expanded, options)


def _open_gguf(path: str, options: LoadOptions) -> Any:
    try:
        file = open_gguf(path)
    except GgufError as error:
        raise ModelLoadError(str(error)) from error
    choose_rotary_factors(file.config, options.max_model_len)
    return file


def load_causal_model(path: str, options: LoadOptions, attention: str) -> Any:
    """The transformers model as it is, with the attention implementation of that name."""
    if is_gguf(path):
        with stage(path, ""):
            file = _open_gguf(path, options)
            check_complete(plain_skeleton(file.config, options.dtype), file)
            return _module_of(file, file.config, generation_config(file), options, attention)
    found = _find(path, options)
    if (quantised := _find_quantised(found, options)) is not None:
        checkpoint, config = quantised
        return _module_of(checkpoint, config, found.generation_config(), options, attention)
    return _load_module(found, options, attention)


def _find_quantised(found: Architecture, options: LoadOptions) -> tuple[Checkpoint, Any] | None:
    """The checkpoint and its config, if it is quantised in a way that we read ourselves."""
    if found.has_own_code or not (_is_on_cpu(options) or _keeps_blocks(options)):
        return None
    config = found.fused_config
    quantization = getattr(found.config, "quantization_config", None)
    if config is None or config.model_type not in FAMILIES or not quantization:
        return None
    with stage(found.path, "weights"):
        try:
            source = found.checkpoint(options.allow_pickle)
        except SafetensorError:
            check_method(quantization)  # what the config tells is said first
            raise
        opened = None if source is None else _open_quantised(source, quantization, options)
    return None if opened is None else (opened, config)


def _open_quantised(source: Checkpoint, quantization: Any, options: LoadOptions) -> Checkpoint | None:
    if _is_on_cpu(options):
        return open_quantised(source, quantization, options.compact_weights)
    return open_for_gpu(source, quantization, multiplies_fp8(options.dtype, options.device))


def open_checkpoint(path: str, options: LoadOptions) -> Checkpoint | None:
    """Returns the tensors of a folder or hub id under the names that they have there; None if they are
    elsewhere, or quantised in a way that is not read here."""
    found = _find(path, options)
    with stage(found.path, "weights"):
        source = Checkpoint.find(found.path, options.allow_pickle)
        quantization = getattr(found.config, "quantization_config", None)
        if source is None or not quantization:
            return source
        return _open_quantised(source, quantization, options)


def _module_of(
    checkpoint: Checkpoint, config: Any, generation: Any, options: LoadOptions, attention: str
) -> Any:
    """transformers' module with the weights that ``checkpoint`` stands for."""
    with init_empty_weights(include_buffers=False):
        module: Any = AutoModelForCausalLM.from_config(
            config, dtype=options.dtype, attn_implementation=attention
        )
    untie(module, checkpoint)
    checkpoint = with_stacks(checkpoint, module)
    for name in [name for name in stored_tensors(module) if name in checkpoint.files]:
        (tensor,) = checkpoint.read([name]).values()
        tensor = to_grouped(config, name, tensor) if checkpoint.is_tiled else tensor
        tensor = tensor.to(stored_in(name, options.dtype))
        module.load_state_dict({name: tensor}, strict=False, assign=True)
    module.tie_weights()
    if (factors := checkpoint.rotary_factors()) is not None:
        module.model.rotary_emb.inv_freq /= factors
    module.generation_config = generation
    return corrected(module.eval().requires_grad_(False).to(options.device))


def _load_module(found: Architecture, options: LoadOptions, attention: str) -> Any:
    path = found.path
    own_code = {"trust_remote_code": True} if found.has_own_code else {}
    quantization = getattr(found.config, "quantization_config", None)
    with stage(path, "weights"):
        if quantization and _is_on_cpu(options):
            check_method(quantization)
            dequantise_for_cpu(quantization, Checkpoint.find(path, options.allow_pickle))
        model, loaded = found.module_class.from_pretrained(
            path,
            config=found.config,
            dtype=options.dtype,
            attn_implementation=found.attention(attention),
            use_safetensors=None if options.allow_pickle else True,
            device_map=options.device_map,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, with both sizes
            **own_code,
        )
        check_loaded(path, loaded, options.allow_pickle)
    model.generation_config = found.generation_config()
    corrected(model.eval().requires_grad_(False))
    if options.device_map is not None:
        _refuse_offload(path, getattr(model, "hf_device_map", {}))
        return model
    if hasattr(model, "hf_quantizer"):
        return model
    if quantization:  # dequantised; the other weights have the checkpoint's type
        model.to(options.dtype)
        if options.compact_weights and _is_on_cpu(options):
            compact_linears(model, Checkpoint.find(path, options.allow_pickle))
    return model.to(options.device)


def _is_on_cpu(options: LoadOptions) -> bool:
    return options.device.type == "cpu" and options.device_map is None


def _keeps_blocks(options: LoadOptions) -> bool:
    """Tells whether a GPU multiplies by quantised weights as they are."""
    return (
        options.compact_weights and options.device_map is None and serves([], options.dtype, options.device)
    )


def _refuse_offload(path: str, placement: dict[str, Any]) -> None:
    """Offloaded layers would be copied to the device in every step."""
    places = {str(place) for place in placement.values()}
    if "disk" in places or ("cpu" in places and len(places) > 1):
        raise ModelLoadError(
            f"{path} does not fit on the devices at hand: accelerate would leave a part of it on "
            f"{'disk' if 'disk' in places else 'the CPU'}; use a smaller dtype or model, or more devices"
        )

"""Loads a model, step by step: from a path to passes over our cache.

Models of known families are read by the names of their tensors (``reader``) and computed by our layers,
others by transformers' module. Faults of a user's path or checkpoint become a ``ModelLoadError`` that
describes them in a sentence.
"""

import logging
from functools import partial
from typing import Any

import torch

from truedraft.engine.checkpoints.account import check_tokens, untie
from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.checkpoints.packed import PackedCheckpoint
from truedraft.engine.cuda.scaled import multiplies_fp8
from truedraft.engine.cuda.triton_run import serves
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.families.fit import (
    can_be_quantised,
    has_experts,
    has_family,
    reads_columns,
)
from truedraft.engine.formats.gguf_file import is_gguf
from truedraft.engine.gguf.checkpoint import check_complete, generation_config
from truedraft.engine.layers.attention import ATTENTION_NAME
from truedraft.engine.models.architecture import (
    Architecture,
    check_layers,
    check_memory,
    plain_skeleton,
    read_architecture,
)
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.fused import fuse_module, load_fused, multiplies_bfloat16
from truedraft.engine.models.hf.decoder_only import DecoderModel
from truedraft.engine.models.hf.module import load_decoder
from truedraft.engine.models.hf.self_check import self_check
from truedraft.engine.models.load_errors import stage
from truedraft.engine.models.options import CACHE_DTYPES, LoadOptions
from truedraft.engine.models.sources import (
    find,
    find_quantised,
    fused_skeleton,
    named_tensors,
    open_gguf_file,
    requantised,
)

logger = logging.getLogger(__name__)

NOT_QUANTISED = (
    "{} cannot be quantised: that needs a model of a fused family (docs/models.md), in float32 and with a C "
    "compiler on a CPU, or on a GPU of compute capability 8.0 with Triton"
)
NO_FP8 = (
    "{} cannot be quantised to fp8: that needs bfloat16 and Triton on a GPU of compute capability 8.9 or "
    "higher; quantize to int8 instead"
)


def load_model(path: str, options: LoadOptions) -> Model:
    """Loads the model at ``path`` by the fastest way that computes what transformers' own module does."""
    # 1. The machine must have what the settings ask for.
    _check_options(path, options)
    if is_gguf(path):
        # A GGUF file, which contains its config, goes through the same steps.
        return load_gguf(path, options)
    # 2. config.json says what the model is. Faults that no weights could mend are refused here.
    found = find(path, options)
    check_tokens(found.path, found.config, found.generation_config())
    with stage(path, "building the model"):
        skeleton = _skeleton_for_us(found, options)
        model = None if skeleton is None else load_known(found, skeleton, options)
        if model is not None and _is_faster(model, options):
            return model
        del model
        # 6. Otherwise transformers' module serves: probed without weights, loaded, and compared with itself.
        _check_unfused(found, skeleton, options)
        return _load_by_module(found, options)


def load_known(found: Architecture, skeleton: Any, options: LoadOptions) -> FusedDecoder | None:
    """Loads a decoder by our layers; returns None if these do not compute what transformers' do, or if its
    tensors have other names than the module ``skeleton``."""
    # 3. transformers has built its module without weights: we know its layers.
    check_memory(found.path, skeleton, options)
    # 4. The tensors are found by name, in whatever form they are stored.
    checkpoint = named_tensors(found, skeleton, options)
    # 5. Weights are read layer by layer, and transformers' layers compute a few texts with each. Our layers
    # take the weights, the fastest kernels first, until they give the same logits.
    return None if checkpoint is None else _load_fused(found, checkpoint, options)


def _check_options(path: str, options: LoadOptions) -> None:
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


def _skeleton_for_us(found: Architecture, options: LoadOptions) -> Any:
    """Returns transformers' module without weights, if our layers are to be tried; otherwise None."""
    skeleton = fused_skeleton(found, options.dtype) if options.device_map is None else None
    if skeleton is None:
        return None
    if options.quantize != "none" and not can_be_quantised(skeleton.config):
        raise ModelLoadError(
            f"{found.path} cannot be quantised: its experts have outputs in an order of their own"
        )
    is_mixed = _has_experts_on_a_gpu(skeleton, options)
    return None if is_mixed and not serves([], options.dtype, options.device) else skeleton


def _is_faster(model: FusedDecoder, options: LoadOptions) -> bool:
    """Tells whether our layers are faster than transformers': where ours would run experts one by one,
    transformers' products of all at once suit a GPU better."""
    return options.device.type == "cpu" or options.quantize != "none" or not model.runs_lone_experts


def _check_unfused(found: Architecture, skeleton: Any, options: LoadOptions) -> None:
    """Refuses settings that only our layers could honour, and logs where their speed is missed."""
    if options.group is not None:
        raise ModelLoadError(
            f"{found.path} is not divided among {options.group.size} ranks: that needs a model of a fused "
            "family (docs/models.md); set tensor_parallel_size to 1"
        )
    if options.quantize != "none":
        raise ModelLoadError(NOT_QUANTISED.format(found.path))
    if skeleton is not None and not _has_experts_on_a_gpu(skeleton, options):
        logger.warning("%s is served by transformers' layers, not by the fused ones: slower", found.path)


def _has_experts_on_a_gpu(skeleton: Any, options: LoadOptions) -> bool:
    return has_experts(skeleton.config) and options.device.type != "cpu"


def _load_by_module(found: Architecture, options: LoadOptions) -> Model:
    if options.cache_dtype != "auto" and CACHE_DTYPES[options.cache_dtype] != options.dtype:
        raise ModelLoadError(
            f"{found.path} is served by transformers' layers, whose caches have the model's type: leave out "
            f"cache_dtype, which is {options.cache_dtype}"
        )
    if not found.has_own_code:
        check_memory(found.path, _check_without_weights(found, options), options)
    model = load_decoder(found, options)
    # Families of encoder-decoder models are known by name; tests compare what they share with generate().
    if not isinstance(model, DecoderModel):
        return model
    if options.self_check:
        self_check(model)
    config = model.module.config
    is_known = has_family(model.module) and not (has_experts(config) or reads_columns(config))
    if model.is_quantised and options.device_map is None and is_known:
        return fuse_module(model, options) or model
    return model


def load_gguf(path: str, options: LoadOptions, *, may_pool: bool = False) -> FusedDecoder:
    """Loads a file that writes text; if it ``may_pool``, also one whose vectors of tokens are to be
    pooled."""
    if options.device_map is not None:
        raise ModelLoadError(f"{path} is a GGUF file, which is not spread over devices: leave out device_map")
    with stage(path, ""):
        file = open_gguf_file(path, options)
        metadata, key = file.file.metadata, f"{file.file.architecture}.pooling_type"
        if metadata.get(key) and not may_pool:
            raise ModelLoadError(
                f"{path} has {key} = {metadata[key]}: it makes vectors, which task embed serves"
            )
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


def _load_fused(found: Architecture, checkpoint: Checkpoint, options: LoadOptions) -> FusedDecoder | None:
    def make_skeleton(dtype: torch.dtype) -> Any:
        module = plain_skeleton(found.fused_config, dtype)
        untie(module, checkpoint)
        return module

    generation = found.generation_config()
    with stage(found.path, "weights"):
        return load_fused(make_skeleton, requantised(checkpoint, options), generation, options)


def check_config(path: str, options: LoadOptions) -> None:
    """Raises ``ModelLoadError`` if config.json alone, without weights, tells that the model cannot be
    served."""
    found = read_architecture(path, options)
    if fused_skeleton(found, options.dtype) is None:
        _check_without_weights(found, options)


def _check_without_weights(found: Architecture, options: LoadOptions) -> Any:
    """Refuses faults of the config that no weights could mend; returns the module without weights."""
    with stage(found.path, "config.json"):
        module = found.skeleton(options.dtype, ATTENTION_NAME)
    if not found.is_encoder_decoder:
        check_layers(module)
    return module


def load_if_rounded(path: str, options: LoadOptions) -> FusedDecoder | None:
    """Returns the model at ``path`` if it rounds numbers that transformers' layers do not: inputs of
    quantised layers, products in bfloat16, keys and values."""
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
        return compact or cached in ("float16", "int8")
    found = find(path, options)
    if cached in ("float16", "int8") or (cached == "auto" and compact and options.is_on_cpu):
        return fused_skeleton(found, options.dtype) is not None
    quantised = find_quantised(found, options) if compact else None
    return quantised is not None and isinstance(quantised[0], PackedCheckpoint)

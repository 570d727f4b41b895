"""Finds what a path holds: a config, and tensors in whatever form they are stored."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from truedraft.engine.checkpoints.account import has_all, untie
from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.checkpoints.quantise import LAYER_TYPES, QuantisedCheckpoint, ScaledCheckpoint
from truedraft.engine.checkpoints.quantization import (
    check_method,
    open_for_gpu,
    open_quantised,
)
from truedraft.engine.cuda.scaled import multiplies_fp8
from truedraft.engine.cuda.triton_run import serves
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.families.fit import (
    check_settings,
    has_family,
    with_stacks,
)
from truedraft.engine.families.table import FAMILIES
from truedraft.engine.formats.gguf_file import GgufError, is_gguf
from truedraft.engine.gguf.checkpoint import open_gguf
from truedraft.engine.gguf.encoders import holds_encoder, open_encoder
from truedraft.engine.hub.folders import check_path
from truedraft.engine.models.architecture import (
    Architecture,
    plain_skeleton,
    read_architecture,
)
from truedraft.engine.models.load_errors import stage
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.models.positions import choose_rotary_factors


def find(path: str, options: LoadOptions) -> Architecture:
    """Returns the contents of the folder or repository ``path``, according to its config.json."""
    with stage(path, ""):
        check_path(path, allow_pickle=options.allow_pickle)
        expanded = str(Path(path).expanduser()) if path.startswith("~") else path
    return read_architecture(expanded, options)


def way_of(path: str) -> str:
    """Returns which forward would compute the model at ``path``: fused layers or transformers' modules. No
    weights are read. Raises ``ModelLoadError`` where the model is known not to be served."""
    options = LoadOptions()
    with stage(path, ""):
        if is_gguf(path) and holds_encoder(path):
            open_encoder(path)
            return "fused"
    if is_gguf(path):
        open_gguf_file(path, options)
        return "fused"
    found = find(path, options)
    return "transformers" if fused_skeleton(found, options.dtype) is None else "fused"


def open_gguf_file(path: str, options: LoadOptions) -> Any:
    try:
        file = open_gguf(path)
    except GgufError as error:
        raise ModelLoadError(str(error)) from error
    choose_rotary_factors(file.config, options.max_model_len)
    return file


def fused_skeleton(found: Architecture, dtype: torch.dtype) -> Any:
    """Returns transformers' module without weights, if our layers compute its family; otherwise None."""
    with stage(found.path, "config.json"):
        config = found.fused_config
        if config is None or config.model_type not in FAMILIES:
            return None
        check_settings(config)
        module = plain_skeleton(config, dtype)
        return module if has_family(module) else None


def named_tensors(found: Architecture, skeleton: Any, options: LoadOptions) -> Checkpoint | None:
    """Returns a checkpoint that has all tensors of ``skeleton`` by their names; None where transformers has
    to rename, dequantise or report them."""
    with stage(found.path, "weights"):
        checkpoint: Checkpoint | None
        if getattr(found.config, "quantization_config", None):
            checkpoint, _ = find_quantised(found, options) or (None, None)
        else:
            checkpoint = found.checkpoint(options.allow_pickle)
        if checkpoint is None:
            return None
        untie(skeleton, checkpoint)
        checkpoint = with_stacks(checkpoint, skeleton)
        return checkpoint if has_all(skeleton, checkpoint) else None


def requantised(checkpoint: Checkpoint, options: LoadOptions) -> Checkpoint:
    """Returns the checkpoint as the setting ``quantize`` asks for it."""
    if options.quantize == "none":
        return checkpoint
    if options.quantize == "fp8":
        return ScaledCheckpoint(checkpoint)
    return QuantisedCheckpoint(checkpoint, LAYER_TYPES[options.quantize])


def open_checkpoint(path: str, options: LoadOptions) -> Checkpoint | None:
    """Returns the tensors of a folder or hub id under the names that they have there; None if they are stored
    elsewhere, or quantised in a way that is not read here."""
    found = find(path, options)
    with stage(found.path, "weights"):
        source = Checkpoint.find(found.path, options.allow_pickle)
        quantization = getattr(found.config, "quantization_config", None)
        if source is None or not quantization:
            return source
        return _open_quantised(source, quantization, options)


def find_quantised(found: Architecture, options: LoadOptions) -> tuple[Checkpoint, Any] | None:
    """Returns the checkpoint and its config, if it is quantised in a way that we read ourselves."""
    if found.has_own_code or not (options.is_on_cpu or keeps_blocks(options)):
        return None
    config = found.fused_config
    quantization = getattr(found.config, "quantization_config", None)
    if config is None or config.model_type not in FAMILIES or not quantization:
        return None
    with stage(found.path, "weights"):
        try:
            source = found.checkpoint(options.allow_pickle)
        except SafetensorError:
            check_method(quantization)  # Faults of the config are reported first.
            raise
        opened = None if source is None else _open_quantised(source, quantization, options)
    return None if opened is None else (opened, config)


def _open_quantised(source: Checkpoint, quantization: Any, options: LoadOptions) -> Checkpoint | None:
    if options.is_on_cpu:
        return open_quantised(source, quantization, options.compact_weights)
    return open_for_gpu(source, quantization, multiplies_fp8(options.dtype, options.device))


def keeps_blocks(options: LoadOptions) -> bool:
    """Tells whether a GPU multiplies by the quantised weights as they are."""
    return (
        options.compact_weights and options.device_map is None and serves([], options.dtype, options.device)
    )

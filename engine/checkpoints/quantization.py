"""Decides who reads a quantised checkpoint: our readers, transformers, or nobody.

It goes by the ``quantization_config``, before a weight is read.
"""

import logging
from copy import deepcopy
from typing import Any

from transformers.quantizers import AutoHfQuantizer

from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.checkpoints.eight_bit import check_whole_blocks, open_eight_bit
from truedraft.engine.checkpoints.mxfp4 import Mxfp4Checkpoint
from truedraft.engine.checkpoints.packed import open_packed
from truedraft.engine.errors import QuantizationError

logger = logging.getLogger(__name__)

# transformers computes with these methods on a GPU, and dequantises their weights for other devices.
DEQUANTISED = ("fp8", "mxfp8", "mxfp4")
ALTERNATIVES = (
    "use its unquantised checkpoint with quantize, a GGUF file of it, or, of a model of a fused family, a "
    "checkpoint in FP8, or in 4 bits by GPTQ, AWQ or compressed-tensors"
)
# These settings of compressed-tensors change more than the weights.
MORE_THAN_WEIGHTS = {"kv_cache_scheme": "a quantised cache", "transform_config": "transformed inputs"}


def open_quantised(source: Checkpoint, quantization: Any, compact_weights: bool) -> Checkpoint | None:
    """Returns a checkpoint of the weights that the tensors of ``source`` stand for, or None if they are left
    to transformers. ``compact_weights`` is that of ``LoadOptions``."""
    try:
        _refuse_more_than_weights(quantization)
        if quantization.get("quant_method") == "mxfp4":
            return Mxfp4Checkpoint(source)
        return open_packed(source, quantization, compact_weights) or open_eight_bit(
            source, quantization, compact_weights
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise QuantizationError("its quantization_config has another form than any that is known") from error


def open_for_gpu(source: Checkpoint, quantization: Any, has_fp8: bool) -> Checkpoint | None:
    """Returns a checkpoint whose weights stay as they are on a GPU, in blocks or, where the device
    ``has_fp8``, in 8-bit floating point. Returns None where transformers has its own modules for the layout,
    including layouts that our readers refuse."""
    try:
        _refuse_more_than_weights(quantization)
        packed = open_packed(source, quantization, compact=False)
        if packed is not None and not packed.is_in_blocks:
            raise QuantizationError("its weights have 8 bits, or their inputs another order")
        if packed is not None or not has_fp8:
            return packed
        eight_bit = open_eight_bit(source, quantization, compact=False)
        return eight_bit if eight_bit is not None and eight_bit.is_scaled_by_rows else None
    except (AttributeError, KeyError, TypeError, QuantizationError) as error:
        logger.warning("It is left to transformers' layers, which are slower: %s", error)
        return None


def check_method(quantization: Any) -> None:
    """Raises ``QuantizationError`` unless transformers has what it needs to run the method here."""
    try:
        method = str(quantization["quant_method"])
    except (KeyError, TypeError) as error:
        raise QuantizationError("its quantization_config does not say its quant_method") from error
    try:
        quantizer = AutoHfQuantizer.from_config(deepcopy(quantization), pre_quantized=True)
        quantizer.validate_environment(device_map=None)
    except Exception as error:  # Each quantiser fails in its own way; the user needs one line.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise QuantizationError(
            f"it is quantised by {method}, which transformers cannot run here ({reason}); {ALTERNATIVES}"
        ) from error


def dequantise_for_cpu(quantization: dict[str, Any], source: Checkpoint | None) -> None:
    """Tells transformers not to keep the weights for a GPU that is there but was not asked for. Raises
    ``QuantizationError`` for blocks that transformers reads in another way than they were made."""
    if quantization["quant_method"] in DEQUANTISED:
        if source is not None:
            check_whole_blocks(source, quantization.get("weight_block_size"))
        quantization["dequantize"] = True


def _refuse_more_than_weights(quantization: dict[str, Any]) -> None:
    if quantization.get("quant_method") != "compressed-tensors":
        return
    found = [words for key, words in MORE_THAN_WEIGHTS.items() if quantization.get(key)]
    sparsity = (quantization.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        found.append(f"sparse weights ({sparsity})")
    if found:
        raise QuantizationError(
            f"it is quantised by compressed-tensors with {' and '.join(found)}, not supported"
        )

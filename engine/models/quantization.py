"""Who reads a quantised checkpoint on a CPU, by its ``quantization_config``: we, transformers, or nobody.

Everything here is decided before a weight is read.
"""

from copy import deepcopy
from typing import Any

from transformers.quantizers import AutoHfQuantizer

from truedraft.engine.models.eight_bit import check_whole_blocks, open_eight_bit
from truedraft.engine.models.errors import QuantizationError
from truedraft.engine.models.packed import open_packed
from truedraft.engine.models.weights import Checkpoint

# Methods that transformers' own layers compute on GPUs only, but that it dequantises for other devices.
DEQUANTISED = ("fp8", "mxfp8", "mxfp4")
ALTERNATIVES = (
    "use its unquantised checkpoint with quantize, a GGUF file of it, or, of a Llama-shaped model, a "
    "checkpoint in FP8, or in 4 bits by GPTQ, AWQ or compressed-tensors"
)
# Of compressed-tensors: what changes more than the weights, by its words.
MORE_THAN_WEIGHTS = {"kv_cache_scheme": "a quantised cache", "transform_config": "transformed inputs"}


def open_quantised(source: Checkpoint, quantization: Any, narrow: bool) -> Checkpoint | None:
    """``source`` with the weights that its tensors stand for; None if that is left to transformers.
    ``narrow`` as in ``LoadOptions``."""
    try:
        _refuse_more_than_weights(quantization)
        return open_packed(source, quantization) or open_eight_bit(source, quantization, narrow)
    except (AttributeError, KeyError, TypeError) as error:
        raise QuantizationError("its quantization_config has another form than any that is known") from error


def check_method(quantization: Any) -> None:
    """``QuantizationError`` unless transformers has what it needs to run the method on this machine."""
    try:
        method = str(quantization["quant_method"])
    except (KeyError, TypeError) as error:
        raise QuantizationError("its quantization_config does not say its quant_method") from error
    try:
        quantizer = AutoHfQuantizer.from_config(deepcopy(quantization), pre_quantized=True)
        quantizer.validate_environment(device_map=None)
    except Exception as error:  # each quantiser fails in its own way; the user needs one line
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise QuantizationError(
            f"it is quantised by {method}, which transformers cannot run here ({reason}); {ALTERNATIVES}"
        ) from error


def dequantise_for_cpu(quantization: dict[str, Any], source: Checkpoint | None) -> None:
    """Tells transformers not to keep the weights for a GPU that is there, but not asked for.
    ``QuantizationError`` for blocks that it reads otherwise than they were made."""
    if quantization["quant_method"] in DEQUANTISED:
        if source is not None and (block := quantization.get("weight_block_size")):
            check_whole_blocks(source, block)
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

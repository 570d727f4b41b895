"""Compares our layers with transformers': logits of the probe texts, when a model is loaded.

An implementation that does not agree is not used, and the log says so.
"""

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.cuda.expert_tables import grouped
from truedraft.engine.cuda.head_tables import with_grouped_heads
from truedraft.engine.cuda.triton_run import TOLERANCES as CUDA_TOLERANCES
from truedraft.engine.cuda.triton_run import TritonRun, find_kernels
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.families.linear import ModuleLinear
from truedraft.engine.layers.decoder import DecoderWeights
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.options import CACHE_DTYPES
from truedraft.engine.models.probe_texts import packed_logits, probe_texts
from truedraft.engine.native.native_run import NativeKernels
from truedraft.engine.parallel.group import is_agreed

# A logit may deviate by this share of the largest logit. Tiny random models round to 2e-6, 5e-3 and 4e-2 of
# it; a wrong mask or position makes 0.3 and more.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.15, torch.int8: 0.15}
# Where experts score alike, rounding sends a token to others: this share of a text's tokens may deviate. A
# wrong window changes half as many again of the text that is longer than it.
REROUTED = 0.1
# Logits of quantised layers may deviate by this share of their spread, on average over a text's tokens.
# Rounding inputs to 8 bits makes 0.05 of it in a real model, a wrong mask or position 0.5 and more.
QUANTISED_TOLERANCE = 0.25

logger = logging.getLogger(__name__)


@torch.inference_mode()
def first_that_agrees(
    facts: ModelFacts,
    weights: DecoderWeights,
    library: ctypes.CDLL | None,
    expected: Sequence[torch.Tensor],
    cache_dtype: str,
) -> FusedDecoder | None:
    """Returns the fastest model of ``weights`` whose logits of the probe texts are the ``expected`` ones;
    None if no model's are. ``library`` is given where kernels in C made the linear layers."""
    for name, model in _models(facts, weights, library):
        if _agrees(model, expected):
            _choose_cache_dtype(model, expected, cache_dtype)
            return model
        logger.warning("Not using %s: the logits differ from those of transformers' layers", name)
    return None


def _agrees(model: FusedDecoder, expected: Sequence[torch.Tensor]) -> bool:
    agrees = all(map(_comparison(model), packed_logits(model, probe_texts(model.facts)), expected))
    return is_agreed(model.weights.group, agrees, model.device)


def _choose_cache_dtype(model: FusedDecoder, expected: Sequence[torch.Tensor], asked: str) -> None:
    """Lets the model keep keys and values in 16 or 8 bits where the settings ask for it (``asked``), and in
    16 where its weights have no more bits, unless that shows in the logits."""
    own = str(model.dtype).removeprefix("torch.")
    if asked == own or (asked == "auto" and (own != "float32" or not model.has_halves)):
        return
    if own != "float32":
        raise ModelLoadError(f"cache_dtype is {asked}, but the model is computed in {own}: leave it out")
    narrow = "float16" if asked == "auto" else asked
    model.keep_cache_in(CACHE_DTYPES[narrow])
    if _agrees(model, expected):
        return
    words = f"keys or values of this model do not fit into {narrow}: its logits would differ"
    if asked != "auto":
        raise ModelLoadError(f"{words}; set cache_dtype to float32")
    logger.warning("%s; its caches are kept in float32", words)
    model.keep_cache_in(torch.float32)


def _models(
    facts: ModelFacts, weights: DecoderWeights, library: ctypes.CDLL | None
) -> Iterator[tuple[str, FusedDecoder]]:
    if library is not None:
        yield "the native kernels", FusedDecoder(facts, weights, NativeKernels(library))
        return
    cuda = find_kernels(weights.attention, facts.dtype, facts.device, weights.recurrences)
    if cuda is not None and weights.group is not None:
        yield "the CUDA kernels", FusedDecoder(facts, weights, partial(TritonRun, cuda))
    elif cuda is not None:
        given = cuda, facts.dtype, facts.device, CUDA_TOLERANCES[facts.dtype]
        own = with_grouped_heads(grouped(weights, *given), *given)
        yield "the CUDA kernels", FusedDecoder(facts, own, partial(TritonRun, cuda))
    yield "the short forward", FusedDecoder(facts, weights)


@torch.inference_mode()
def with_cuda_kernels(model: FusedDecoder) -> FusedDecoder:
    """Returns the ``model``, whose layers transformers does not have, computed by kernels in Triton if they
    agree with torch's operations; otherwise the model as it is."""
    facts, weights = model.facts, model.weights
    cuda = find_kernels(weights.attention, facts.dtype, facts.device, weights.recurrences)
    if cuda is None:
        return model
    faster = FusedDecoder(facts, weights, partial(TritonRun, cuda))
    if _agrees(faster, list(packed_logits(model, probe_texts(facts)))):
        return faster
    logger.warning("Disabled the CUDA kernels for a head: its logits differ from torch's.")
    return model


def _comparison(model: FusedDecoder) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Returns the function that compares the model's logits."""
    if model.rounds_inputs or any(isinstance(linear, ModuleLinear) for linear in model.weights.linears):
        return roughly_same_logits
    tolerance = max(TOLERANCES[model.arithmetic], TOLERANCES[model.cache_dtype])
    return partial(same_logits, tolerance=tolerance, may_reroute=model.has_experts)


def same_logits(
    ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, *, may_reroute: bool = False
) -> bool:
    """Tells whether logits [tokens, vocab] are equal except for rounding. Rounding ``may_reroute`` some
    tokens to other experts; the logits themselves are float32."""
    scale = theirs.abs().max().clamp(min=1e-6)
    deviations = (ours - theirs).abs().amax(-1)
    if not deviations.isfinite().all():
        return False
    allowed = max(1, int(REROUTED * len(deviations))) if may_reroute else 0
    return int((deviations > tolerance * scale).sum()) <= allowed


def roughly_same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Compares logits where our kernels or another quantiser's layers round inputs to 8 bits: sums in another
    order may be rounded to other numbers, which at times changes a token's logits altogether."""
    deviations = (ours - theirs).square().mean(-1).sqrt() / theirs.std()
    return bool((deviations.clamp(max=1).mean() <= QUANTISED_TOLERANCE).item())

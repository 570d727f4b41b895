"""Tries the ways to compute a decoder by our own layers, the fastest first, until one agrees."""

import ctypes
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.cuda.quantised import find_linears
from truedraft.engine.families.ends import (
    embedding_scale,
    embeddings_of,
    head_sizes,
    last_norm,
    logit_multiplier,
    logit_softcap,
    make_last_norm,
    make_rotary,
    rotary_module,
)
from truedraft.engine.families.gemma4 import has_layer_inputs, layer_inputs
from truedraft.engine.families.layer import decoder_layer
from truedraft.engine.families.linear import join
from truedraft.engine.layers.decoder import DecoderLayer, DecoderWeights
from truedraft.engine.layers.linear import DenseEmbeddings, Linears, TorchLinears
from truedraft.engine.layers.sharding import PendingLinears, Sharding
from truedraft.engine.models.agreement import first_that_agrees
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.hf.decoder_only import DecoderModel
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.models.probe_texts import packed_logits, probe_texts
from truedraft.engine.models.reader import Reader
from truedraft.engine.native.library import load_library
from truedraft.engine.native.linears import NativeLinears
from truedraft.engine.native.native_run import serves
from truedraft.engine.parallel.group import Group

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """Is one way to compute. ``dtype`` is the type of hidden states and caches, ``linears`` makes the linear
    layers. ``library`` has the kernels in C, which then do everything."""

    dtype: torch.dtype
    linears: Linears
    library: ctypes.CDLL | None = None
    bf16_linears: bool = False


def load_fused(
    make_skeleton: Callable[[torch.dtype], Any], checkpoint: Checkpoint, generation: Any, options: LoadOptions
) -> FusedDecoder | None:
    """Loads a decoder of one of ``FAMILIES``. ``make_skeleton`` makes transformers' module of that type
    without weights; ``checkpoint`` has all of its tensors. Returns None if no way gives the logits of
    transformers' layers, or if the model is to be quantised and cannot be."""
    for backend in backends(options, head_sizes(make_skeleton(options.dtype))):
        module = make_skeleton(backend.dtype)
        facts = ModelFacts(
            module.config, generation, count(module), backend.dtype, options.device, backend.bf16_linears
        )
        if options.group is not None:
            _check_shares(make_skeleton(backend.dtype), facts, options.group)
        weights, expected = Reader(module, checkpoint, facts, backend.linears, options.group).read()
        if not all(logits.isfinite().all() for logits in expected):
            return None  # transformers' own module fails with a message about it.
        model = first_that_agrees(facts, weights, backend.library, expected, options.cache_dtype)
        if model is not None and (options.quantize == "none" or model.is_quantised):
            return model
    return None


def _check_shares(module: Any, facts: ModelFacts, group: Group) -> None:
    """Raises ``ModelLoadError`` for a model that cannot be divided among ranks, before weights are read:
    ``module`` has none, and is used up."""
    pending = PendingLinears(TorchLinears())
    sharding, make = Sharding(group, pending), partial(join, linears=pending)
    for layer in module.model.layers:
        for part in layer.modules():  # A description has the values of single numbers.
            single = {
                name: buffer for name, buffer in part.named_buffers(recurse=False) if buffer.numel() == 1
            }
            part._buffers.update({name: torch.ones(buffer.shape) for name, buffer in single.items()})
        sharding.layer(decoder_layer(layer, 0, facts, make))


def fuse_module(decoder: DecoderModel, options: LoadOptions) -> FusedDecoder | None:
    """Takes over the layers of a loaded module; its linear layers, which know best how to use their weights,
    stay as they are. Returns None if the logits differ."""
    facts, module = decoder.facts, decoder.module
    weights, expected = describe_module(module, facts), packed_logits(decoder, probe_texts(facts))
    library = _kernels(facts.dtype, options, {shape.head_size for shape in weights.attention})
    for kernels in (None,) if library is None else (library, None):
        model = first_that_agrees(facts, weights, kernels, expected, options.cache_dtype)
        if model is not None:
            return model
    return None


def describe_module(module: Any, facts: ModelFacts) -> DecoderWeights:
    """Describes a loaded module, with its own weights."""
    make = partial(join, linears=TorchLinears())
    embeddings = embeddings_of(module)[1].weight.detach()
    inputs = None
    if has_layer_inputs(module):
        table = DenseEmbeddings(module.model.embed_tokens_per_layer.weight.detach())
        inputs = layer_inputs(module, table, make, facts.dtype)
    layers: list[DecoderLayer] = []
    for layer in module.model.layers:
        layers.append(decoder_layer(layer, sum(len(each.mixers) for each in layers), facts, make))
    return DecoderWeights(
        DenseEmbeddings(embeddings),
        layers,
        make_last_norm(module.config, last_norm(module)[1]),
        make([module.lm_head], logit_multiplier(module.config)),
        make_rotary(rotary_module(module), module.config, embeddings.to(facts.dtype)),
        embedding_scale(module, facts.dtype),
        logit_softcap(module.config),
        layer_inputs=inputs,
    )


def multiplies_bfloat16(options: LoadOptions) -> bool:
    """Tells whether kernels in C multiply in bfloat16, where the settings ask for it."""
    if options.dtype != torch.bfloat16 or options.device.type != "cpu" or not options.native_kernels:
        return False
    library = load_library()
    return library is not None and bool(library.multiplies_bfloat16())


def backends(options: LoadOptions, sizes: set[int]) -> Iterator[Backend]:
    """Yields the ways that can be tried, the fastest first: torch does not multiply by quantised weights."""
    compact = options.compact_weights
    if multiplies_bfloat16(options):
        library = _kernels(torch.float32, options, sizes)
        if library is not None:
            linears = NativeLinears(library, compact, bf16=True)
            yield Backend(torch.float32, linears, library, bf16_linears=True)
    elif (library := _kernels(options.dtype, options, sizes)) is not None:
        yield Backend(options.dtype, NativeLinears(library, compact), library)
    elif compact and (packed := find_linears(options.dtype, options.device)) is not None:
        yield Backend(options.dtype, packed)
    if options.quantize != "none":
        return
    if options.dtype == torch.bfloat16 and options.device.type == "cpu":
        logger.warning(
            "dtype bfloat16 is left to torch: there are kernels for fused models on a processor with "
            "AVX512-BF16 only. A token's logits may then depend on what is computed with it"
        )
    yield Backend(options.dtype, TorchLinears())


def _kernels(dtype: torch.dtype, options: LoadOptions, sizes: set[int]) -> ctypes.CDLL | None:
    """Returns the kernels in C, if they are available and serve such a model."""
    if not options.native_kernels or not all(serves(dtype, options.device, size) for size in sizes):
        return None
    return load_library()


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

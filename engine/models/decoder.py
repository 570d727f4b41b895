"""Computes decoders of known layers: the same weights and arithmetic as transformers', a tenth of the
framework.

transformers spends about half a millisecond per layer and forward outside the products: module calls,
decorators, six small operations for a norm, three products where one would do. For families whose layer is
known exactly (``families``) the layers are run here: query, key and value as one linear layer, gate and up as
another, residuals added inside them, and in between as few calls as possible (``LayerRun``).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress

import torch

from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.cuda.grouped_experts import GroupedExperts
from truedraft.engine.cuda.quantised import PackedLinear
from truedraft.engine.cuda.scaled import ScaledLinear
from truedraft.engine.layers.adapters import AdaptedLayers, AdaptedTorchRun, TorchAdapters, rows_of
from truedraft.engine.layers.decoder import DecoderLayer, DecoderWeights
from truedraft.engine.layers.mlp import DenseAndExperts, Experts, TouchedExperts
from truedraft.engine.layers.rotary import Rotary
from truedraft.engine.layers.run import LayerRun
from truedraft.engine.layers.torch_run import TorchRun
from truedraft.engine.memory.batch import ForwardBatch
from truedraft.engine.memory.kv_cache import AttentionCache, KVCache
from truedraft.engine.models.base import FastPass, ForwardOutput, Model
from truedraft.engine.native.adapters import NativeAdapters
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.native.linear import WEIGHT_TYPES, NativeLinear
from truedraft.engine.native.native_run import NativeKernels
from truedraft.engine.native.quantised import QuantisedLinear
from truedraft.engine.parallel.group import is_agreed


class FusedDecoder(Model):
    """Computes layers as they are described. ``begin`` starts each forward on a backend: torch's operations,
    kernels in C or in Triton."""

    has_taps = True

    def __init__(
        self,
        facts: ModelFacts,
        weights: DecoderWeights,
        begin: Callable[[ForwardBatch, KVCache, Rotary], LayerRun] = TorchRun,
    ) -> None:
        super().__init__(facts, [mixer.cache for mixer in weights.mixers])
        experts = [each for layer in weights.layers if (each := _experts(layer)) is not None]
        self.has_experts = bool(experts)
        self._counted = TouchedExperts(facts.device) if experts else None
        if self._counted is not None:
            self.touched = self._counted
            weights = replace(weights, layers=[_counting(layer, self._counted) for layer in weights.layers])
        self.weights = weights
        self.rotary = weights.rotary
        self.begin = begin
        self.adapters: AdaptedLayers | None = None
        self.is_native = isinstance(begin, NativeKernels)
        linears = list(weights.linears)
        # Kernels in C round the inputs of quantised layers to 8 bits; on a GPU only layers in FP8 do.
        self.rounds_inputs = any(isinstance(linear, QuantisedLinear | ScaledLinear) for linear in linears)
        self.is_quantised = self.rounds_inputs or any(isinstance(linear, PackedLinear) for linear in linears)
        backend = "C" if self.is_native else "torch" if begin is TorchRun else "Triton"
        self.way = f"fused layers in {backend}"
        # Attention asks a batch for ``short_rows`` instead of gathering the keys of ``groups``.
        self.reads_in_place = backend == "Triton"
        # In each pass the host decides which angles or experts it needs.
        self.runs_lone_experts = not all(isinstance(each, GroupedExperts) for each in experts)
        self.needs_host = self.rotary.needs_host or self.runs_lone_experts

    @property
    def num_layers(self) -> int:
        return len(self.weights.layers)

    @property
    def rounds(self) -> bool:
        """Tells whether more is rounded than in transformers' layers of the same type."""
        return self.is_quantised or self.bf16_linears or self.cache_dtype != self.dtype

    @property
    def has_halves(self) -> bool:
        """Tells whether weights of linear layers have 16 bits or fewer, except for at most a tenth: routers
        of experts have 32."""
        linears = [linear for linear in self.weights.linears if isinstance(linear, NativeLinear)]
        sizes = [linear.in_features * linear.out_features for linear in linears]
        wide = [linear.struct.type == WEIGHT_TYPES[torch.float32] for linear in linears]
        is_all = self.is_native and len(linears) == sum(1 for _ in self.weights.linears)
        is_so = is_all and 10 * sum(compress(sizes, wide)) <= sum(sizes)
        return is_agreed(self.weights.group, is_so, self.device)

    def keep_cache_in(self, dtype: torch.dtype) -> None:
        """Sets the type of keys and values, for caches that are made later."""
        self.caches = [
            replace(cache, dtype=dtype) if isinstance(cache, AttentionCache) else cache
            for cache in self.caches
        ]

    def take_adapters(self) -> AdaptedLayers:
        """Lets passes from now on, and caches made from now on, have adapters; on a CPU."""
        if isinstance(self.begin, NativeKernels):
            self.adapters = NativeAdapters(self.begin.library)
        else:
            assert self.begin is TorchRun
            self.adapters = adapters = TorchAdapters(self.dtype, self.device)
            self.begin = partial(AdaptedTorchRun, adapters)
        return self.adapters

    def compute(self, batch: ForwardBatch, cache: KVCache, taps: Sequence[int] = ()) -> ForwardOutput:
        """Computes packed tokens. Neither this nor the functions below make decisions in Python that depend
        on the values of the batch's tensors, except for a model that ``needs_host``."""
        numbers = [] if self.adapters is None else batch.adapters
        with rows_of(self.adapters, numbers):
            run, hidden, tapped = self._run_layers(batch, cache, taps)
        weights = self.weights
        # Logits of all tokens are in order, except in a captured batch, which has no spans.
        if not batch.spans or len(batch.logits_index) != len(hidden):
            hidden = hidden.index_select(0, batch.logits_index)
            numbers = [numbers[index] for index in batch.logits_index.tolist()] if numbers else []
        with rows_of(self.adapters, numbers):
            logits = run.linear(weights.head, run.norm(weights.norm, hidden))
        if weights.softcap is not None:
            logits = run.cap(logits, weights.softcap)
        if self._counted is not None:
            self._counted.send()
        return ForwardOutput(logits.float(), torch.stack([tapped[tap] for tap in taps], 1) if taps else None)

    def _run_layers(
        self, batch: ForwardBatch, cache: KVCache, taps: Sequence[int]
    ) -> tuple[LayerRun, torch.Tensor, dict[int, torch.Tensor]]:
        """Returns what runs the pass, the last hidden states, and those that are tapped."""
        weights = self.weights
        run = self.begin(batch, cache, self.rotary)
        hidden, joined = weights.embed(batch.token_ids[0], self.dtype), None
        if weights.joint is not None:
            # A pass that only measures costs has none.
            states = torch.zeros_like(hidden) if batch.states is None else batch.states
            hidden, joined = weights.joint(hidden, states, run)
        tapped = {}
        if batch.pictures is not None:
            rows, features = batch.pictures
            hidden[rows] = features[:, 0]
        given = None
        if weights.layer_inputs is not None:
            given = weights.layer_inputs(batch.token_ids[0], hidden, run)
        for index, layer in enumerate(weights.layers):
            of_layer = None if given is None else given[:, index]
            hidden = layer(hidden, run, None if index else joined, of_layer)
            if batch.pictures is not None and index + 1 < features.shape[1]:
                hidden.index_add_(0, rows, features[:, index + 1])
            if index in taps:
                tapped[index] = hidden.clone()  # Layers may add to this tensor in place.
        if len(weights.layers) in taps:
            tapped[len(weights.layers)] = run.norm(weights.norm, hidden)
        return run, hidden, tapped

    def fast_pass(self, cache: KVCache) -> FastPass | None:
        """Returns passes over a few tokens as one call of C; None without the kernels, or without a table of
        angles."""
        if not isinstance(self.begin, NativeKernels) or self.rotary.table is None:
            return None
        if self.weights.group is not None:  # Ranks gather between two layers, which C does not.
            return None
        if not all(isinstance(linear, NativeLinear) for linear in self.weights.linears):
            return None
        rows = self.adapters.rows if isinstance(self.adapters, NativeAdapters) else None
        return NativeDecoder(self.begin, self.weights, cache, rows)


def _experts(layer: DecoderLayer) -> Experts | None:
    mlp = layer.mlp.experts if isinstance(layer.mlp, DenseAndExperts) else layer.mlp
    return mlp if isinstance(mlp, Experts) else None


def _counting(layer: DecoderLayer, touched: TouchedExperts) -> DecoderLayer:
    """Returns the layer; its experts, if it has some, are counted together with those of other layers."""
    match layer.mlp:
        case Experts():
            return replace(layer, mlp=replace(layer.mlp, touched=touched))
        case DenseAndExperts(experts=experts):
            return replace(layer, mlp=replace(layer.mlp, experts=replace(experts, touched=touched)))
    return layer

"""A short way through Llama-shaped decoders: the same weights and arithmetic, a tenth of the framework.

transformers spends about half a millisecond per layer and forward outside the products: module calls,
decorators, six small operations for a norm, three products where one would do. For families whose layer is
known exactly (``FAMILIES``) this module runs the layers itself: query, key and value as one product, gate
and up as another, residuals added inside the products, and between the products as few calls as possible
(``layer_parts``; in C where a compiler is at hand, ``engine.native``). At load both ways are compared on a
short text (``run_lean``); every other model runs as it is.
"""

import ctypes
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.batch import ForwardBatch, Span
from engine.core.block_pool import BlockTable
from engine.kv_cache import KVCache
from engine.models.attention import AttentionContext, PagedAttention
from engine.models.decoder_only import DecoderModel
from engine.models.in_place_attention import InPlaceAttention, find_kernel
from engine.models.layer_parts import AttentionShape, LayerParts, Norm, Rotary, TorchParts
from engine.models.linear import Linear, make_linear
from engine.native.decoder import NativeDecoder
from engine.native.layer_parts import NativeKernels, serves
from engine.native.library import load_library
from engine.native.linear import NativeLinear

# Model types with exactly this layer: rotary halves, RMSNorm before both branches, gated SiLU MLP.
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# More than the native kernels look at together.
PROBE_TOKENS = 48
# Largest deviation of a logit, as a share of the largest logit. Tiny random models round to 2e-6, 5e-3 and
# 4e-2 of it; a wrong mask or position makes 0.3 and more.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.15}

logger = logging.getLogger(__name__)


def is_lean(model: Any) -> bool:
    """Whether ``model`` is of a family that ``LeanDecoder`` computes, whole and on one device."""
    config = model.config
    return (
        type(model).__name__ in FAMILIES
        and type(model).__module__.startswith("transformers.models.")
        and config.hidden_act == "silu"
        and 2 * model.model.rotary_emb.inv_freq.numel() == model.model.layers[0].self_attn.head_dim
        and len({parameter.device for parameter in model.parameters()}) == 1
        and all(type(module) is nn.Linear for module in model.modules() if isinstance(module, nn.Linear))
    )


@torch.inference_mode()
def run_lean(decoder: DecoderModel, native_kernels: bool, narrow: bool = True) -> bool:
    """Let ``decoder`` run through a ``LeanDecoder``, which takes over its weights; ``narrow`` as in
    ``make_linear``. False if the logits of a
    short text then differ from those of the module, which is left without weights in either case."""
    expected = _probe_logits(decoder)
    decoder.short_forward = lean = LeanDecoder(decoder.model, native_kernels, narrow)
    decoder.is_native = isinstance(lean.make_parts, NativeKernels)
    decoder.make_whole_pass = lean.whole_pass
    same = same_logits(_probe_logits(decoder), expected, decoder.dtype)
    if not same:
        way = "The native kernels" if decoder.is_native else "The short forward"
        logger.warning("%s differ from transformers' layers and are not used", way)
    elif not decoder.is_native:
        _read_in_place(decoder, lean, expected)
    return same


def _read_in_place(decoder: DecoderModel, lean: "LeanDecoder", expected: torch.Tensor) -> None:
    """Let ``lean`` attend without gathering keys, where there is a kernel that is right."""
    kernel = find_kernel([layer.attention for layer in lean.layers], decoder.dtype, decoder.device)
    if kernel is None:
        return
    usual = lean.attention, lean.make_parts
    lean.attention = partial(InPlaceAttention, kernel)
    lean.make_parts = partial(TorchParts, attention=lean.attention)
    if not same_logits(_probe_logits(decoder), expected, decoder.dtype):
        logger.warning("The logits of the attention kernel differ and it is not used")
        lean.attention, lean.make_parts = usual


def _probe_logits(decoder: DecoderModel) -> torch.Tensor:
    """Of a short text in a cache of its own, its blocks in no order: a prompt, two tokens of which only the
    last one's are asked for, and three more."""
    length = min(PROBE_TOKENS, decoder.max_position or PROBE_TOKENS)
    decoder.allocate_cache(num_blocks=4, block_size=-(-length // 4))
    table = BlockTable()
    table.block_ids = [2, 0, 3, 1]
    ids = [(7 * i * i + 3 * i + 1) % decoder.vocab_size for i in range(length)]
    spans = (ids[:-5], length - 5), (ids[-5:-3], 1), (ids[-3:], 3)
    logits = [decoder.forward([Span(table, part, num_logits)]) for part, num_logits in spans]
    decoder.cache = decoder.whole_pass = None
    return torch.cat(logits)


def same_logits(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> bool:
    """Equal but for rounding, if both were computed in ``dtype``; the logits themselves are float32."""
    scale = theirs.abs().max().clamp(min=1e-6)
    return bool(((ours - theirs).abs().max() <= TOLERANCES[dtype] * scale).item())


class LeanDecoder:
    """Takes the weights out of a transformers model, layer by layer, so that memory never doubles."""

    def __init__(self, model: Any, native_kernels: bool, narrow: bool) -> None:
        kernels = _kernels(model) if native_kernels else None
        self.make_parts: Callable[[ForwardBatch, KVCache, Rotary], LayerParts] = TorchParts
        # That of TorchParts, in captured passes too.
        self.attention: Callable[[ForwardBatch, KVCache], AttentionContext] = PagedAttention
        if kernels is not None:
            self.make_parts = NativeKernels(kernels)
        self.embeddings = model.model.embed_tokens.weight.detach()
        self.rotary = Rotary(model.model.rotary_emb, model.config, self.embeddings)
        self.layers = []
        for index, layer in enumerate(model.model.layers):
            self.layers.append(_Layer(layer, index, partial(make_linear, library=kernels, narrow=narrow)))
            model.model.layers[index] = nn.Identity()
        self.norm = Norm.of(model.model.norm)
        self.head = make_linear([model.lm_head], kernels, narrow)
        model.model, model.lm_head = nn.Identity(), nn.Identity()

    @property
    def reads_in_place(self) -> bool:
        """Whether attention asks a batch for ``short_rows`` instead of gathering the keys of ``groups``."""
        return self.attention is not PagedAttention

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Logits [len(logits_index), vocab]."""
        parts = self.make_parts(batch, cache, self.rotary)
        hidden = self.hidden(batch.token_ids[0], parts)
        if len(batch.logits_index) != len(hidden):
            hidden = hidden[batch.logits_index]
        return self.logits(hidden, parts)

    def whole_pass(self, cache: KVCache, block_size: int) -> NativeDecoder | None:
        """Passes over a few tokens as one call of C; None without the kernels, or angles in a table."""
        if not isinstance(self.make_parts, NativeKernels) or self.rotary.table is None:
            return None
        assert isinstance(self.head, NativeLinear)
        return NativeDecoder(
            self.make_parts,
            self.layers,
            self.embeddings,
            self.norm,
            self.head,
            self.rotary,
            cache,
            block_size,
        )

    def hidden(self, token_ids: torch.Tensor, parts: LayerParts) -> torch.Tensor:
        """[tokens, hidden size], before the last norm."""
        hidden = F.embedding(token_ids, self.embeddings)
        for layer in self.layers:
            hidden = layer(hidden, parts)
        return hidden

    def logits(self, hidden: torch.Tensor, parts: LayerParts) -> torch.Tensor:
        return self.head(parts.norm(self.norm, hidden))


class _Layer:
    def __init__(self, layer: Any, index: int, make: Callable[[list[nn.Linear]], Linear]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention = _attention_shape(attention, index)
        self.input_norm = Norm.of(layer.input_layernorm)
        self.qkv = make([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = make([attention.o_proj])
        self.mlp_norm = Norm.of(layer.post_attention_layernorm)
        self.gate_up = make([mlp.gate_proj, mlp.up_proj])
        self.down = make([mlp.down_proj])

    def __call__(self, hidden: torch.Tensor, parts: LayerParts) -> torch.Tensor:
        """``hidden`` [tokens, hidden size]."""
        qkv = self.qkv(parts.norm(self.input_norm, hidden))
        hidden = self.output.add_to(hidden, parts.attend(self.attention, qkv))
        gate_up = self.gate_up(parts.norm(self.mlp_norm, hidden))
        return self.down.add_to(hidden, parts.gated_silu(gate_up))


def _kernels(model: Any) -> ctypes.CDLL | None:
    """The native kernels, if they serve this model and can be had."""
    weight = model.model.embed_tokens.weight
    if not serves(weight.dtype, weight.device, model.model.layers[0].self_attn.head_dim):
        return None
    return load_library()


def _attention_shape(attention: Any, index: int) -> AttentionShape:
    size = attention.head_dim
    num_heads, num_kv_heads = attention.q_proj.out_features // size, attention.k_proj.out_features // size
    # Mistral keeps its window in the config, the others with the layer; None sees everything.
    window_home = attention.config if "Mistral" in type(attention).__name__ else attention
    norm = None
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm, attention.k_norm
        weight = torch.cat([query.weight.expand(num_heads, -1), key.weight.expand(num_kv_heads, -1)])
        norm = Norm(weight.detach(), query.variance_epsilon)
    return AttentionShape(
        layer=index,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=size,
        scaling=attention.scaling,
        sliding_window=getattr(window_home, "sliding_window", None),
        norm=norm,
    )

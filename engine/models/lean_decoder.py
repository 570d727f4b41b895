"""A short way through Llama-shaped decoders: the same weights and arithmetic, a tenth of the framework.

transformers spends about half a millisecond per layer and forward outside the products: module calls,
decorators, six small operations for a norm, three products where one would do. For families whose layer is
known exactly (``FAMILIES``) this module runs the layers itself: query, key and value as one product, gate
and up as another, residuals added inside the products, rotary angles looked up once per forward. At load
both ways are compared on a short text (``run_lean``); every other model runs as it is.
"""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.batch import Span
from engine.block_manager import BlockTable
from engine.models.attention import AttentionContext
from engine.models.decoder_only import DecoderModel
from engine.models.packed_linear import make_product

# Model types with exactly this layer: rotary halves, RMSNorm before both branches, gated SiLU MLP.
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Rotary types whose angles are a function of the position alone, so that a table can hold them.
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
MAX_TABLE_POSITIONS = 1 << 15
PROBE_TOKENS = 16

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
def run_lean(decoder: DecoderModel) -> bool:
    """Let ``decoder`` run through a ``LeanDecoder``, which takes over its weights. False if the logits of a
    short text then differ from those of the module, which is left without weights in either case."""
    expected = _probe_logits(decoder)
    decoder.short_forward = LeanDecoder(decoder.model)
    same = same_logits(_probe_logits(decoder), expected)
    if not same:
        logger.warning("The short forward differs from transformers'; the module itself is run")
    return same


def _probe_logits(decoder: DecoderModel) -> torch.Tensor:
    """Of a short text in a cache of its own, in two forwards: a prompt and three tokens after it."""
    decoder.allocate_cache(num_blocks=1, block_size=PROBE_TOKENS)
    table = BlockTable()
    table.block_ids = [0]
    ids = [(7 * i * i + 3 * i + 1) % decoder.vocab_size for i in range(PROBE_TOKENS)]
    parts = (ids[:-3], ids[-3:])
    logits = [decoder.forward([Span(table, part, len(part))]) for part in parts]
    decoder.cache = None
    return torch.cat(logits)


def same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal but for rounding, which is bounded by the precision that both were computed in."""
    tolerance = 1e-3 if theirs.dtype == torch.float32 else 5e-2
    scale = theirs.float().abs().max().clamp(min=1e-6)
    return bool(((ours.float() - theirs.float()).abs().max() <= tolerance * scale).item())


class LeanDecoder:
    """Takes the weights out of a transformers model, layer by layer, so that memory never doubles."""

    def __init__(self, model: Any) -> None:
        self.embeddings = model.model.embed_tokens.weight.detach()
        self.rotary = _Rotary(model.model.rotary_emb, model.config, self.embeddings)
        self.layers = []
        for index, layer in enumerate(model.model.layers):
            self.layers.append(_Layer(layer, index))
            model.model.layers[index] = nn.Identity()
        self.norm = _Norm.of(model.model.norm)
        self.head = make_product([model.lm_head])
        model.model, model.lm_head = nn.Identity(), nn.Identity()

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_index: torch.Tensor,
        context: AttentionContext,
    ) -> torch.Tensor:
        """Logits [len(logits_index), vocab] of packed ``token_ids`` and ``positions`` [1, tokens]."""
        hidden = F.embedding(token_ids[0], self.embeddings)
        cos, sin = self.rotary.angles(positions[0])
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, context)
        if len(logits_index) != len(hidden):
            hidden = hidden[logits_index]
        return self.head(self.norm(hidden))


class _Layer:
    def __init__(self, layer: Any, index: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.scaling: float = attention.scaling
        # Mistral keeps its window in the config, the others with the layer; None sees everything.
        in_config = "Mistral" in type(attention).__name__
        window_home = attention.config if in_config else attention
        self.sliding_window: int | None = getattr(window_home, "sliding_window", None)
        self.head_size: int = attention.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_size
        self.num_kv_heads = attention.k_proj.out_features // self.head_size
        self.input_norm = _Norm.of(layer.input_layernorm)
        self.qkv = make_product([attention.q_proj, attention.k_proj, attention.v_proj])
        self.query_key_norm = self._joint_norm(attention) if hasattr(attention, "q_norm") else None
        self.output = make_product([attention.o_proj])
        self.mlp_norm = _Norm.of(layer.post_attention_layernorm)
        self.mlp_size: int = mlp.gate_proj.out_features
        self.gate_up = make_product([mlp.gate_proj, mlp.up_proj])
        self.down = make_product([mlp.down_proj])

    def _joint_norm(self, attention: Any) -> "_Norm":
        """Per-head norms of queries and keys as one, with a weight for each head."""
        query, key = attention.q_norm, attention.k_norm
        weight = torch.cat(
            [query.weight.expand(self.num_heads, -1), key.weight.expand(self.num_kv_heads, -1)]
        )
        return _Norm(weight.detach(), query.variance_epsilon)

    def __call__(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """``hidden`` [tokens, hidden size]; ``cos`` and ``sin`` [tokens, 1, head size]."""
        tokens = hidden.shape[0]
        qkv = self.qkv(self.input_norm(hidden)).view(tokens, -1, self.head_size)
        query_key, value = qkv.split_with_sizes((self.num_heads + self.num_kv_heads, self.num_kv_heads), 1)
        if self.query_key_norm is not None:
            query_key = self.query_key_norm(query_key)
        query_key = _rotate(query_key, cos, sin)
        query, key = query_key.split_with_sizes((self.num_heads, self.num_kv_heads), 1)
        attended = context.attend(
            self.index, query, key, value, self.scaling, self.sliding_window, None, None
        )
        hidden = self.output.add_to(hidden, attended.reshape(tokens, -1))
        gate, up = self.gate_up(self.mlp_norm(hidden)).split_with_sizes((self.mlp_size, self.mlp_size), 1)
        return self.down.add_to(hidden, F.silu(gate).mul_(up))


class _Norm:
    """RMSNorm over the last dimension, in float32 as transformers computes it."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.size = weight.shape[-1]
        self.weight = weight
        self.eps = eps
        # On a CPU torch's rms_norm is six operations. sum(x^2) + n * eps is a hypotenuse: four, two of them
        # on one number a row.
        self.short = weight.device.type == "cpu" and weight.dtype == torch.float32
        self.scaled_weight = weight * self.size**0.5
        self.leg = torch.tensor((self.size * eps) ** 0.5, dtype=torch.float32, device=weight.device)

    @classmethod
    def of(cls, module: Any) -> "_Norm":
        return cls(module.weight.detach(), module.variance_epsilon)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.short:
            length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.leg)
            return (x / length).mul_(self.scaled_weight)
        if self.weight.dim() == 1:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        return F.rms_norm(x, (self.size,), None, self.eps) * self.weight


class _Rotary:
    """cos and sin of every position, from the model's own rotary module."""

    def __init__(self, module: Any, config: Any, like: torch.Tensor) -> None:
        self.module = module
        self.like = like
        self.table: tuple[torch.Tensor, torch.Tensor] | None = None
        num_positions = int(config.max_position_embeddings)
        if module.rope_type in STATIC_ROTARY and num_positions <= MAX_TABLE_POSITIONS:
            self.table = self._compute(torch.arange(num_positions, device=like.device))

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For ``positions`` [tokens]: cos and signed sin, [tokens, 1, head size]."""
        if self.table is None:
            return self._compute(positions)
        cos, sin = self.table
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _compute(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.module(self.like, positions[None])
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        return cos[0][:, None], signed[0][:, None]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``x`` [tokens, heads, size]: (a, b) to (a cos - b sin, b cos + a sin)."""
    tokens, heads, size = x.shape
    swapped = x.view(tokens, heads, 2, size // 2).flip(2).view(tokens, heads, size)
    return torch.addcmul(x * cos, swapped, sin)

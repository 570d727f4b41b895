"""Hooks attention of encoder-decoder models into transformers' models, as ``attention`` does for decoders.

A decoder's layer attends twice: to the decoder's own past, and to the encoder's states of the prompt. The
keys and values of both are in the same paged cache, the encoder's at each sequence's first slots. T5 adds a
bias that depends on the distance of key and query; it is computed here, because only the batch knows the
positions of the packed tokens.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, EncoderDecoderCache

from truedraft.engine.memory.batch import AttentionGroup, ForwardBatch
from truedraft.engine.memory.kv_cache import NOTHING, AttentionCache, KVCache

ATTENTION_NAME = "truedraft_encoder_decoder"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Says how one layer attends. ``position_bias`` is the bias of a packed row as transformers counts it."""

    module: Any
    scaling: float | None
    position_bias: torch.Tensor | None


class AttentionContext(Protocol):
    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attends with ``query``, ``key`` and ``value`` [heads, tokens, size]; returns [heads, tokens, value
        size]."""
        ...


class EncoderAttention:
    """Attends within one prompt, from every token to every other."""

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        mask = None if call.position_bias is None else call.position_bias[0].to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=call.scaling)


class CrossWriter:
    """Stores the keys and values of each layer's cross-attention; attends to nothing."""

    def __init__(self, slots: torch.Tensor, cache: KVCache) -> None:
        self.slots = slots
        self.cache = cache

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if not call.module.is_causal:
            self.cache.write(call.module.layer_idx, self.slots, key.transpose(0, 1), value.transpose(0, 1))
        return query.new_zeros(*query.shape[:-1], value.shape[-1])


class DecoderAttention:
    """Computes both attentions of the decoder's packed tokens, group by group over the cache."""

    def __init__(self, batch: ForwardBatch, cache: KVCache) -> None:
        self.batch = batch
        self.cache = cache
        self._masks: list[torch.Tensor | None] = []

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        module, query = call.module, query.transpose(0, 1)
        if module.is_causal:
            self.cache.write(module.layer_idx, self.batch.slots, key.transpose(0, 1), value.transpose(0, 1))
            groups = self.batch.groups
            masks = self._own_masks(module, query.dtype)
        else:
            groups = self.batch.cross_groups
            masks = [group.mask(None) for group in groups]
        output = query.new_empty(*query.shape[:2], value.shape[-1])
        for group, mask in zip(groups, masks, strict=True):
            attended = self._attend_group(group, mask, module.layer_idx, query, call.scaling)
            rows = group.query_index
            if rows is not None and group.output_index is not None:
                rows = rows[group.output_index]
            output[slice(None) if rows is None else rows] = attended
        return output.transpose(0, 1)

    def _own_masks(self, module: Any, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """Returns for each group which keys are in the past, and T5's bias, which its first layer shares with
        all others."""
        if getattr(module, "has_relative_attention_bias", False) or not self._masks:
            self._masks = [_own_mask(module, group, dtype) for group in self.batch.groups]
        return self._masks

    def _attend_group(
        self,
        group: AttentionGroup,
        mask: torch.Tensor | None,
        layer: int,
        query: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Returns the outputs [queries, heads, value size] of the group's real queries."""
        assert group.key_slots is not None  # Only a lone sequence of a decoder is attended to in place.
        keys, values = self.cache.gather(layer, group.key_slots)
        if group.query_index is not None:
            query = query[group.query_index]
        heads = query.shape[1]
        attended = F.scaled_dot_product_attention(
            query.view(group.rows, group.queries, heads, -1).transpose(1, 2),
            keys.view(group.rows, group.keys, heads, -1).transpose(1, 2),
            values.view(group.rows, group.keys, heads, -1).transpose(1, 2),
            attn_mask=mask,
            scale=scaling,
        )
        output = attended.transpose(1, 2).reshape(group.rows * group.queries, heads, -1)
        return output if group.output_index is None else output[group.output_index]


def _own_mask(module: Any, group: AttentionGroup, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns the mask or, with a bias, the numbers to add to the scores [rows, heads, queries, keys]."""
    mask = group.mask(None)
    if not getattr(module, "has_relative_attention_bias", False):
        return mask
    keys = torch.arange(group.keys, device=group.query_positions.device)
    buckets = module._relative_position_bucket(
        keys - group.query_positions[:, :, None],
        bidirectional=False,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=module.relative_attention_max_distance,
    )
    bias = module.relative_attention_bias(buckets).permute(0, 3, 1, 2).to(dtype)
    added: torch.Tensor = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    return added


class CrossProbe:
    """Records the shapes of each decoder layer's own and cross-attention; attends to nothing. The cache has
    the type ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.own: dict[int, AttentionCache] = {}
        self.cross: dict[int, AttentionCache] = {}

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        shapes = self.own if call.module.is_causal else self.cross
        shapes[call.module.layer_idx] = AttentionCache(
            key=(key.shape[0], key.shape[2]),
            value=(value.shape[0], value.shape[2]),
            dtype=self.dtype,
            device=key.device,
        )
        return query.new_zeros(*query.shape[:-1], value.shape[-1])


class StoredElsewhere(EncoderDecoderCache):  # type: ignore[misc]
    """Poses as a complete cache to transformers' decoders: they then compute neither the encoder's keys and
    values again nor keep their own. The real ones are in our ``KVCache``."""

    def __init__(self, layers: list[AttentionCache]) -> None:
        self.self_attention_cache = _PassThrough([])
        self.cross_attention_cache = _PassThrough([_NoTokens(layer) for layer in layers])
        self.is_updated = dict.fromkeys(range(len(layers)), True)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _PassThrough:
    def __init__(self, layers: list["_NoTokens"]) -> None:
        self.layers = layers

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value


class _NoTokens:
    """Holds keys and values of no tokens [1, heads, 0, size]."""

    def __init__(self, layer: AttentionCache) -> None:
        self.keys, self.values = (
            torch.empty(1, heads, 0, size, dtype=layer.dtype, device=layer.device)
            for heads, size in (layer.key, layer.value or NOTHING)
        )


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_context: AttentionContext,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Has transformers' signature: [1, heads, tokens, size] comes in, [1, tokens, heads, size] goes out."""
    output = attention_context.attend(
        AttentionCall(module, scaling, position_bias), query[0], key[0], value[0]
    )
    return output.transpose(0, 1)[None], None


AttentionInterface.register(ATTENTION_NAME, attention_forward)

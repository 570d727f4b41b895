"""Attention over the paged cache, hooked into transformers' models through ``AttentionInterface``.

A model built with ``attn_implementation=ATTENTION_NAME`` calls ``attention_forward`` in every layer and
hands it the ``attention_context`` keyword that the forward call was given. The model sees one packed row of
tokens; which of them belong together only the context knows.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from engine.batch import AttentionGroup, ForwardBatch
from engine.kv_cache import KVCache, LayerShape

ATTENTION_NAME = "foretoken"


class AttentionContext(Protocol):
    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """``query`` [tokens, heads, size], ``key`` and ``value`` [tokens, kv heads, size]; like query."""
        ...


class PagedAttention:
    """Stores the new keys and values, then attends group by group over what the cache holds."""

    def __init__(self, batch: ForwardBatch, cache: KVCache) -> None:
        self.batch = batch
        self.cache = cache

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        self.cache.write(layer, self.batch.slots, key, value)
        groups = self.batch.groups
        if len(groups) == 1:
            return self._attend_group(groups[0], layer, query, scaling, sliding_window)
        output = query.new_empty(*query.shape[:2], value.shape[-1])
        for group in groups:
            rows = group.query_index
            assert rows is not None  # only a lone group can be the whole batch
            if group.output_index is not None:
                rows = rows[group.output_index]
            output[rows] = self._attend_group(group, layer, query, scaling, sliding_window)
        return output

    def _attend_group(
        self,
        group: AttentionGroup,
        layer: int,
        query: torch.Tensor,
        scaling: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """The group's real queries' outputs [queries, heads, value size]."""
        keys, values = self.cache.gather(layer, group.key_slots)
        if group.query_index is not None:
            query = query[group.query_index]
        kv_heads = keys.shape[1]
        # Query heads that share a kv head become extra queries of it: [rows, kv heads, shared * queries].
        shared = query.shape[1] // kv_heads
        query = query.view(group.rows, group.queries, kv_heads, shared, -1)
        query = query.permute(0, 2, 3, 1, 4).reshape(group.rows, kv_heads, shared * group.queries, -1)
        mask = group.mask(sliding_window)
        if mask is not None and shared > 1:
            mask = mask.repeat(1, 1, shared, 1)
        attended = F.scaled_dot_product_attention(
            query,
            keys.view(group.rows, group.keys, kv_heads, -1).transpose(1, 2),
            values.view(group.rows, group.keys, kv_heads, -1).transpose(1, 2),
            attn_mask=mask,
            scale=scaling,
        )
        attended = attended.view(group.rows, kv_heads, shared, group.queries, -1).permute(0, 3, 1, 2, 4)
        output = attended.reshape(group.rows * group.queries, kv_heads * shared, -1)
        return output if group.output_index is None else output[group.output_index]


class LayerProbe:
    """Records the shapes of every layer's keys and values; attends to nothing."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        self.layers[layer] = LayerShape(
            key=(key.shape[1], key.shape[2]), value=(value.shape[1], value.shape[2])
        )
        return query.new_zeros(*query.shape[:2], value.shape[-1])


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_context: AttentionContext,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' signature: [1, heads, tokens, size] comes in, [1, tokens, heads, size] goes out."""
    output = attention_context.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
        sliding_window,
    )
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, attention_forward)

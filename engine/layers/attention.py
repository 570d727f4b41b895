"""Computes attention over the paged cache, hooked into transformers' models through ``AttentionInterface``.

A model built with ``attn_implementation=ATTENTION_NAME`` calls ``attention_forward`` in every layer and hands
it the ``attention_context`` keyword that the forward call was given. The model sees one packed row of tokens;
only the context knows which of them belong together.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.memory.batch import AttentionGroup, ForwardBatch
from truedraft.engine.memory.kv_cache import KVCache, widened

ATTENTION_NAME = "truedraft"

# torch's flash kernel is made for these, in 16 bits.
FLASH_CAPABILITY, MAX_FLASH_HEAD_SIZE = (8, 0), 256

# Models also pass these arguments to their attention function, which change nothing here: masks and packing
# are in our context, dropout is for training, and nobody asks for the weights.
WITHOUT_EFFECT = frozenset(
    {
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "dropout",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "position_ids",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Says how one layer attends. ``scaling`` None: by the root of the head size. ``sliding_window`` is the
    number of keys that a query sees, itself included; None: all. ``softcap`` c turns each score s into c
    tanh(s / c). ``sinks`` [heads] are one more score per head that takes its share of the attention and gives
    no value. With ``looks_ahead`` a query sees later keys of its text, too, as many as earlier ones where
    there is a window."""

    layer: int
    scaling: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    looks_ahead: bool = False


class AttentionContext(Protocol):
    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attends with ``query`` [tokens, heads, size], ``key`` and ``value`` [tokens, kv heads, size]; the
        result has the shape of ``query``."""
        ...


class PagedAttention:
    """Stores the new keys and values, then attends group by group over the cache."""

    def __init__(self, batch: ForwardBatch, cache: KVCache) -> None:
        self.batch = batch
        self.cache = cache
        # Each device on which layers run has slots, for layers with and without a window, and groups for each
        # window of these layers.
        self._slots: dict[tuple[torch.device, bool], torch.Tensor] = {}
        self._groups: dict[tuple[torch.device, int | None], list[AttentionGroup]] = {}

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        kind = query.device, call.sliding_window is not None
        if kind not in self._slots:
            own = self.batch.window_slots if call.sliding_window is not None else None
            self._slots[kind] = (self.batch.slots if own is None else own).to(query.device)
        self.cache.write(call.layer, self._slots[kind], key, value)
        return self.attend_to_stored(call, query)

    def attend_to_stored(self, call: AttentionCall, query: torch.Tensor) -> torch.Tensor:
        """Attends when the cache has the keys and values of the new tokens, too."""
        groups = self._groups_for(query.device, call.sliding_window)
        if len(groups) == 1:
            return attend_group(groups[0], self.cache, call, query)
        output = query.new_empty(*query.shape[:2], self.cache.value_size(call.layer))
        for group in groups:
            rows = group.query_index
            assert rows is not None  # Only a lone group can be the whole batch.
            if group.output_index is not None:
                rows = rows[group.output_index]
            output[rows] = attend_group(group, self.cache, call, query)
        return output

    def _groups_for(self, device: torch.device, sliding_window: int | None) -> list[AttentionGroup]:
        key = device, sliding_window
        if key not in self._groups:
            groups = self.batch.groups_of(sliding_window)
            is_here = device == self.batch.slots.device
            self._groups[key] = groups if is_here else [group.to(device) for group in groups]
        return self._groups[key]


def attend_group(
    group: AttentionGroup, cache: KVCache, call: AttentionCall, query: torch.Tensor
) -> torch.Tensor:
    """Returns the outputs [queries, heads, value size] of the group's real queries."""
    if group.key_slots is None:
        keys, values = cache.run(call.layer, group.first_slot, group.keys)
    else:
        gathered = cache.gather(call.layer, group.key_slots)
        keys, values = (x.view(group.rows, -1, *x.shape[1:]).transpose(1, 2) for x in gathered)
    keys, values = widened(keys, query.dtype), widened(values, query.dtype)
    is_plain = call.softcap is None and call.sinks is None
    is_causal = call.sliding_window is None and not call.looks_ahead
    if is_plain and is_causal and group.is_lone and _has_flash(query, values):
        return attend_causally(query, keys, values, call.scaling)
    if group.query_index is not None:
        query = query[group.query_index]
    kv_heads = keys.shape[1]
    # Query heads that share a kv head become extra queries of it: [rows, kv heads, shared * queries].
    shared = query.shape[1] // kv_heads
    query = query.view(group.rows, group.queries, kv_heads, shared, -1)
    query = query.permute(0, 2, 3, 1, 4).reshape(group.rows, kv_heads, shared * group.queries, -1)
    bias = group.bias(call.sliding_window, shared, query.dtype, looks_ahead=call.looks_ahead)
    if is_plain:
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=call.scaling)
    else:
        sinks = call.sinks
        if sinks is not None:
            sinks = sinks.view(1, kv_heads, shared, 1).repeat_interleave(group.queries, dim=2)
        attended = attention_by_definition(query, keys, values, bias, call.scaling, call.softcap, sinks)
    attended = attended.view(group.rows, kv_heads, shared, group.queries, -1).permute(0, 3, 1, 2, 4)
    output = attended.reshape(group.rows * group.queries, kv_heads * shared, -1).contiguous()
    return output if group.output_index is None else output[group.output_index]


def _has_flash(query: torch.Tensor, values: torch.Tensor) -> bool:
    """Tells whether torch's flash kernel is made for these tensors and their device."""
    size = query.shape[-1]
    # AMD's devices are called cuda as well; torch's kernels for them were never tried.
    is_nvidia = query.is_cuda and torch.version.hip is None
    is_fit = is_nvidia and query.dtype.itemsize == 2 and values.shape[-1] == size <= MAX_FLASH_HEAD_SIZE
    return is_fit and torch.cuda.get_device_capability(query.device) >= FLASH_CAPABILITY


def attend_causally(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attends causally without a mask tensor, which the flash kernel does not take. ``query`` [queries,
    heads, size] are the newest tokens of ``keys`` and ``values`` [1, kv heads, keys, size]."""
    causal = causal_lower_right(len(query), keys.shape[2])
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys, values, attn_mask=causal, scale=scaling, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def attention_by_definition(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Computes attention that the fused kernel cannot: softcaps (Gemma 2, arXiv 2408.00118) and sinks
    (gpt-oss).

    ``query`` [rows, heads, queries, size], ``keys`` and ``values`` [rows, heads, keys, size], ``bias`` added
    to the scores, ``sinks`` [1, heads, queries, 1]. Keeps all scores, unlike the fused kernel.
    """
    scores = query @ keys.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1).to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : keys.shape[-2]].to(values.dtype)
    return weights @ values


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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Has transformers' signature: [1, heads, tokens, size] comes in, [1, tokens, heads, size] goes out.

    Raises ``ModelLoadError`` for any other argument that would change the result.
    """
    for name, given in others.items():
        if given is not None and given is not False and name not in WITHOUT_EFFECT:
            raise ModelLoadError(f"its attention uses {name}, which is not supported")
    if is_causal is False:
        raise ModelLoadError("its attention looks at later tokens too (is_causal is false)")
    output = attention_context.attend(
        AttentionCall(int(module.layer_idx), scaling, sliding_window, softcap, s_aux),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
    )
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, attention_forward)

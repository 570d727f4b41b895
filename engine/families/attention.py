"""Makes ``Attention`` of the attention modules of transformers."""

from typing import Any

import numpy as np
import torch

from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.families.family import AttentionSpec, setting
from truedraft.engine.families.latent import make_latent_attention
from truedraft.engine.families.linear import Make, Rows, Source
from truedraft.engine.families.norms import NormKind, make_norm
from truedraft.engine.layers.decoder import Attention
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.rotary import rotary_kinds
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.memory.kv_cache import NOTHING, AttentionCache


def make_attention(
    spec: AttentionSpec,
    norms: NormKind,
    attention: Any,
    index: int,
    facts: ModelFacts,
    make: Make,
    residual: float,
) -> Attention:
    """Describes transformers' ``attention``, the mixer number ``index``. Its output is multiplied by
    ``residual`` before it is added to the hidden states."""
    if spec.has_latents:
        return make_latent_attention(attention, index, facts, make, residual)
    shape = _shape(spec, norms, attention, index)
    heads = NOTHING if shape.source is not None else (shape.num_kv_heads, shape.head_size)
    return Attention(
        shape=shape,
        qkv=make(
            _queries_keys_values(spec, attention, shape), setting(facts.config, spec.input_multiplier, 1.0)
        ),
        output=make(
            [getattr(attention, spec.output)], residual * setting(facts.config, spec.output_multiplier, 1.0)
        ),
        cache=AttentionCache(heads, heads, facts.dtype, facts.device, shape.sliding_window),
    )


def _queries_keys_values(spec: AttentionSpec, attention: Any, shape: AttentionShape) -> list[Source]:
    """Returns the linear layers of a token's queries, keys and values, and that of the gates if there is
    one."""
    names = spec.qkv if shape.source is None else spec.qkv[:1]
    found: list[Source] = [getattr(attention, name) for name in names]
    if None in found:
        found[-1] = found[-2]  # The keys serve as values, too.
    if shape.gated and spec.gate == "queries":
        rows = np.arange(2 * shape.num_heads * shape.head_size).reshape(shape.num_heads, 2, -1)
        queries, gate = (Rows(attention.q_proj, rows[:, part].ravel()) for part in range(2))
        return [queries, *found[1:], gate]
    if shape.gated:
        return [*found, Rows(attention.g_proj, np.repeat(np.arange(shape.num_heads), shape.head_size))]
    return found


def _shape(spec: AttentionSpec, norms: NormKind, attention: Any, index: int) -> AttentionShape:
    config = attention.config
    num_heads = int(config.num_attention_heads)
    num_kv_heads = num_heads // int(attention.num_key_value_groups)
    # A setting may leave norms out; a layer that reads another one's keys has no norm for them.
    names = [name for name in spec.head_norm_names if spec.head_norm and hasattr(attention, name)]
    of_heads = [make_norm(norms, getattr(attention, name)) for name in names]
    is_whole = spec.head_norm == "whole"
    shape = AttentionShape(
        layer=index,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=attention.head_dim,
        scaling=attention.scaling * setting(config, spec.key_multiplier, 1.0),
        sliding_window=spec.window(attention),
        norm=None if is_whole or not of_heads else _joined(of_heads, num_heads, num_kv_heads),
        whole_norms=(of_heads[0], of_heads[1]) if is_whole else None,
        rotary=_rotary(spec, attention),
        norm_after_rotary=spec.norm_after_rotary,
        interleaved=spec.interleaved,
        gated=spec.gate == "queries" or getattr(attention, "g_proj", None) is not None,
        softcap=None if spec.softcap is None else getattr(config, spec.softcap),
        sinks=attention.sinks.detach().float() if spec.has_sinks else None,
    )
    return spec.complete(shape, attention)


def _joined(of_heads: list[Norm], *counts: int) -> Norm:
    """Makes one norm out of those of queries and of keys, head by head."""
    weights = [norm.weight.expand(count, -1) for norm, count in zip(of_heads, counts, strict=False)]
    return Norm(torch.cat(weights), of_heads[0].eps)


def _rotary(spec: AttentionSpec, attention: Any) -> int | None:
    if not spec.rotates(attention):
        return None
    kinds = rotary_kinds(attention.config)
    return 0 if kinds == [None] else kinds.index(attention.config.layer_types[attention.layer_idx])

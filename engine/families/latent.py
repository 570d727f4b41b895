"""Makes attention of transformers' modules of multi-head latent attention (DeepSeek's).

They are recognised by the names of a latent vector (``kv_a``) and of the layer that makes keys and values of
it (``kv_b``). Rows of the weights are ordered so that the rotated numbers of a head come first, and the two
numbers of a pair stand half of these apart.
"""

from typing import Any

import numpy as np

from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.families.linear import HeadRows, Make, Rows
from truedraft.engine.families.norms import make_norm
from truedraft.engine.layers.decoder import Attention
from truedraft.engine.layers.latent import LatentProjection
from truedraft.engine.layers.mlp import HeadLinears
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.memory.kv_cache import AttentionCache


def make_latent_attention(
    attention: Any, index: int, facts: ModelFacts, make: Make, residual: float
) -> Attention:
    """Describes transformers' ``attention``, the mixer number ``index``. Its output is multiplied by
    ``residual`` before it is added to the hidden states."""
    heads, turned, others = attention.num_heads, attention.qk_rope_head_dim, attention.qk_nope_head_dim
    value_size, rank = attention.v_head_dim, attention.kv_lora_rank
    pairs = np.arange(turned)
    if getattr(facts.config, "rope_interleave", True):
        pairs = pairs.reshape(-1, 2).T.ravel()  # Neighbouring numbers are pairs there.
    low = Rows(attention.kv_a_proj_with_mqa, np.concatenate((np.arange(rank), rank + pairs)))
    of_query = np.concatenate((others + pairs, np.arange(others)))
    of_queries = (np.arange(heads)[:, None] * attention.qk_head_dim + of_query).ravel()
    query_norm = query_up = None
    if attention.q_lora_rank is None:
        down = make([Rows(attention.q_proj, of_queries), low], 1.0)
    else:
        down = make([attention.q_a_proj, low], 1.0)
        query_norm = make_norm("plain", attention.q_a_layernorm)
        query_up = make([Rows(attention.q_b_proj, of_queries)], 1.0)
    begins = np.arange(heads) * (others + value_size)
    both = attention.kv_b_proj
    keys = [HeadRows(both, begin + np.arange(others), head, True) for head, begin in enumerate(begins)]
    rows = others + np.arange(value_size)
    values = [HeadRows(both, begin + rows, head, False) for head, begin in enumerate(begins)]
    return Attention(
        shape=AttentionShape(
            layer=index,
            num_heads=heads,
            num_kv_heads=1,
            head_size=turned + rank,
            scaling=attention.scaling,
            sliding_window=None,
            norm=None,
            values_are_keys=True,
            value_start=turned,
        ),
        qkv=LatentProjection(
            down=down,
            norm=make_norm("plain", attention.kv_a_layernorm),
            key_up=HeadLinears(tuple(make([each], 1.0) for each in keys)),
            value_up=HeadLinears(tuple(make([each], 1.0) for each in values)),
            query_size=turned + others,
            num_turned=turned,
            value_size=value_size,
            query_norm=query_norm,
            query_up=query_up,
        ),
        output=make([attention.o_proj], residual),
        cache=AttentionCache((1, turned + rank), None, facts.dtype, facts.device),
    )

"""Converts between two orders of Gated DeltaNet's value heads: grouped by key head, and tiled, as in GGUF
files.

Grouped, the value heads of the first key head come first. Tiled, one value head of each key head comes first,
then another of each. A layer computes in the order of its weights; transformers' modules know the grouped one
only.
"""

from typing import Any

import torch

MODULE = ".linear_attn."


def tiles(key_heads: int, heads: int) -> torch.Tensor:
    """Returns for each tiled head its number in the grouped order."""
    return torch.arange(heads).view(key_heads, -1).T.flatten()


def to_grouped(config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Orders ``tensor``, whose heads are tiled, as transformers' module has its parameter ``name``."""
    if MODULE not in name or name.endswith(".norm.weight"):
        return tensor
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    order = tiles(key_heads, heads).argsort()
    if ".out_proj." in name:
        return _ordered(tensor.T, order).T
    before = (
        2 * key_heads * config.linear_key_head_dim if ".in_proj_qkv." in name or ".conv1d." in name else 0
    )
    return torch.cat([tensor[:before], _ordered(tensor[before:], order)])


def to_tiled(values: torch.Tensor, key_heads: int, heads: int) -> torch.Tensor:
    """Tiles ``values`` [heads * size, ...] whose heads are grouped."""
    return _ordered(values, tiles(key_heads, heads))


def _ordered(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    parts = values.reshape(len(order), -1, *values.shape[1:])
    return parts[order.to(values.device)].reshape(values.shape)

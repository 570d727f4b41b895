"""Orders of Gated DeltaNet's value heads: grouped by their key heads, or tiled, as GGUF files have them.

Grouped, those that share the first key head come first. Tiled, one of each key head comes, then another of
each. A layer computes in the order of its weights; transformers' modules know the grouped one only.
"""

from typing import Any

import torch

MODULE = ".linear_attn."


def tiles(key_heads: int, heads: int) -> torch.Tensor:
    """Returns the numbers that tiled heads have in the grouped order."""
    return torch.arange(heads).view(key_heads, -1).T.flatten()


def to_grouped(config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Orders transformers' ``name`` as its module has it, whose heads are tiled in ``tensor``."""
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
    """Tiles ``values`` [heads * size, ...], which are grouped."""
    return _ordered(values, tiles(key_heads, heads))


def _ordered(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    parts = values.reshape(len(order), -1, *values.shape[1:])
    return parts[order.to(values.device)].reshape(values.shape)

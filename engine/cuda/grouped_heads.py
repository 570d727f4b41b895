"""Linear layers of heads by the kernels of experts: heads are experts that every token has.

Latent attention has two such layers for each head, which would be some hundred products in each layer of the
model.
"""

from dataclasses import dataclass

import torch

from truedraft.engine.cuda.grouped_experts import ExpertKernels, GroupedLinear, TokenGroups
from truedraft.engine.layers.mlp import HeadLinears


@dataclass(frozen=True, slots=True)
class GroupedHeads(HeadLinears):
    """Holds linear layers of heads that the kernels serve, in ``table``."""

    table: GroupedLinear


def every_head(num_tokens: int, num_heads: int, device: torch.device) -> TokenGroups:
    """Returns groups in which every head has all tokens, in their order."""
    numbers = torch.arange(num_tokens * num_heads, dtype=torch.int32, device=device)
    pairs = numbers.view(num_tokens, num_heads).T.contiguous()
    counts = torch.full((num_heads,), num_tokens, dtype=torch.int32, device=device)
    chosen = torch.arange(num_heads, dtype=torch.int32, device=device).expand(num_tokens, -1)
    return TokenGroups(pairs, counts, chosen)


def run_heads(
    kernels: ExpertKernels, linears: GroupedHeads, x: torch.Tensor, groups: TokenGroups
) -> torch.Tensor:
    """Multiplies ``x`` [tokens, heads, size], each head's vectors by the head's own layer."""
    return kernels.multiply_experts(x.flatten(0, 1), linears.table, groups, 1).view(*x.shape[:2], -1)

"""``engine.cuda.expert_kernels`` by torch's operations, on tapes and in place of the kernels. Every token is
multiplied with the whole weights of its experts."""

import torch

from truedraft.engine.cuda.grouped_experts import GroupedLinear, TokenGroups
from truedraft.engine.layers.mlp import Router


def choose_experts(
    router: Router, numbers: torch.Tensor, is_there: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, weights = router.choose_by(numbers.float())
    return (chosen if is_there is None else torch.where(is_there[:, None], chosen, -1)), weights


def group_tokens(chosen: torch.Tensor, num_experts: int, touched: torch.Tensor) -> TokenGroups:
    counts = (chosen.flatten() == torch.arange(num_experts)[:, None]).sum(1)
    number = (counts > 0).sum()
    touched.add_(torch.stack((number, torch.ones_like(number))))
    return TokenGroups(chosen, counts, chosen)


def multiply_experts(
    x: torch.Tensor, linear: GroupedLinear, groups: TokenGroups, pairs_of_row: int
) -> torch.Tensor:
    # A unit of each input gives a layer's weights, whatever they lie in.
    units = torch.eye(linear.parts[0].in_features, dtype=x.dtype)
    weights = torch.stack([each(units) for each in linear.linears])
    chosen = groups.chosen.flatten()
    rows = x.repeat_interleave(pairs_of_row, 0)
    if linear.bias is not None:
        weights -= linear.bias[:, None] * linear.multiplier
    said = torch.einsum("pi,pio->po", rows.float(), weights[chosen.clamp(min=0)].float())
    if linear.bias is not None:
        said += linear.bias[chosen.clamp(min=0)].float() * linear.multiplier
    return torch.where(chosen[:, None] < 0, torch.nan, said).to(x.dtype)


def join_experts(
    said: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    by_token = torch.where(chosen[..., None] < 0, 0.0, said.view(*chosen.shape, -1).float())
    total = (by_token * weights[..., None]).sum(1)
    for other in (shared, residual):
        total = total if other is None else total + other.float()
    return total.to(said.dtype)

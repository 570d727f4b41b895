"""Launches the kernels of ``expert_kernels``. Importing it imports triton."""

import torch
import triton

from truedraft.engine.cuda import expert_kernels
from truedraft.engine.cuda.blocks import COLUMNS, KINDS
from truedraft.engine.cuda.grouped_experts import GroupedLinear, TokenGroups
from truedraft.engine.cuda.quantised_kernels import JOINED, row_tile, stages_of
from truedraft.engine.layers.mlp import Router
from truedraft.engine.layers.quantised_blocks import TYPES

# Tokens with their experts that are looked through at a time; tokens of an expert that a program multiplies,
# of which there are few; and blocks that it multiplies at a time, of dense weights and of others.
LOOKED_AT, MOST_TOKENS = 1024, 64
DENSE_BLOCKS, BLOCKS_AT_A_TIME = 2, 4
DENSE_STAGES = 3
# Codes of 0 bits mark dense weights, so that they differ from all kinds of blocks.
DENSE = (0,) * len(KINDS[TYPES["Q8_0"]].constants)


def choose_experts(
    router: Router, numbers: torch.Tensor, is_there: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes as ``Router.choose_by`` does; padding tokens choose -1."""
    numbers = numbers.contiguous()
    shape, groups = (len(numbers), router.num_chosen), router.groups
    chosen = torch.empty(shape, dtype=torch.int32, device=numbers.device)
    weights = torch.empty(shape, dtype=torch.float32, device=numbers.device)
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(numbers):  # type: ignore[no-untyped-call]
        expert_kernels.choose_for_token[(len(numbers),)](
            chosen,
            weights,
            numbers,
            weights if router.choice_bias is None else router.choice_bias,
            chosen if is_there is None else is_there,
            router.added_to_sum,
            router.multiplier,
            EXPERTS=router.num_experts,
            PADDED_EXPERTS=triton.next_power_of_2(router.num_experts),
            CHOSEN=router.num_chosen,
            IS_SOFTMAX=router.scoring == "softmax",
            RENORMALISES=router.renormalises,
            GROUPS=1 if groups is None else groups.number,
            CHOSEN_GROUPS=1 if groups is None else groups.num_chosen,
            SUMMED=1 if groups is None else groups.num_summed,
            HAS_BIAS=router.choice_bias is not None,
            HAS_PADDING=is_there is not None,
            num_warps=1,
        )
    return chosen, weights


def group_tokens(chosen: torch.Tensor, num_experts: int, touched: torch.Tensor) -> TokenGroups:
    """Finds the tokens of each expert, and adds the number of experts that have some to ``touched``."""
    num_tokens = len(chosen)
    pairs = torch.empty(num_experts, num_tokens, dtype=torch.int32, device=chosen.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    with torch.cuda.device_of(chosen):  # type: ignore[no-untyped-call]
        expert_kernels.find_tokens_of_expert[(num_experts,)](
            pairs, counts, touched, chosen, num_tokens, chosen.numel(), TILE=LOOKED_AT, num_warps=4
        )
    return TokenGroups(pairs, counts, chosen)


def multiply_experts(
    x: torch.Tensor, linear: GroupedLinear, groups: TokenGroups, pairs_of_row: int
) -> torch.Tensor:
    """Returns products [tokens * chosen, out features] of the rows of ``x``, each of which serves
    ``pairs_of_row`` experts of a token. Where no expert was chosen, outputs are undefined."""
    x = x.contiguous()
    num_experts, num_tokens = groups.pairs.shape
    output = torch.empty(groups.chosen.numel(), linear.out_features, dtype=x.dtype, device=x.device)
    rows = min(MOST_TOKENS, row_tile(num_tokens, x.dtype))
    num_tiles, first_output = triton.cdiv(num_tokens, rows), 0
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        for part in linear.parts:
            num_parts, num_tensors, _ = part.addresses.shape
            grid = num_experts * num_tiles, triton.cdiv(part.rows, COLUMNS), num_parts
            expert_kernels.multiply_tile[grid](
                output,
                x,
                part.addresses,
                output if linear.bias is None else linear.bias,
                groups.pairs,
                groups.counts,
                linear.multiplier,
                num_tokens,
                num_tiles,
                first_output,
                part.rows,
                linear.out_features,
                NUM_INPUTS=part.in_features,
                EXPERTS=num_experts,
                TENSORS=num_tensors,
                PAIRS_OF_ROW=pairs_of_row,
                KIND=DENSE if part.type is None else KINDS[part.type].constants,
                ROWS=rows,
                BLOCKS_AT_A_TIME=DENSE_BLOCKS if part.type is None else BLOCKS_AT_A_TIME,
                HAS_BIAS=linear.bias is not None,
                num_warps=4,
                num_stages=DENSE_STAGES if part.type is None else stages_of(rows),
            )
            first_output += num_parts * part.rows
    return output


def join_experts(
    said: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the sum [tokens, size] of the experts' outputs by their weights, and of the shared experts' and
    the residual if there are some, rounded once."""
    tokens, num_chosen = chosen.shape
    size = said.shape[1]
    output = torch.empty(tokens, size, dtype=said.dtype, device=said.device)
    with torch.cuda.device_of(said):  # type: ignore[no-untyped-call]
        expert_kernels.join_experts_of_token[tokens, triton.cdiv(size, JOINED)](
            output,
            said,
            chosen,
            weights,
            output if shared is None else shared.contiguous(),
            output if residual is None else residual.contiguous(),
            CHOSEN=num_chosen,
            SIZE=size,
            TILE=JOINED,
            HAS_SHARED=shared is not None,
            HAS_RESIDUAL=residual is not None,
            num_warps=4,
        )
    return output

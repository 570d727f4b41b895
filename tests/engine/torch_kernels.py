"""``engine.cuda.kernels`` by torch's operations: what they must compute, and, on a CPU, in their
place. A tape holds them, as no shape depends on a number."""

import torch
import torch.nn.functional as F

from tests.engine.torch_expert_kernels import choose_experts as choose_experts
from tests.engine.torch_expert_kernels import group_tokens as group_tokens
from tests.engine.torch_expert_kernels import join_experts as join_experts
from tests.engine.torch_expert_kernels import multiply_experts as multiply_experts
from tests.engine.torch_recurrent_kernels import recur as recur
from truedraft.engine.memory.batch import PagedRows


def attend_rows(
    output: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: PagedRows,
    positions: torch.Tensor,
    block_size: int,
    scaling: float,
    sliding_window: int | None,
    num_splits: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    num_tokens, heads, size = query.shape
    shared = heads // keys.shape[1]
    place = torch.arange(rows.queries)
    is_query = place < rows.counts[:, None]
    tokens = torch.where(is_query, rows.first_tokens[:, None] + place, num_tokens)  # the last: none
    padded = F.pad(query, (0, 0, 0, 0, 0, 1))[tokens.view(-1)].view(*tokens.shape, heads, size)
    position = torch.where(is_query, F.pad(positions, (0, 1))[tokens.view(-1)].view(tokens.shape), -1)
    slots = (rows.tables[..., None] * block_size + torch.arange(block_size)).flatten(1)
    number = torch.arange(slots.shape[1])
    sees = number <= position[..., None]  # [rows, queries, keys]
    if sliding_window is not None:
        sees = sees & (number > position[..., None] - sliding_window)
    is_seen = sees.any(1)[..., None, None]
    # What no query of a row sees may be anything.
    k, v = (
        torch.where(is_seen, x[slots.view(-1)].view(*slots.shape, *x.shape[1:]), 0) for x in (keys, values)
    )
    k, v = (x.repeat_interleave(shared, dim=2) for x in (k, v))
    scores = torch.einsum("rqhd,rkhd->rhqk", padded.float(), k.float()) * scaling
    scores = torch.where(sees[:, None], scores, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : len(number)]
    weights = torch.where(sees.any(2)[:, None, :, None], weights, 0.0)
    attended = torch.einsum("rhqk,rkhd->rqhd", weights, v.float()).to(output.dtype)
    result = F.pad(output, (0, 0, 0, 0, 0, 1))  # others stay as they are
    result.index_copy_(0, tokens.view(-1), attended.flatten(0, 1))
    output.copy_(result[:-1])


def attend_latents(
    output: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    rows: PagedRows,
    positions: torch.Tensor,
    block_size: int,
    scaling: float,
    num_splits: int | None = None,
) -> None:
    start = query.shape[-1] - output.shape[-1]
    whole = F.pad(output, (start, 0))
    attend_rows(whole, query, keys, keys, rows, positions, block_size, scaling, None)
    output.copy_(whole[..., start:])


def rotate_and_store(
    query_key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    heads = query_key.shape[1] - keys.shape[1]
    turned = query_key[..., : cos.shape[1]].float()
    swapped = turned.unflatten(2, (2, cos.shape[1] // 2)).flip(2).flatten(2)
    query_key[..., : cos.shape[1]].copy_(turned * cos[:, None] + swapped * sin[:, None])
    keys.index_copy_(0, slots, query_key[:, heads:])
    if value.shape[1]:
        values.index_copy_(0, slots, value)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    normed = F.rms_norm(x.float(), x.shape[-1:], None, eps) * weight.float()
    return (normed if residual is None else normed + residual.float()).to(x.dtype)


def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=1)
    return (F.silu(gate) * up).to(gate_up.dtype)

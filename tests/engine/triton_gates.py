"""What must hold of the attention kernel, as functions that raise ``AssertionError``: in Triton's interpreter
and on a GPU."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from tests.engine import torch_kernels
from truedraft.engine.cuda.triton_run import AttendLatents, AttendRows, attended_by
from truedraft.engine.layers.attention import PagedAttention
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.memory.batch import MAX_GROUPED_QUERIES, ForwardBatch, Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import AttentionCache, KVCache

# These are shares of the largest number: rounded weights and results. A GPU's exponentials have 22 good bits.
TOLERANCES = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def same_as_gathered(
    kernel: AttendRows | AttendLatents,
    seed: int,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    size: int = 16,
    window: int | None = None,
    longest: int = 60,
    device: str = "cpu",
    num_splits: int | None = None,
    block_size: int = 4,
    value_start: int = 0,
    has_sinks: bool = False,
) -> None:
    """A random ragged batch over scattered blocks; NaN lies wherever nothing of the rows does. The reference
    gathers, in float64. Keys are values from ``value_start`` on, if it is given."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    spans, num_blocks = random_spans(choose, longest, block_size)
    batch = ForwardBatch.build(spans, block_size, torch.device(device))
    stored = [
        span.table.block_ids[i // block_size] * block_size + i % block_size
        for span in spans
        for i in range(span.table.num_computed_tokens)
    ]
    slots = torch.tensor(stored, dtype=torch.int64, device=device)
    old_key, old_value, new_key, new_value = (
        torch.randn(tokens, heads[1], size).to(device, dtype)
        for tokens in (len(stored), len(stored), len(batch.slots), len(batch.slots))
    )
    # A view, as the layers make it; some keys matter much more than others.
    query = (4 * torch.randn(len(batch.slots), heads[0] + 3, size)).to(device, dtype)[:, : heads[0]]
    are_values = value_start > 0
    layer = (heads[1], size), None if are_values else (heads[1], size)
    shape = AttentionShape(0, *heads, size, size**-0.5, window, None)
    shape = replace(shape, values_are_keys=are_values, value_start=value_start)
    if has_sinks:
        shape = replace(shape, sinks=(2 + torch.randn(heads[0])).to(device))

    def attend(used: torch.dtype) -> torch.Tensor:
        cache = KVCache([AttentionCache(*layer, used, torch.device(device))], num_blocks, block_size)
        cache.keys[0].fill_(torch.nan)
        cache.values[0].fill_(torch.nan)
        cache.write(0, slots, old_key.to(used), old_value.to(used))
        key, value = new_key.to(used), new_value.to(used)
        if used != dtype:
            whole = PagedAttention(batch, cache).attend(shape.call, query.to(used), key, value)
            return whole[..., value_start:]
        cache.write(0, batch.slots, key, value)
        return attended_by(kernel, shape, batch, cache, query)

    if num_splits is not None:
        kernel = partial(kernel, num_splits=num_splits)
    ours = attend(dtype)
    theirs = attend(torch.float64)
    assert ours.dtype == dtype
    assert bool(theirs.isfinite().all())
    assert float((ours - theirs).abs().max()) <= TOLERANCES[dtype] * float(theirs.abs().max())


def same_rotation_and_cache(
    rotate_and_store: Callable[..., None],
    dtype: torch.dtype,
    size: int,
    heads: tuple[int, int] = (6, 2),
    tokens: int = 5,
    device: str = "cpu",
    turned: int | None = None,
    has_values: bool = True,
) -> None:
    """Queries and keys turned as torch turns them in float32, all their numbers or the first ones, keys and
    values where they belong: what lies elsewhere in the cache keeps every bit."""
    torch.manual_seed(size)
    num_heads, kv_heads = heads
    num_values, turned = kv_heads if has_values else 0, turned or size
    qkv = torch.randn(tokens, num_heads + kv_heads + num_values, size).to(device, dtype)
    query_key, value = qkv.split_with_sizes((num_heads + kv_heads, num_values), 1)
    angles = torch.randn(tokens, turned // 2, device=device).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    sin[:, : turned // 2] *= -1
    slots = torch.randperm(3 * tokens)[:tokens].to(device)
    keys, values = (
        torch.full((3 * tokens, kv_heads, size), 7.0, dtype=dtype, device=device) for _ in range(2)
    )
    expected = query_key.clone(), keys.clone(), values.clone()
    torch_kernels.rotate_and_store(expected[0], value.clone(), cos, sin, slots, *expected[1:])
    before = qkv.clone()
    rotate_and_store(query_key, value, cos, sin, slots, keys, values)
    close(query_key[:, :num_heads], expected[0][:, :num_heads], dtype)
    close(keys, expected[1], dtype)
    assert torch.equal(values, expected[2])
    assert torch.equal(value, before[:, num_heads + kv_heads :])
    elsewhere = torch.ones(3 * tokens, dtype=torch.bool)
    elsewhere[slots.cpu()] = False
    assert bool((keys[elsewhere.to(device)] == 7).all())


def same_gate(
    gated_silu: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    size: int,
    tokens: int = 3,
    device: str = "cpu",
) -> None:
    torch.manual_seed(size)
    gate_up = (4 * torch.randn(tokens, 2 * size)).to(device, dtype)
    before = gate_up.clone()
    gated = gated_silu(gate_up)
    assert (gated.shape, gated.dtype) == ((tokens, size), dtype)
    close(gated, torch_kernels.gated_silu(before), dtype)


def same_norm(
    rms_norm: Callable[..., torch.Tensor], dtype: torch.dtype, size: int, tokens: int = 3, device: str = "cpu"
) -> None:
    """Norms are of whole tokens, with a residual as well, and of heads that lie in something wider."""
    torch.manual_seed(size)
    x, residual = (torch.randn(tokens, size).to(device, dtype) for _ in range(2))
    heads = torch.randn(tokens, 5, size).to(device, dtype)[:, :3]
    one, many = (1 + torch.randn(size, device=device)).to(dtype), torch.randn(3, size, device=device)
    for of in ((x, one, 1e-5), (x, one.float(), 0.5, residual), (heads, many.to(dtype), 1e-6)):
        before = [part.clone() if isinstance(part, torch.Tensor) else part for part in of]
        normed = rms_norm(*of)
        assert (normed.shape, normed.dtype) == (of[0].shape, dtype)
        close(normed, torch_kernels.rms_norm(*before), dtype)
        assert torch.equal(of[0], before[0])


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    """Values agree but for one rounding."""
    assert float((ours.float() - theirs.float()).abs().max()) <= TOLERANCES[dtype] * float(theirs.abs().max())


def random_spans(choose: random.Random, longest: int, block_size: int) -> tuple[list[Span], int]:
    """Rows of few new tokens, now and then a long chunk, after up to ``longest`` others; and how many blocks
    there are."""
    lengths = [
        choose.choice([1, 1, 2, 3, 5, 9, MAX_GROUPED_QUERIES, 40]) for _ in range(choose.randint(1, 4))
    ]
    contexts = [choose.choice([0, choose.randint(1, 9), longest]) for _ in lengths]
    needed = [-(-(a + b) // block_size) for a, b in zip(contexts, lengths, strict=True)]
    num_blocks = sum(needed) + 3
    blocks = list(range(num_blocks))
    choose.shuffle(blocks)
    spans = []
    for context, length, number in zip(contexts, lengths, needed, strict=True):
        table = BlockTable()
        table.num_computed_tokens = context
        table.block_ids, blocks = blocks[:number], blocks[number:]
        spans.append(Span(table, [0] * length, length))
    return spans, num_blocks

"""What must hold of the attention kernel, as functions that raise ``AssertionError``: in Triton's interpreter
and on a GPU."""

import random
from functools import partial

import torch

from engine.batch import MAX_GROUPED_QUERIES, ForwardBatch, Span
from engine.core.block_pool import BlockTable
from engine.kv_cache import KVCache, LayerShape
from engine.models.attention import AttentionCall, AttentionContext, PagedAttention
from engine.models.in_place_attention import InPlaceAttention, RowsKernel

# Of the largest number: rounded weights and results. A GPU's exponentials are good to 22 bits.
TOLERANCES = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def same_as_gathered(
    kernel: RowsKernel,
    seed: int,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    size: int = 16,
    window: int | None = None,
    longest: int = 60,
    device: str = "cpu",
    num_splits: int | None = None,
    block_size: int = 4,
) -> None:
    """A random ragged batch over scattered blocks; NaN lies wherever nothing of the rows does. The reference
    gathers, in float64."""
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
    layer = LayerShape((heads[1], size), (heads[1], size), torch.device(device))

    def attend(used: torch.dtype, make_context: object) -> torch.Tensor:
        cache = KVCache([layer], num_blocks, block_size, used)
        cache.keys[0].fill_(torch.nan)
        cache.values[0].fill_(torch.nan)
        cache.write(0, slots, old_key.to(used), old_value.to(used))
        context: AttentionContext = make_context(batch, cache)  # type: ignore[operator]
        new = query.to(used) if used != dtype else query, new_key.to(used), new_value.to(used)
        return context.attend(AttentionCall(0, size**-0.5, window), *new)

    if num_splits is not None:
        kernel = partial(kernel, num_splits=num_splits)
    ours = attend(dtype, partial(InPlaceAttention, kernel))
    theirs = attend(torch.float64, PagedAttention)
    assert ours.dtype == dtype
    assert bool(theirs.isfinite().all())
    assert float((ours - theirs).abs().max()) <= TOLERANCES[dtype] * float(theirs.abs().max())


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

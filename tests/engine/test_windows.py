"""Prompts under a sliding window read the keys that they see, and no others."""

import pytest
import torch

from truedraft.engine.layers.attention import AttentionCall, PagedAttention, attend_group
from truedraft.engine.memory.batch import ForwardBatch, Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import AttentionCache, KVCache

CPU = torch.device("cpu")
BLOCK_SIZE = 16


def batch_of(num_stored: int, num_new: int, is_run: bool) -> tuple[ForwardBatch, int]:
    """Returns the batch, and how many blocks there are."""
    num_blocks = -(-(num_stored + num_new) // BLOCK_SIZE) + 3
    table = BlockTable()
    table.block_ids = list(range(2, num_blocks - 1)) if is_run else list(range(num_blocks - 2, 1, -1))
    table.num_computed_tokens = num_stored
    return ForwardBatch.build([Span(table, [0] * num_new, 1)], BLOCK_SIZE, CPU), num_blocks


def test_a_chunk_brings_the_keys_of_its_window() -> None:
    batch, _ = batch_of(7168, 512, is_run=True)
    (whole,), (windowed,) = batch.groups_of(None), batch.groups_of(256)
    assert (whole.keys, windowed.keys) == (7680, 768)
    mask = windowed.mask(256)
    assert mask is not None
    assert mask.shape == (1, 1, 512, 768)
    assert bool((mask.sum(-1) == 256).all())


@pytest.mark.parametrize("is_run", [True, False])
@pytest.mark.parametrize("window", [1, 6, 16, 17, 33, 500])
@pytest.mark.parametrize(("num_stored", "num_new"), [(0, 40), (3, 1), (15, 2), (16, 40), (95, 1), (130, 50)])
def test_same_as_with_all_keys(num_stored: int, num_new: int, window: int, is_run: bool) -> None:
    """NaN lies before the window's first block: what no query sees is not read."""
    torch.manual_seed(num_stored)
    batch, num_blocks = batch_of(num_stored, num_new, is_run)
    cache = KVCache([AttentionCache((2, 8), (2, 8), torch.float64, CPU)], num_blocks, BLOCK_SIZE)
    query = torch.randn(num_new, 4, 8, dtype=torch.float64)
    for part in (cache.keys[0], cache.values[0]):
        part.normal_()
    call = AttentionCall(0, 0.4, window)
    expected = attend_group(batch.lone_group(0), cache, call, query)
    first = max(0, num_stored + 1 - window) // BLOCK_SIZE
    for block in batch.spans[0].table.block_ids[:first]:
        for part in (cache.keys[0], cache.values[0]):
            part[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = torch.nan
    found = PagedAttention(batch, cache).attend_to_stored(call, query)
    assert float((found - expected).abs().max()) < 1e-12

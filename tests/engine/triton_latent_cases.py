"""Attention to latent vectors, and the layers of its heads, in Triton's interpreter, as ``triton_cases``."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import torch_block_kernels
from tests.engine.triton_bugs import planted_in
from tests.engine.triton_cases import on_the_cpu as on_the_cpu
from tests.engine.triton_cases import products_of_bfloat16 as products_of_bfloat16
from tests.engine.triton_gates import same_as_gathered
from tests.gguf_blocks import random_blocks
from truedraft.engine.cuda import head_tables, kernels, latent_kernels, triton_run
from truedraft.engine.cuda.blocks import pack
from truedraft.engine.cuda.grouped_heads import GroupedHeads, every_head, run_heads
from truedraft.engine.cuda.head_tables import _is_right, _with_table
from truedraft.engine.cuda.quantised import PackedLinear
from truedraft.engine.cuda.triton_run import attend_latents_in_place, find_kernels
from truedraft.engine.layers.linear import Linear, TorchLinear
from truedraft.engine.layers.mlp import HeadLinears
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.memory.batch import ForwardBatch, Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import AttentionCache, KVCache

assert os.environ["TRITON_INTERPRET"] == "1"

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"heads": (3, 1), "size": 16, "value_start": 4}
SHAPE = AttentionShape(0, 3, 1, 16, 0.25, None, None, values_are_keys=True, value_start=4)
CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "a prompt": {"longest": 200},
    "sizes that are no powers of two": {"size": 36, "value_start": 12, "heads": (20, 1)},
    "sizes that serve": {"size": 576, "value_start": 64, "heads": (20, 1), "dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16, "heads": (16, 1)},
    "bfloat16": {"dtype": torch.bfloat16, "heads": (40, 1)},
    "two splits": {"num_splits": 2, "longest": 200},
    "splits in 16 bits": {"num_splits": 3, "longest": 200, "dtype": torch.bfloat16},
    "more splits than keys": {"num_splits": 5, "longest": 3},
    "blocks of 16": {"block_size": 16, "longest": 300},
    "blocks of 5": {"block_size": 5},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_same_as_gathered(case: dict[str, Any]) -> None:
    same_as_gathered(kernels.attend_latents, 1, **(SMALL | case))


def attended(lengths: list[int], block_size: int = 4) -> list[torch.Tensor]:
    """Returns what rows of so many tokens attend to, after 30 others each, if keys are split in three."""
    generator = torch.Generator().manual_seed(1)
    cache = KVCache([AttentionCache((1, 16), None, torch.float32, CPU)], 100, block_size)
    cache.keys[0].copy_(torch.randn(cache.keys[0].shape, generator=generator))
    query = torch.randn(len(lengths), 40, 4, 16, generator=generator)
    spans, queries = [], []
    for number, length in enumerate(lengths):
        if length:
            table = BlockTable()
            table.block_ids, table.num_computed_tokens = [*range(25 * number, 25 * number + 18)], 30
            spans.append(Span(table, [0] * length, length))
            queries.append(query[number, :length])
    batch, packed = ForwardBatch.build(spans, block_size, CPU), torch.cat(queries)[:, :3]

    def kernel(*given: Any) -> None:
        kernels.attend_latents(*given, num_splits=3)

    found = attend_latents_in_place(kernel, SHAPE, batch, cache, packed)
    return list(found.split([length for length in lengths if length]))


def test_a_row_has_its_bits_whatever_is_computed_with_it() -> None:
    rows = attended([1, 5, 40, 2])
    for number in range(4):
        lengths = [0, 0, 0, 0]
        lengths[number] = (1, 5, 40, 2)[number]
        (alone,) = attended(lengths)
        assert torch.equal(alone, rows[number])


BUGS = {
    "a query does not see itself": ("key[None, :] <= position[:, None]", "key[None, :] < position[:, None]"),
    "what lies behind the keys is loaded": ("is_key = key < end", "is_key = key < end + 1"),
    "all rows read the first one's blocks": ("tables + row * max_blocks", "tables"),
    "shares overlap": ("begin = split * share", "begin = tl.maximum(split * share - 1, 0)"),
    "values begin where keys do": (
        "keys + stored[:, None] + TURNED + number",
        "keys + stored[:, None] + number",
    ),
    "what is turned is not looked at": (
        "scores = tl.dot(q_turned, k_turned",
        "scores = 0 * tl.dot(q_turned, k_turned",
    ),
    "the sum does not shrink": ("total = total * shrink", "total = total"),
    "heads of two tokens are mixed up": ("index = place // HEADS", "index = place // (HEADS + 1)"),
    "rows begin where the batch begins": (
        "token = tl.load(first_tokens + row) + index",
        "token = tl.load(first_tokens) + index",
    ),
}


def plant(bug: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = planted_in(latent_kernels, *BUGS[bug], folder)
    monkeypatch.setattr(kernels, "attend_share_of_latents", wrong.attend_share_of_latents)


def all_gates() -> None:
    for seed in range(4):
        same_as_gathered(kernels.attend_latents, seed, **SMALL, longest=20)
        same_as_gathered(kernels.attend_latents, seed, **SMALL, longest=90, num_splits=2)


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_gates_catch(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(bug, tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        all_gates()


@pytest.mark.parametrize("bug", list(BUGS)[1::3])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_the_check_at_load_catches(
    bug: str,
    tmp_path: Path,
    on_the_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plant(bug, tmp_path, monkeypatch)
    monkeypatch.setattr(triton_run, "MAX_GROUPED_QUERIES", 9)
    with caplog.at_level(logging.WARNING):
        assert find_kernels([SHAPE], torch.float32, CPU) is None
    assert "The attention kernel differs" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_check_at_load_finds_it_right(
    dtype: torch.dtype, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_run, "MAX_GROUPED_QUERIES", 9)  # two sizes of program
    assert find_kernels([SHAPE], dtype, CPU) is kernels


def heads(kinds: list[str | None]) -> HeadLinears:
    """Makes one layer of 64 by 96 numbers for each head, of these blocks, or dense."""

    def linear(number: int, kind: str | None) -> Linear:
        if kind is None:
            return TorchLinear(torch.randn(96, 64, generator=torch.Generator().manual_seed(number)), None)
        return PackedLinear(torch_block_kernels, [pack(random_blocks(kind, 96, 64, number), CPU)], None)

    return HeadLinears(tuple(linear(number, kind) for number, kind in enumerate(kinds)))


@pytest.mark.parametrize("kind", [None, "Q8_0"])
def test_heads_are_what_they_are_by_definition(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_tables, "CHECKED_TOKENS", (1, 20))
    found = _with_table(heads([kind] * 5), torch.float32)
    assert isinstance(found, GroupedHeads)
    assert _is_right(kernels, found, torch.float32, CPU, 1e-4)
    x = torch.randn(20, 5, 64)
    few = run_heads(kernels, found, x[7:9], every_head(2, 5, CPU))
    assert torch.equal(run_heads(kernels, found, x, every_head(20, 5, CPU))[7:9], few)


def test_heads_that_are_not_alike_have_no_table() -> None:
    assert not isinstance(_with_table(heads([None, "Q8_0"]), torch.float32), GroupedHeads)

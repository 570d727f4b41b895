"""Recurrences in Triton's interpreter, as ``triton_cases``: they are made for chunks of few heads, which take
it long."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.recurrences import CPU, delta_rule, mamba2, short_conv, state_cache, table_in
from tests.engine.triton_bugs import planted_in
from truedraft.engine.cuda import launch_recurrent, recurrent_check, recurrent_kernels
from truedraft.engine.cuda.recurrent_check import is_right
from truedraft.engine.layers.recurrent import Recurrence
from truedraft.engine.memory.batch import Span, state_rows
from truedraft.engine.memory.kv_cache import KVCache

assert os.environ["TRITON_INTERPRET"] == "1"

WHOLE: dict[str, Callable[[], Recurrence]] = {
    "short convolution": lambda: short_conv(3),
    "delta rule": lambda: delta_rule(1, 4, key_heads=1),
    "Mamba 2": lambda: mamba2(1, None, heads=1),
}
HEADS: dict[str, Callable[[], Recurrence]] = {
    "delta rule": lambda: delta_rule(2, 4, key_heads=2),
    "delta rule, tiled": lambda: delta_rule(2, 4, key_heads=2, tiled=True),
    "Mamba 2": lambda: mamba2(2, 2, width=3, heads=4),
}


@pytest.mark.parametrize("name", WHOLE)
def test_same_as_by_torch(name: str) -> None:
    torch.manual_seed(7)
    dtype, tolerance = (torch.bfloat16, 2e-2) if name == "short convolution" else (torch.float32, 1e-5)
    assert is_right(launch_recurrent.recur, WHOLE[name](), dtype, CPU, tolerance)


@pytest.mark.parametrize("name", HEADS)
def test_which_heads_belong_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    monkeypatch.setattr(recurrent_check, "PASSES", (((2, 1), 0),))
    assert is_right(launch_recurrent.recur, HEADS[name](), torch.float32, CPU, 1e-5)


TEXT, OTHER = 36, 21


def run(rule: Recurrence, cache: KVCache, parts: list[tuple[Span, torch.Tensor]]) -> torch.Tensor:
    """Computes spans, and returns what the first of them gets."""
    spans, offsets = [span for span, _ in parts], [0]
    for _, x in parts:
        offsets.append(offsets[-1] + len(x))
    rows = state_rows(spans, offsets, CPU)
    output = launch_recurrent.recur(rule, torch.cat([x for _, x in parts]), rows, cache.states[0])
    for span in spans:
        span.table.num_folded_tokens, span.table.num_computed_tokens = span.num_folded_after, span.end
    return output[: len(parts[0][1])]


@pytest.mark.parametrize("rule", [delta_rule(1, 4, key_heads=1), mamba2(1, 1, heads=1)])
def test_passes_and_neighbours_change_no_bit(rule: Recurrence) -> None:
    """A text comes at once, or in parts, after others in the batch, with drafts that are taken back."""
    torch.manual_seed(3)
    x, other, wrong = (torch.randn(n, rule.input_size) for n in (TEXT, OTHER, 7))
    cache = state_cache(rule, 3)
    expected = run(rule, cache, [(Span(table_in(1), [0] * TEXT, 0), x)])
    cache, table, near = state_cache(rule, 3), table_in(2), table_in(0)
    found = [run(rule, cache, [(Span(table, [0] * 13, 0), x[:13]), (Span(near, [0] * OTHER, 0), other)])]
    drafted = torch.cat((x[13:16], wrong))
    found.append(run(rule, cache, [(Span(table, [0] * 10, 0, 14), drafted)])[:3])
    table.num_computed_tokens = 16
    assert table.num_folded_tokens == 0
    rest = Span(table, [0] * 20, 0, 33)
    found.append(run(rule, cache, [(rest, x[16:]), (Span(near, [0], 0), other[:1])]))
    assert table.num_folded_tokens == 32
    assert torch.equal(torch.cat(found), expected)


BUGS = {
    "states are another text's": ("Mamba 2", "+ folded > 0)[:, None]", "+ folded >= 0)[:, None]"),
    "drafts are folded": (
        "Mamba 2",
        "if start + CHUNK == folded_after:",
        "if start + CHUNK >= folded_after:",
    ),
    "records are those of the row's first tokens": (
        "Mamba 2",
        "+ row) + place\n        record",
        "+ row)\n        record",
    ),
    "a token corrects itself alone": (
        "delta rule",
        "known += tl.sum(tl.where(place < p, alike, 0.0)[:, None] * v, 0)",
        "known += 0",
    ),
    "inputs are kept in the order of the pass": (
        "short convolution",
        "position = (tl.load(num_stored + row) + place)",
        "position = place",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_check_at_load_catches(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    name, *texts = BUGS[bug]
    wrong = planted_in(recurrent_kernels, *texts, tmp_path)
    monkeypatch.setattr(launch_recurrent, "recurrent_kernels", wrong)
    assert not is_right(launch_recurrent.recur, WHOLE[name](), torch.float32, CPU, 1e-4)

"""What penalties need next to the logits: their rows are adjusted in slices."""

import pytest
import torch

from truedraft.engine.messages import SamplingParams
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.lone import LoneText
from truedraft.engine.rows.table import RowTable
from truedraft.engine.sampling import adjust
from truedraft.engine.sampling.adjust import adjust_in_place, adjust_logits

POSITIONS, VOCAB = 5, 20_000
PARAMS = SamplingParams(max_tokens=9, repetition_penalty=1.05, presence_penalty=0.5, frequency_penalty=0.1)


def peak_bytes(num_rows: int) -> float:
    """Returns the bytes that adjusting so many rows takes for each position and entry of the vocabulary."""
    texts = [LoneText(PARAMS, Rule.REJECTION, seed=row) for row in range(num_rows)]
    rows = RowTable().rows_of(texts)
    logits = torch.randn(num_rows, POSITIONS, VOCAB)
    drafted = torch.randint(VOCAB, (num_rows, POSITIONS - 1))
    counts = torch.zeros(2, num_rows, VOCAB)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        adjust_logits(logits, rows, drafted, 0, counts=counts)
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    assert peak >= 4 * logits.numel()  # the copy is seen
    return peak / logits.numel()


@pytest.mark.parametrize("num_rows", [8, 64])
def test_penalties_need_a_small_share_of_the_logits(num_rows: int) -> None:
    """Four bytes are the copy's."""
    assert peak_bytes(num_rows) <= 8


def test_all_rows_at_once_would_need_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adjust, "MOST_SLICES", 1)
    assert peak_bytes(8) > 8


@pytest.mark.parametrize("num_slices", [1, 3, 100])
def test_slices_change_no_bit(num_slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that nobody penalises keep every bit."""
    plain = SamplingParams(max_tokens=9)
    texts = [LoneText(PARAMS if row % 3 else plain, Rule.REJECTION, seed=row) for row in range(7)]
    rows = RowTable().rows_of(texts)
    logits, drafted = torch.randn(7, POSITIONS, 50), torch.randint(50, (7, POSITIONS))
    penalised = [row for row in range(7) if row % 3]
    counts = torch.randint(3, (2, len(penalised), 50)).float()
    adjusted = logits.clone()
    monkeypatch.setattr(adjust, "MOST_SLICES", num_slices)
    adjust_in_place(adjusted, rows, drafted, 1, counts=counts)
    for i, row in enumerate(penalised):
        own = adjust_logits(logits[row, None], [rows[row]], drafted[row, None], 1, counts=counts[:, i, None])
        assert torch.equal(adjusted[row], own[0])
    others = [row for row in range(7) if row not in penalised]
    assert torch.equal(adjusted[others], logits[others])

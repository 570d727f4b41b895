"""What calibration makes of the passes that it measures; these have known times."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.state_slots import StateSlots
from truedraft.engine.memory.batch import Span
from truedraft.engine.rounds import calibrate
from truedraft.engine.speculation.costs import PassCosts


def pass_seconds(unit: float, row_lengths: list[int], num_stored: int) -> float:
    """1,000 stored tokens stay in the processor's cache, further ones are read from memory."""
    stored = len(row_lengths) * (num_stored if num_stored > 1 else 0)
    further_queries = sum(row_lengths) / len(row_lengths) - 1
    attention = (0.001 * stored + 0.004 * max(0, stored - 600)) * (1 + 0.2 * further_queries)
    return unit * (1 + 0.1 * sum(row_lengths) + attention)


def measured(monkeypatch: pytest.MonkeyPatch, unit: float) -> PassCosts:
    cleared: set[int] = set()

    def forget() -> None:
        cleared.clear()

    def fake(model: Any, pool: Any, row_lengths: list[int], num_stored: int = 0) -> float:
        with calibrate._scratch(pool, [num_stored + length for length in row_lengths]) as tables:
            blocks = {block for table in tables for block in table.block_ids}
        assert blocks <= cleared, "the pass would be the first to write to this memory"
        return pass_seconds(unit, row_lengths, num_stored)

    monkeypatch.setattr(calibrate, "pass_seconds", fake)
    model: Any = SimpleNamespace(
        model=SimpleNamespace(has_encoder=False, max_position=4096, touched=None),
        cache=SimpleNamespace(clear=cleared.update, forget=forget),
    )
    pool = BlockPool(num_blocks=200, block_size=16)
    costs = calibrate.calibrate(model, pool, {}, max_tokens=128).score
    assert pool.num_free == 200
    assert not cleared, "what was written for the measurement stays in memory"
    return costs


def test_a_small_model_attends_faster_to_what_stays_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = 0.0004
    costs = measured(monkeypatch, unit)
    rows = ([1], 200), ([1, 1], 250), ([1] * 4, 256), ([5] * 4, 256), ([1] * 8, 256)
    for row_lengths, num_stored in rows:
        expected = pass_seconds(unit, row_lengths, num_stored)
        num_rows, num_tokens = len(row_lengths), sum(row_lengths)
        assert costs(num_tokens, num_stored * num_rows, num_rows) == pytest.approx(expected, rel=0.12)
    # In proportion to 1,024 tokens, which leave the cache, 200 would seem to take twice as long.
    assert costs(1, 200) - costs(1) < 0.6 * (costs(1, 1024) - costs(1)) * 200 / 1024


def test_a_large_model_reads_what_is_stored_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = 0.02
    costs = measured(monkeypatch, unit)
    exact = pass_seconds(unit, [1] * 4, 256)
    assert costs(4, 1024, 4) == pytest.approx(exact)
    assert costs(4, 512, 4) - costs(4) == pytest.approx((exact - costs(4)) / 2)
    assert costs(4, 2048, 4) - costs(4) == pytest.approx((exact - costs(4)) * 2)


def test_a_pool_without_room_leaves_attention_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "pass_seconds", lambda *_: 0.001)
    cleared: set[int] = set()
    model: Any = SimpleNamespace(
        model=SimpleNamespace(has_encoder=False, max_position=4096, touched=None),
        cache=SimpleNamespace(clear=cleared.update, forget=lambda: None),
    )
    costs = calibrate.calibrate(model, BlockPool(num_blocks=20, block_size=16), {}, max_tokens=128)
    assert len(cleared) == 20
    assert costs.score(1, 1000) == costs.score(1)


def test_a_row_reads_its_state_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of the same tokens takes longer in more rows where there are states, and nowhere else."""

    def seconds(model: Any, pool: Any, row_lengths: list[int], num_stored: int = 0) -> float:
        return 0.001 + 0.0001 * sum(row_lengths) + 0.0004 * len(row_lengths)

    monkeypatch.setattr(calibrate, "pass_seconds", seconds)
    model: Any = SimpleNamespace(
        model=SimpleNamespace(has_encoder=False, max_position=4096, touched=None),
        cache=SimpleNamespace(clear=lambda _: None, forget=lambda: None),
    )
    slots = StateSlots(99, lambda *_: None)
    with_states = calibrate.calibrate(model, BlockPool(200, 16, slots), {}, max_tokens=128).score
    for rows in ([1], [5], [1] * 4, [5] * 4, [2] * 8, [1] * 9, [1] * 32):
        took = with_states(sum(rows), 0, len(rows))
        assert took == pytest.approx(seconds(None, None, rows), rel=0.05)
    without = calibrate.calibrate(model, BlockPool(200, 16), {}, max_tokens=128).score
    assert without(4, 0, 4) == without(4, 0, 1)


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("vocab_size", [6, 2048, 151_936])
def test_tokens_of_a_pass_are_distinct(vocab_size: int, has_experts: bool) -> None:
    """Equal ones would meet the same experts of a mixture, in every layer and row. Without any, they are
    close together, so that few pages of a file with embeddings are read."""
    counts = count()
    touched = (lambda: (number := next(counts), number)) if has_experts else None
    passes: list[list[int]] = []

    def forward(spans: list[Span]) -> None:
        passes.append([token_id for span in spans for token_id in span.token_ids])

    model: Any = SimpleNamespace(
        model=SimpleNamespace(has_encoder=False, max_position=4096, touched=touched),
        cache=SimpleNamespace(clear=lambda _: None, forget=lambda: None),
        device=SimpleNamespace(type="cpu"),
        vocab_size=vocab_size,
        forward=forward,
    )
    draft = {"draft_model": (model, BlockPool(200, 16))}
    calibrate.calibrate(model, BlockPool(200, 16), draft, max_tokens=128, seconds=0.05)
    assert {1, 5} <= {len(ids) for ids in passes}
    for ids in passes:
        assert len(set(ids)) == min(len(ids), vocab_size)
        assert all(0 <= token_id < vocab_size for token_id in ids)
        if not has_experts:
            assert max(ids) < len(ids)
        elif 1 < len(ids) <= vocab_size:  # neighbours in a vocabulary are often alike
            assert max(ids) - min(ids) >= (vocab_size - len(ids)) // 2

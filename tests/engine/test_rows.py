"""The table of rows: a sequence enters at one place and leaves at one place, and nothing of it stays."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.native_pair import make_twins, save_pair
from tests.models import run_engine
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import SamplingParams
from truedraft.engine.native.library import Row as RowInC
from truedraft.engine.native.ops import NativeOps
from truedraft.engine.rows.columns import DEVICE_WIDTH, FLOAT, RULES, WIDTH, Field, Rule
from truedraft.engine.rows.lone import LoneText
from truedraft.engine.rows.table import FIRST_CAPACITY, RowTable

Patch = pytest.MonkeyPatch
PENALISED = SamplingParams(
    max_tokens=9, temperature=0.7, top_k=4, top_p=0.9, min_p=0.1, frequency_penalty=0.5, logit_bias={3: 1.0}
)


def text(seed: int = 5, params: SamplingParams = PENALISED, **more: Any) -> LoneText:
    return LoneText(params, Rule.REJECTION, seed, [1, 2, 1], 2, **more)


def columns_of(table: RowTable, number: int) -> dict[str, float]:
    floats, numbers = table.floats[number], table.numbers[number]
    return {
        field.name.lower(): float(floats[field]) if field.type == FLOAT else int(numbers[field])
        for field in Field
    }


def test_c_sees_the_columns_that_torch_sees() -> None:
    table = RowTable()
    given = text()
    (row,) = table.rows_of([given])
    table.lines_of([row])
    line = np.ascontiguousarray(table.numbers[row.number])
    struct = RowInC.from_buffer(line)
    seen = {name: getattr(struct, name) or 0 for name, _ in RowInC._fields_}
    assert seen == columns_of(table, row.number)
    assert (seen["seed"], seen["rule"], seen["num_stored"]) == (5, Rule.REJECTION.code, 2)
    assert len(seen) == WIDTH > DEVICE_WIDTH
    assert [rule.code for rule in RULES] == list(range(len(Rule)))


def test_a_sequence_keeps_its_line_and_follows_its_text() -> None:
    table, given, other = RowTable(), text(), text(6)
    (row,) = table.rows_of([given])
    given.token_ids.append(7)
    rows = table.rows_of([other, given])
    assert rows[1] is row
    assert rows[0].number != row.number
    assert table.lines_of(rows).tolist() == [each.number for each in rows]
    assert table.numbers[row.number, Field.NUM_STORED] == 3
    row.copy_text()
    assert row.arrays[Field.TOKEN_IDS][:4].tolist() == [1, 2, 1, 7]


def test_more_sequences_than_lines_make_the_table_grow() -> None:
    table, texts = RowTable(), [text(seed) for seed in range(3 * FIRST_CAPACITY)]
    rows = table.rows_of(texts)
    assert len({row.number for row in rows}) == len(texts)
    assert table.numbers[[row.number for row in rows], Field.SEED].tolist() == list(range(len(texts)))


def leaves_nothing_behind(table: RowTable) -> None:
    """A line that had every column set is taken by a sequence that asks for nothing."""
    plain = SamplingParams(max_tokens=9)
    fresh = text(8, plain)
    (row,) = RowTable().rows_of([fresh])
    expected = columns_of(row.table, row.number)
    asked = text(stop_token_ids=frozenset([4]))
    (row,) = table.rows_of([asked])
    table.numbers[row.number, [field for field in Field if field.type != FLOAT]] |= 1
    number = row.number
    del asked, row
    gc.collect()
    again = text(8, plain)
    (row,) = table.rows_of([again])
    assert row.number == number
    found = columns_of(table, number)
    addresses = {field.name.lower() for field in Field if "*" in field.type}
    assert {name: found[name] for name in found if name not in addresses} == {
        name: expected[name] for name in expected if name not in addresses
    }
    assert {name for name in addresses if found[name]} == {name for name in addresses if expected[name]}


def test_a_line_is_taken_over_without_what_it_held() -> None:
    leaves_nothing_behind(RowTable())


def a_column_is_not_folded_on_release(patch: Patch) -> None:
    def release(self: RowTable, number: int) -> None:
        self.numbers[number, : Field.NUM_COUNTED] = 0
        self._free.append(number)

    patch.setattr(RowTable, "_release", release)


def test_a_column_that_stays_is_noticed(monkeypatch: Patch) -> None:
    a_column_is_not_folded_on_release(monkeypatch)
    with pytest.raises(AssertionError):
        leaves_nothing_behind(RowTable())


# Sequences that come one after the other, so that lines are used again.
FREQUENT = SamplingParams(max_tokens=14, temperature=0, frequency_penalty=0.7, repetition_penalty=1.2)
PROMPTS = [[1, 2, 3], [4, 4, 4], [5, 6, 7, 8], [2, 2], [9, 3]]


def lines_are_anothers(core: EngineCore, expected: list[list[int]]) -> None:
    """A second wave of sequences takes the lines of the first."""
    for _ in range(3):
        assert run_engine(core, PROMPTS, FREQUENT) == expected


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("which", [0, 1], ids=["in C", "in Python"])
def test_lines_are_used_again(which: int, pair: tuple[str, str]) -> None:
    expected = run_engine(make_twins(*pair)[1], PROMPTS, FREQUENT)
    core = make_twins(*pair)[which]
    lines_are_anothers(core, expected)
    assert len(core.runner.table.numbers) == FIRST_CAPACITY  # type: ignore[attr-defined]


def drafts_are_counted_still(patch: Patch) -> None:
    """What a round's drafts have added to the counts stays, for whoever comes next."""
    honest = NativeOps.adjust

    def adjust(self: NativeOps, step: Any, logits: Any, drafted: Any, offset: int, counts: list[int]) -> Any:
        found = honest(self, step, logits, drafted, offset, counts)
        for place, row in enumerate(step.rows):
            if row.is_penalised and drafted.shape[1]:
                row.arrays[Field.COUNTS][: len(set(row.prompt))] += int(counts[place] > 1)
        return found

    patch.setattr(NativeOps, "adjust", adjust)


def lines_are_used_before_they_are_free(patch: Patch) -> None:
    """A new sequence takes the line of one that runs."""
    honest = RowTable._add

    def add(self: RowTable, given: Any) -> Any:
        if self._free and len(self._free) < len(self.numbers):
            self._free[-1] = next(iter(self._rows.values())).number
        return honest(self, given)

    patch.setattr(RowTable, "_add", add)


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("plant", [drafts_are_counted_still, lines_are_used_before_they_are_free])
def test_lines_that_are_not_free_are_noticed(
    plant: Callable[[Patch], None], pair: tuple[str, str], monkeypatch: Patch
) -> None:
    expected = run_engine(make_twins(*pair)[1], PROMPTS, FREQUENT)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        lines_are_anothers(make_twins(*pair)[1], expected)


def test_arrays_are_kept_as_long_as_their_addresses() -> None:
    table, given = RowTable(), text()
    (row,) = table.rows_of([given])
    place = int(table.numbers[row.number, Field.BIAS_IDS])
    assert place == row.arrays[Field.BIAS_IDS].ctypes.data
    blocks = BlockTable()
    blocks.block_ids = [4, 5]
    row.keep_blocks(Field.BLOCKS, Field.NUM_BLOCKS, blocks)
    kept = row.arrays[Field.BLOCKS]
    row.keep_blocks(Field.BLOCKS, Field.NUM_BLOCKS, blocks)
    assert row.arrays[Field.BLOCKS] is kept
    blocks.block_ids.append(6)
    row.keep_blocks(Field.BLOCKS, Field.NUM_BLOCKS, blocks)
    assert table.numbers[row.number, Field.NUM_BLOCKS] == 3
    assert torch.tensor(row.arrays[Field.BLOCKS]).tolist() == [4, 5, 6]
    blocks.window_ids = [7, 7, 0]
    row.keep_blocks(Field.BLOCKS, Field.NUM_BLOCKS, blocks)
    assert table.numbers[row.number, Field.NUM_BLOCKS] == 3
    assert torch.tensor(row.arrays[Field.BLOCKS]).tolist() == [4, 7, 5, 7, 6, 0]

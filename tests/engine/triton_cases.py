"""The kernels in Triton's interpreter, on the CPU. ``test_triton_attention`` runs it in a process of
its own: TRITON_INTERPRET must be set before triton is imported.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.runtime import interpreter

from tests.engine import graph_gates, torch_kernels
from tests.engine.conftest import Models
from tests.engine.test_llama import CONFIGS, save
from tests.engine.triton_bugs import BUGS, SMALL_BUGS, planted
from tests.engine.triton_gates import same_as_gathered, same_gate, same_norm, same_rotation_and_cache
from tests.models import make_engine, run_engine
from tests.tape import TapeCapture
from truedraft.engine.cuda import kernels, multiprocessors, triton_run
from truedraft.engine.cuda.triton_run import AttendRows, InPlaceAttention, find_kernels
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models import agreement
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.rounds.capture import graphs
from truedraft.engine.rounds.capture import plan as plan_module

assert os.environ["TRITON_INTERPRET"] == "1"

Patch = pytest.MonkeyPatch
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch: Patch) -> None:
    """The interpreter keeps bfloat16 as 16-bit integers, and multiplies these."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        def widened(x: Any) -> Any:
            if x.dtype.scalar != triton.language.bfloat16:
                return x
            bits = x.data.astype(np.uint32) << 16
            return interpreter.TensorHandle(bits.view(np.float32), triton.language.float32)

        return create_dot(self, widened(a), widened(b), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch: Patch) -> None:
    """Programs have several pieces each, then."""
    for module in (kernels, multiprocessors):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 1)


CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "a window": {"window": 6},
    "a window of one": {"window": 1},
    "a window wider than a tile": {"window": 50, "longest": 150},
    "every head for itself": {"heads": (3, 3)},
    "one head for all": {"heads": (7, 1)},
    "heads of 8": {"size": 8},
    "heads of 96": {"size": 96, "heads": (2, 1)},
    "heads of 256": {"size": 256, "heads": (2, 1)},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16, "heads": (8, 2)},
    "two splits": {"num_splits": 2, "longest": 200},
    "splits and a window": {"num_splits": 3, "window": 70, "longest": 200, "dtype": torch.bfloat16},
    "more splits than keys": {"num_splits": 5, "longest": 3, "heads": (2, 1)},
    "blocks of 16": {"block_size": 16, "longest": 300},
    "blocks of 5": {"block_size": 5},
    "sinks": {"has_sinks": True, "heads": (6, 2)},
    "sinks, a window and splits": {"has_sinks": True, "window": 70, "num_splits": 3, "longest": 200},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_same_as_gathered(case: dict[str, Any]) -> None:
    same_as_gathered(kernels.attend_rows, 0, **case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("size", "heads"), [(8, (3, 3)), (16, (6, 2)), (80, (2, 1)), (96, (1, 1)), (256, (2, 1))]
)
def test_rotation_and_cache(size: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    same_rotation_and_cache(kernels.rotate_and_store, dtype, size, heads)


def test_rotation_of_a_part_of_keys_that_are_values() -> None:
    same_rotation_and_cache(kernels.rotate_and_store, torch.float32, 576, (3, 1), turned=64, has_values=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 1024, 1025, 2500])
def test_gate(size: int, dtype: torch.dtype) -> None:
    same_gate(kernels.gated_silu, dtype, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 96, 256, 2500])
def test_norm(size: int, dtype: torch.dtype) -> None:
    same_norm(kernels.rms_norm, dtype, size)


@pytest.mark.parametrize("bug", SMALL_BUGS)
def test_gates_of_the_small_kernels_catch(bug: str, tmp_path: Path) -> None:
    wrong = planted(bug, tmp_path)

    def all_small_gates() -> None:
        same_rotation_and_cache(wrong.rotate_and_store, torch.float32, 16)
        same_gate(wrong.gated_silu, torch.float32, 21)
        same_norm(wrong.rms_norm, torch.float32, 21)

    with pytest.raises(AssertionError):
        all_small_gates()


def test_pieces_by_shape() -> None:
    """Rows of few numbers may have most pieces; however many numbers there are, two fit."""
    one = 32 * 128
    assert kernels.most_pieces(4096, one) == 32
    assert kernels.most_pieces(300, one) == 3
    assert kernels.most_pieces(100, one) == 1
    assert kernels.most_pieces(32_768, 32 * one) == 32
    assert kernels.most_pieces(32_768, 320 * one) == 6
    assert kernels.most_pieces(32_768, 4000 * one) == 2


def pieces(lengths: list[int], most: int, window: int = 0) -> list[tuple[int, int]]:
    """Returns how many pieces rows with these keys have, and how many keys each, as the kernel divides
    them."""
    found = torch.empty(len(lengths), 2, dtype=torch.int64)
    positions = torch.tensor(lengths) - 1
    first, counts = torch.arange(len(lengths)), torch.ones(len(lengths), dtype=torch.int64)
    told = first, counts, positions
    divide[(len(lengths),)](found, *told, kernels.MIN_KEYS_OF_SPLIT, most, WINDOW=window, KEY_TILE=32)
    return [(number, size) for number, size in found.tolist()]


@triton.jit
def divide(
    found,
    first_tokens,
    counts,
    positions,
    keys_of_piece,
    most_pieces,
    WINDOW: triton.language.constexpr,  # noqa: N803
    KEY_TILE: triton.language.constexpr,  # noqa: N803
):
    row = triton.language.program_id(0)
    told = first_tokens, counts, positions, keys_of_piece, most_pieces
    _, _, share, number = kernels.pieces_of(row, row >= 0, *told, WINDOW, KEY_TILE)
    triton.language.store(found + 2 * row, number)
    triton.language.store(found + 2 * row + 1, share)


def test_a_long_row_is_divided_whatever_is_beside_it() -> None:
    """One text of 32,768 tokens among 31 of 300: no program reads more than a few thousand keys."""
    lengths = [300] * 31 + [32_768]
    assert pieces(lengths, 32) == [(3, 128)] * 31 + [(32, 1024)]
    assert pieces([32_768], 32) == [(32, 1024)]
    assert pieces([1, 128, 129], 32) == [(1, 32), (1, 128), (2, 96)]
    assert pieces([32_768], 32, window=512) == [(4, 128)]


def test_rows_beyond_those_looked_among_are_launched_apart(monkeypatch: Patch) -> None:
    monkeypatch.setattr(kernels, "ROWS_LOOKED_AT", 2)
    for seed in range(3):
        same_as_gathered(kernels.attend_rows, seed, longest=20)


@pytest.fixture
def on_the_cpu(monkeypatch: Patch) -> None:
    """The CPU counts as a device for the kernel, in the interpreter."""
    monkeypatch.setattr(triton_run, "is_fit", lambda device: True)


# Bugs, planted in the kernels' text.

# Cheap cases come first.
CAUGHT_BY = [
    {"longest": 20},
    {"window": 6, "longest": 20},
    {"longest": 150, "num_splits": 2, "heads": (2, 1)},
    {"window": 6, "longest": 150, "num_splits": 3},
    {"window": 40, "longest": 150, "heads": (4, 2)},
    {"longest": 150, "num_splits": 2, "heads": (2, 1), "has_sinks": True},
]


def all_gates(kernel: AttendRows) -> None:
    for seed in range(4):
        for case in CAUGHT_BY:
            same_as_gathered(kernel, seed, **case)  # type: ignore[arg-type]


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_gates_catch(bug: str, tmp_path: Path) -> None:
    kernel = planted(bug, tmp_path).attend_rows
    with pytest.raises(AssertionError):
        all_gates(kernel)


SHAPE, WINDOWED = (AttentionShape(0, 4, 2, 16, 0.25, window, None) for window in (None, 6))
WITH_SINKS = replace(SHAPE, sinks=torch.tensor([1.0, -1.0, 2.0, 0.5]))


@pytest.mark.parametrize("bug", list(BUGS)[1::2])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_the_check_at_load_catches(
    bug: str, tmp_path: Path, on_the_cpu: None, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "attend_rows", planted(bug, tmp_path).attend_rows)
    with caplog.at_level(logging.WARNING):
        shape = WINDOWED if "window" in bug else WITH_SINKS if "sink" in bug else SHAPE
        assert find_kernels([shape], torch.bfloat16, CPU) is None
    assert "The attention kernel differs" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_check_at_load_finds_it_right(dtype: torch.dtype, on_the_cpu: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(triton_run, "MAX_GROUPED_QUERIES", 9)  # two sizes of program
    assert find_kernels([SHAPE, SHAPE, WITH_SINKS], dtype, CPU) is kernels


# The kernel in engines.


@pytest.fixture
def taped(monkeypatch: Patch, on_the_cpu: None) -> None:
    """Passes are captured on tapes, on which each launch of the kernel is one operation."""
    monkeypatch.setattr(plan_module, "make_capture", TapeCapture)
    # Else Triton's launches, which torch does not see, would be missing from the tape.
    monkeypatch.setattr(kernels, "attend_rows", on_tape(kernels.attend_rows))
    for name in ("rotate_and_store", "gated_silu", "rms_norm"):
        monkeypatch.setattr(kernels, name, getattr(torch_kernels, name))


def on_tape(kernel: Callable[..., None]) -> Callable[..., None]:
    @torch.library.custom_op(f"truedraft_tests::attend_{id(kernel)}", mutates_args={"output"})
    def operation(
        output: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        first_tokens: torch.Tensor,
        counts: torch.Tensor,
        queries: int,
        positions: torch.Tensor,
        block_size: int,
        scaling: float,
        window: int | None,
        num_splits: int | None,
        sinks: torch.Tensor | None,
    ) -> None:
        rows = kernels.PagedRows(tables, first_tokens, counts, queries)
        kernel(
            *(output, query, keys, values, rows, positions, block_size, scaling, window, num_splits, sinks)
        )

    def launch(
        output: Any,
        query: Any,
        keys: Any,
        values: Any,
        rows: Any,
        positions: Any,
        *others: Any,
        num_splits: Any = None,
        sinks: Any = None,
    ) -> None:
        lie = rows.tables, rows.first_tokens, rows.counts, rows.queries
        operation(output, query, keys, values, *lie, positions, *others, num_splits, sinks)

    return launch


def reads_in_place(model: Any) -> bool:
    assert isinstance(model.model, FusedDecoder)
    return model.model.reads_in_place


def eager_engines_gather(monkeypatch: Patch) -> Callable[..., Any]:
    """``make_engine``, without the kernel where there are no graphs."""

    def build(target: str, draft: str | None, cuda_graphs: bool, **config: Any) -> Any:
        with monkeypatch.context() as patch:
            if not cuda_graphs:
                patch.setattr(triton_run, "is_fit", lambda device: False)
            core = make_engine(target, draft, cuda_graphs=cuda_graphs, **config)
        assert reads_in_place(core.target) == cuda_graphs
        return core

    return build


def other_cases_look(monkeypatch: Patch) -> None:
    """Leaves out the comparisons at load, which take the interpreter long."""
    monkeypatch.setattr(triton_run, "is_right", lambda *_: True)
    monkeypatch.setattr(agreement, "_agrees", lambda *_: True)
    monkeypatch.setattr(graphs, "_is_right", lambda *_: True)


def test_captured_passes(tmp_path: Path, taped: None, monkeypatch: Patch) -> None:
    """Against an engine that gathers: the same logits, the same caches, with NaN in foreign blocks."""
    folder = save(CONFIGS["qwen2 with windows above"], tmp_path)
    monkeypatch.setattr(graph_gates, "make_engine", eager_engines_gather(monkeypatch))
    for name, fewer in (("NUM_SEQUENCES", 2), ("STEPS", 3)):  # it is an interpreter
        monkeypatch.setattr(graph_gates, name, fewer)
    other_cases_look(monkeypatch)
    graph_gates.same_as_eager(folder, max_model_len=100)


def test_same_tokens(models: Models, on_the_cpu: None, monkeypatch: Patch) -> None:
    """Whole engines, without graphs: prompts and drafted rows together."""
    params = [SamplingParams(max_tokens=3, seed=seed) for seed in range(2)]
    prompts = [[1, 2, 3], [*range(16), *range(16), 5, 6]]
    other_cases_look(monkeypatch)
    ours = make_engine(models.target, models.close_draft, native_kernels=False)
    monkeypatch.setattr(triton_run, "is_fit", lambda device: False)
    theirs = make_engine(models.target, models.close_draft, native_kernels=False)
    assert reads_in_place(ours.target)
    assert not reads_in_place(theirs.target)
    assert run_engine(ours, prompts, params, [0, 1]) == run_engine(theirs, prompts, params, [0, 1])


def test_a_wrong_kernel_is_not_used(
    models: Models, on_the_cpu: None, monkeypatch: Patch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = planted("a query does not see itself", tmp_path)
    monkeypatch.setattr(kernels, "attend_rows", wrong.attend_rows)
    with caplog.at_level(logging.WARNING):
        core = make_engine(models.target, None, native_kernels=False)
    assert not reads_in_place(core.target)
    assert "The attention kernel differs" in caplog.text
    graph_gates.still_says_the_same(models.target, core)


def test_a_kernel_that_raises_is_not_used(
    on_the_cpu: None, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    def launch(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(kernels, "attend_rows", launch)
    with caplog.at_level(logging.WARNING):
        assert find_kernels([SHAPE], torch.float32, CPU) is None
    assert "cannot be used: out of resource" in caplog.text


def test_a_kernel_that_is_given_wrong_rows_is_not_used(
    models: Models, on_the_cpu: None, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the check of the kernel alone cannot see, the logits show."""
    monkeypatch.setattr(triton_run, "is_right", lambda *_: True)
    attend = InPlaceAttention.attend

    def shifted(self: InPlaceAttention, call: Any, query: torch.Tensor, *others: Any) -> torch.Tensor:
        return attend(self, call, query.roll(1, 0), *others)

    monkeypatch.setattr(InPlaceAttention, "attend", shifted)
    with caplog.at_level(logging.WARNING):
        core = make_engine(models.target, None, native_kernels=False)
    assert not reads_in_place(core.target)
    assert "the CUDA kernels: the logits differ" in caplog.text

"""The attention kernel without a GPU: in Triton's interpreter, and through its compiler for GPUs."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from engine.batch import PagedRows
from engine.models import in_place_attention
from engine.models.in_place_attention import find_kernel
from engine.models.layer_parts import AttentionShape
from tests.engine.triton_gates import same_as_gathered

ROOT = Path(__file__).parent.parent.parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
SHAPE = AttentionShape(0, 4, 2, 16, 0.25, None, None)


def run(*arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def attend_by_hand(
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
) -> None:
    """What the kernel computes, token by token."""
    shared = query.shape[1] // keys.shape[1]
    for table, first, count in zip(
        rows.tables.tolist(), rows.first_tokens.tolist(), rows.counts.tolist(), strict=True
    ):
        assert count <= rows.queries
        for token in range(first, first + count):
            end = int(positions[token]) + 1
            seen = range(max(0, end - (sliding_window or end)), end)
            slots = [table[i // block_size] * block_size + i % block_size for i in seen]
            k, v = (stored[slots].repeat_interleave(shared, dim=1) for stored in (keys, values))
            weights = torch.einsum("hd,khd->hk", query[token], k).mul(scaling).softmax(-1)
            output[token] = torch.einsum("hk,khd->hd", weights, v)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("seed", range(4))
def test_what_a_kernel_is_told(seed: int, window: int | None) -> None:
    """Without triton too: rows, tables and positions of ragged batches, and long chunks beside them."""
    same_as_gathered(attend_by_hand, seed, window=window)


@needs_triton
def test_in_the_interpreter() -> None:
    """In a process of its own, as triton must know before it is imported."""
    cases = "tests/engine/triton_cases.py"
    run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", cases, TRITON_INTERPRET="1")


@needs_triton
def test_compiles_for_gpus(tmp_path: Path) -> None:
    """By Triton's own compiler and assembler, which need no GPU. Another process, as the interpreter's
    variable must not be set."""
    run("-m", "tests.engine.triton_compile", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


def test_on_a_cpu_nothing_is_tried() -> None:
    assert find_kernel([SHAPE], torch.float32, torch.device("cpu")) is None


def test_without_triton_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(in_place_attention, "_is_fit", lambda device: True)
    monkeypatch.setattr(in_place_attention, "find_spec", lambda name: None)
    assert find_kernel([SHAPE], torch.float32, torch.device("cpu")) is None
    assert not caplog.text


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 16), (torch.float32, 320)])
def test_what_it_is_not_made_for_is_not_tried(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(in_place_attention, "_is_fit", lambda device: True)
    shape = AttentionShape(0, 4, 2, size, 0.25, None, None)
    assert find_kernel([shape], dtype, torch.device("cpu")) is None
    assert not caplog.text

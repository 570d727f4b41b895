"""The kernels without a GPU: in Triton's interpreter, and through its compiler for GPUs."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from tests.engine import torch_kernels
from tests.engine.triton_gates import same_as_gathered
from truedraft.engine.cuda import triton_run
from truedraft.engine.cuda.triton_run import find_kernels, serves
from truedraft.engine.layers import attention
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.layers.torch_run import TorchPointwise
from truedraft.engine.models.options import resolve_dtype

ROOT = Path(__file__).parent.parent.parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
SHAPE = AttentionShape(0, 4, 2, 16, 0.25, None, None)


def run(*arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("seed", range(4))
def test_what_a_kernel_is_told(seed: int, window: int | None) -> None:
    """Without triton too: rows, tables and positions of ragged batches, and long chunks among them."""
    same_as_gathered(torch_kernels.attend_rows, seed, window=window)


@pytest.mark.parametrize("heads", [(8, 2), (3, 3)])
@pytest.mark.parametrize("alignment", [causal_lower_right, causal_upper_left])
def test_long_chunks_without_a_mask(
    alignment: Any, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU attends 16 bits like this. Aligned by the first query and key, later chunks would be wrong."""
    monkeypatch.setattr(attention, "_has_flash", lambda query, values: query.dtype == torch.float32)
    monkeypatch.setattr(attention, "causal_lower_right", alignment)
    shape = AttentionShape(0, *heads, 16, 0.25, None, None)
    cpu = torch.device("cpu")
    is_right = triton_run.is_right(torch_kernels.attend_rows, shape, torch.float32, cpu, queries=100)
    assert is_right == (alignment is causal_lower_right)


@needs_triton
def test_in_the_interpreter() -> None:
    """Runs them in a process of their own, as triton must know before it is imported."""
    cases = (
        f"tests/engine/triton_{name}cases.py"
        for name in ("", "sampling_", "recurrent_", "expert_", "latent_")
    )
    run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *cases, TRITON_INTERPRET="1")


@needs_triton
def test_compiles_for_gpus(tmp_path: Path) -> None:
    """Triton's own compiler and assembler need no GPU. Another process runs them, as the interpreter's
    variable must not be set."""
    run("-m", "tests.engine.triton_compile", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


def test_on_a_cpu_nothing_is_tried() -> None:
    assert find_kernels([SHAPE], torch.float32, torch.device("cpu")) is None


def test_without_triton_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_run, "is_fit", lambda device: True)
    monkeypatch.setattr(triton_run, "find_spec", lambda name: None)
    assert find_kernels([SHAPE], torch.float32, torch.device("cpu")) is None
    assert not caplog.text


@pytest.mark.parametrize("is_normed", [True, False])
def test_kernels_are_checked_with_the_distances_that_serve(is_normed: bool) -> None:
    """What is compiled for another distance from token to token would be compiled while serving."""
    seen: list[int] = []

    def attend(output: torch.Tensor, query: torch.Tensor, *others: Any, **more: Any) -> None:
        seen.append(query.stride(0))
        torch_kernels.attend_rows(output, query, *others, **more)

    shape = replace(SHAPE, norm=Norm(torch.ones(6, 16), 1e-6) if is_normed else None)
    assert triton_run.is_right(attend, shape, torch.float32, torch.device("cpu"), queries=2)
    query_key, _ = TorchPointwise().split_heads(shape, torch.ones(3, (4 + 2 * 2) * 16))
    assert set(seen) == {query_key.stride(0)}


@pytest.mark.parametrize(("hip", "is_used"), [(None, True), ("6.4", False)])
def test_the_flash_kernel_is_for_nvidias_devices(
    hip: str | None, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    query = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(1, 64), device="cuda")
    assert attention._has_flash(query, query) == is_used  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "hip", "dtype"),
    [
        ((7, 5), None, torch.float16),
        ((8, 0), None, torch.bfloat16),
        ((7, 5), "6.4", torch.bfloat16),
    ],
)
def test_devices_without_bfloat16_compute_in_float16(
    capability: tuple[int, int], hip: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_dtype("auto", torch.device("cuda")) == dtype
    assert resolve_dtype("bfloat16", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 16), (torch.float32, 320)])
def test_what_it_is_not_made_for_is_not_tried(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_run, "is_fit", lambda device: True)
    shape = AttentionShape(0, 4, 2, size, 0.25, None, None)
    assert find_kernels([shape], dtype, torch.device("cpu")) is None
    assert not caplog.text


@pytest.mark.parametrize(
    "more",
    [
        {"softcap": 3.0},
        {"sinks": torch.ones(4), "values_are_keys": True, "num_kv_heads": 1, "value_start": 4},
        {"interleaved": True},
        {"norm_after_rotary": True},
        {"whole_norms": (Norm(torch.ones(64), 1e-6),) * 2},
        {"value_norm": Norm(torch.ones(16), 1e-6)},
        {"source": 0},
        {"values_are_keys": True},
        {"head_size": 320},
    ],
    ids=lambda more: next(iter(more)),
)
def test_one_layer_without_kernels_leaves_all_to_torch(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_run, "is_fit", lambda device: True)
    monkeypatch.setattr(triton_run, "find_spec", lambda name: True)
    assert serves([SHAPE], torch.float32, torch.device("cpu"))
    assert not serves([SHAPE, replace(SHAPE, **more)], torch.float32, torch.device("cpu"))

"""The kernels in C: the same numbers as torch's operations, and a way on where they cannot be had."""

import dataclasses
import math
from ctypes import byref
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.engine.test_llama import CONFIGS, PARTS, logits_in_parts, save
from tests.models import make_engine
from truedraft.engine.layers.mlp import ACTIVATIONS, SWISH_LIMIT
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.run import AttentionShape, LayerRun
from truedraft.engine.layers.torch_run import TorchRun
from truedraft.engine.memory.batch import MAX_GROUPED_QUERIES, ForwardBatch, Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import AttentionCache, KVCache
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.native import compiler, library
from truedraft.engine.native.linear import NativeLinear, half_scale, linear_library
from truedraft.engine.native.native_run import NativeKernels, qkv_width, serves
from truedraft.engine.native.threads import set_num_threads

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 96, 4
# (tokens stored before, new tokens) of each sequence in the batch.
BATCHES: dict[str, list[tuple[int, int]]] = {
    "one token": [(0, 1)],
    "a lone row": [(70, 1)],
    "scoring": [(31, 5)],
    "rows of different lengths": [(5, 1), (90, 4), (0, 7), (33, 2)],
    "beside a prompt": [(12, 3), (20, MAX_GROUPED_QUERIES + 9), (64, 1)],
    "a prompt alone": [(0, 2 * MAX_GROUPED_QUERIES)],
}
NORM = Norm(torch.rand(6, 80, generator=torch.Generator().manual_seed(11)) + 0.5, 1e-5)
SHAPES = {
    "a head for each": AttentionShape(0, 3, 3, 64, 0.125, None, None),
    "shared heads": AttentionShape(0, 6, 2, 32, 0.2, None, None),
    "a head of 16": AttentionShape(0, 4, 1, 16, 0.25, None, None),
    "128, a window": AttentionShape(0, 2, 1, 128, 0.1, 9, None),
    "odd size, norms": AttentionShape(0, 4, 2, 80, 0.3, None, NORM),
    "256, other angles": AttentionShape(0, 2, 1, 256, 0.1, None, None, rotary=1),
    "neighbours, norms after they are turned": AttentionShape(
        0, 4, 2, 80, 0.3, None, NORM, interleaved=True, norm_after_rotary=True
    ),
    "a softcap, a window": AttentionShape(0, 6, 2, 32, 0.4, 9, None, softcap=1.5),
    "576, values are keys": AttentionShape(0, 3, 1, 576, 0.05, None, None, values_are_keys=True),
    "many heads share one": AttentionShape(0, 40, 1, 16, 0.25, None, None, values_are_keys=True),
}


class TableOfAngles:
    """Has as much of ``Rotary`` as the parts ask for."""

    def __init__(self, size: int, has_table: bool) -> None:
        angles = torch.randn(2, 128, size // 2)
        cos, sin = angles.cos(), angles.sin()
        self.all = torch.cat([cos, cos], dim=2), torch.cat([-sin, sin], dim=2)
        self.table = self.all if has_table else None

    def compute(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.all[0][:, positions], self.all[1][:, positions]

    angles = compute

    def reach(self, num_positions: int) -> int:
        return self.all[0].shape[1]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(11)


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    loaded = library.load_library()
    if loaded is None:
        pytest.skip("no C compiler")
    return NativeKernels(loaded)


def make_batch(rows: list[tuple[int, int]]) -> ForwardBatch:
    """Blocks are dealt out in a random order, and some tables own more than they use."""
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4)).tolist()
    spans = []
    for i, (stored, new) in enumerate(rows):
        table = BlockTable()
        table.block_ids = [free.pop() for _ in range(-(-(stored + new) // BLOCK_SIZE) + i % 2)]
        table.num_computed_tokens = stored
        spans.append(Span(table, [1] * new, 1))
    return ForwardBatch.build(spans, BLOCK_SIZE, CPU)


def make_cache(shape: AttentionShape) -> KVCache:
    heads = shape.num_kv_heads, shape.head_size
    values = None if shape.values_are_keys else heads
    cache = KVCache([AttentionCache(heads, values, torch.float32, CPU)], NUM_BLOCKS, BLOCK_SIZE)
    generator = torch.Generator().manual_seed(7)
    cache.keys[0].normal_(generator=generator)
    cache.values[0].normal_(generator=generator)
    return cache


@pytest.mark.parametrize("has_table", [True, False], ids=["table", "computed"])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_is_torchs(
    shape: AttentionShape, rows: list[tuple[int, int]], has_table: bool, kernels: NativeKernels
) -> None:
    check_attention(shape, rows, TableOfAngles(shape.head_size, has_table), kernels)


def test_a_part_of_each_head_is_turned(kernels: NativeKernels) -> None:
    for shape in SHAPES.values():
        check_attention(shape, BATCHES["beside a prompt"], TableOfAngles(shape.head_size // 4, True), kernels)


def check_attention(
    shape: AttentionShape, rows: list[tuple[int, int]], rotary: Any, kernels: NativeKernels
) -> None:
    batch = make_batch(rows)
    qkv = torch.randn(batch.slots.shape[0], qkv_width(shape))
    results = []
    for make_parts in (TorchRun, kernels):
        cache = make_cache(shape)
        parts: LayerRun = make_parts(batch, cache, rotary)
        results.append((parts.attend(shape, qkv.clone()), cache.keys[0], cache.values[0]))
    (expected, *stored), (attended, *stored_by_us) = results
    torch.testing.assert_close(attended, expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(stored_by_us, stored, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("one_thread_afterwards")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 100), (40, 4096)])
def test_norm_and_gate_are_torchs(rows: int, size: int, threads: int, kernels: NativeKernels) -> None:
    shape = SHAPES["a head for each"]
    rotary: Any = TableOfAngles(shape.head_size, has_table=True)
    both = [make(make_batch([(3, 1)]), make_cache(shape), rotary) for make in (TorchRun, kernels)]
    set_num_threads(threads)
    x = torch.randn(rows, 2 * size) * torch.logspace(-3, 2, rows)[:, None]
    norm = Norm(torch.rand(2 * size) + 0.5, 1e-6)
    normed = [parts.norm(norm, x) for parts in both]
    added = [parts.norm(norm, x, x.flip(0)) for parts in both]
    gated = [[parts.gate(activation, x.clone()) for activation in ACTIVATIONS] for parts in both]
    capped = [parts.cap(x.clone(), 20.0) for parts in both]
    torch.testing.assert_close(normed[1], normed[0], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(added[1], added[0], rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(gated[1][0], gated[0][0], rtol=2e-6, atol=1e-30)
    # torch adds 1 to the tangent, where digits are lost if it is almost -1.
    torch.testing.assert_close(gated[1][1], gated[0][1], rtol=2e-6, atol=1e-4)
    torch.testing.assert_close(capped[1], capped[0], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 8, 9, 10, 11, 12, 13, 40])
@pytest.mark.parametrize(("out", "size"), [(64, 48), (100, 33), (1, 200)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_linear_layers_are_float32_layers(
    out: int, size: int, rows: int, bias: bool, dtype: torch.dtype, kernels: NativeKernels
) -> None:
    weight = (torch.randn(out, size) * 0.02).to(dtype).float()
    added = torch.randn(out) if bias else None
    weights = list(weight.to(dtype).split(-(-out // 2)))  # stacked again
    scale = half_scale(weights)
    assert (scale is None) == (dtype == torch.float32)
    linear = NativeLinear(kernels.library, weights, added, scale)
    x, residual = torch.randn(rows, size), torch.randn(rows, out)
    exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
    kept = residual.clone()
    torch.testing.assert_close(linear(x).double(), exact, rtol=0, atol=3e-6)
    torch.testing.assert_close(linear.add_to(residual, x).double(), exact + residual, rtol=0, atol=5e-6)
    assert torch.equal(residual, kept)
    # In C the sums may replace what they are added to.
    numbers = residual.data_ptr(), x.data_ptr(), residual.data_ptr(), rows
    kernels.library.multiply(byref(linear.struct), *numbers)
    torch.testing.assert_close(residual.double(), exact + kept, rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("out", "size"), [(576, 192), (33, 3), (100, 35), (7, 8)])
def test_a_row_does_not_depend_on_the_others(
    out: int, size: int, dtype: torch.dtype, kernels: NativeKernels
) -> None:
    """To the last bit, however many there are."""
    weight = (torch.randn(out, size) * 0.02).to(dtype).float()
    linear = NativeLinear(kernels.library, [weight], torch.randn(out), half_scale([weight]))
    x, residual = torch.randn(30, size), torch.randn(30, out)
    alone = torch.cat([linear.add_to(residual[i : i + 1], x[i : i + 1]) for i in range(30)])
    for rows in range(1, 31):
        assert torch.equal(linear.add_to(residual[:rows], x[:rows]), alone[:rows])


@pytest.mark.usefixtures("one_thread_afterwards")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_does_not_depend_on_the_chunk(shape: AttentionShape, kernels: NativeKernels) -> None:
    """To the last bit, also of prompts that are cut, and however threads share heads and queries."""
    rotary: Any = TableOfAngles(shape.head_size, has_table=True)
    qkv = torch.randn(100, qkv_width(shape))
    attended = []
    for threads, size in product((1, 2, 5), (1, 5, 12, MAX_GROUPED_QUERIES, 100)):
        set_num_threads(threads)
        cache, parts = make_cache(shape), []
        for start in range(0, 100, size):
            chunk = qkv[start : start + size].clone()
            table = BlockTable()
            table.block_ids, table.num_computed_tokens = list(range(30, 55)), start
            batch = ForwardBatch.build([Span(table, [1] * len(chunk), 1)], BLOCK_SIZE, CPU)
            parts.append(kernels(batch, cache, rotary).attend(shape, chunk))
        attended.append(torch.cat(parts))
    for each in attended[1:]:
        assert torch.equal(each, attended[0])


def test_extreme_scores_and_broken_numbers(kernels: NativeKernels) -> None:
    """The largest score takes all without overflow, and NaN is not hidden."""
    shape = dataclasses.replace(SHAPES["a head for each"], scaling=1e4)
    rotary: Any = TableOfAngles(shape.head_size, has_table=True)
    parts = kernels(make_batch([(50, 2)]), make_cache(shape), rotary)
    qkv = torch.randn(2, 9 * 64)
    assert parts.attend(shape, qkv.clone()).isfinite().all()
    qkv[1, 0] = math.nan
    attended = parts.attend(shape, qkv).view(2, 3, 64)
    assert attended[1, 0].isnan().all()
    assert attended[0].isfinite().all()
    gate_up = torch.tensor([[math.nan, math.inf, -math.inf, 1e30, 1.0, 1.0, 1.0, 1.0]])
    for activation in ACTIVATIONS:
        gated = parts.gate(activation, gate_up)[0]
        assert gated[0].isnan()
        largest = {"clamped_swish": [2 * SWISH_LIMIT] * 2, "relu2": [math.inf] * 2}.get(
            activation, [math.inf, 1e30]
        )
        assert gated[[1, 3]].tolist() == pytest.approx(largest, rel=1e-4)
    assert parts.cap(gate_up, 5.0)[0, :4].tolist() == pytest.approx([math.nan, 5, -5, 5], nan_ok=True)


@pytest.mark.parametrize("native", [True, False])
def test_models_run_with_and_without(native: bool, tmp_path: Path, kernels: NativeKernels) -> None:
    path = save(CONFIGS["qwen3"], tmp_path)
    model = make_engine(path, None, native_kernels=native).target.model
    assert isinstance(model, FusedDecoder)
    assert model.is_native == native


@pytest.mark.parametrize(("dtype", "kept"), [("auto", torch.float16), ("float32", torch.float32)])
def test_sixteen_bits_are_kept_unless_float32_is_asked_for(
    dtype: str, kept: torch.dtype, tmp_path: Path, kernels: NativeKernels
) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = make_engine(str(tmp_path), None, dtype=dtype).target.model
    assert model.dtype == torch.float32
    assert isinstance(model, FusedDecoder)
    for linear in (model.weights.head, *(layer.mixer.qkv for layer in model.weights.layers)):
        assert isinstance(linear, NativeLinear)
        assert linear.weights.dtype == kept


def test_other_types_and_head_sizes_are_torchs() -> None:
    assert serves(torch.float32, CPU, 64)
    assert not serves(torch.float32, torch.device("cuda"), 64)
    assert not serves(torch.bfloat16, CPU, 64)
    assert not serves(torch.float32, CPU, 24)
    assert not serves(torch.float32, CPU, 1024)


def test_without_a_compiler_the_engine_runs_all_the_same(
    fresh_library: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(CONFIGS["llama"], tmp_path)
    for command, reason in ((None, "no C compiler"), ("false", "non-zero exit status")):
        if command is None:
            fresh_library.delenv("CC", raising=False)
            fresh_library.setattr(compiler.shutil, "which", lambda name: None)
        else:
            fresh_library.setenv("CC", command)
        library.load_library.cache_clear()
        model = make_engine(path, None).target.model
        assert isinstance(model, FusedDecoder)
        assert not model.is_native
        assert reason in caplog.text


def test_what_was_compiled_otherwise_is_not_taken(kernels: NativeKernels) -> None:
    assert library._key("cc") != library._key("cc -O1")


# Planted bugs: (what is right, what is wrong).
BUGS = {
    "sees the next token": ("row % num_queries + 1 - begin", "row % num_queries + 2 - begin"),
    "forgets to shrink": (" + i] * x.shrink[row];", " + i];"),
    "turns the wrong way": ("        x[i] = a * cos[i] + b", "        x[i] = a * cos[i] - b"),
    "adds no eps, halves the sum": ("sum / (float)size + eps", "sum / (float)size * 0.5f"),
    "gates with a sigmoid": ("out[i] = silu(gate[i]) * up[i]", "out[i] = silu(gate[i]) / gate[i] * up[i]"),
    "stores in the wrong slot": ("kind * spans->num_tokens + token]", "kind * spans->num_tokens]"),
}


def plant(sources: list[Path], right: str, wrong: str, folder: Path) -> list[Path]:
    """The C files, with one place changed in a copy of one of them."""
    (source,) = [path for path in sources if right in path.read_text()]
    text = source.read_text()
    assert text.count(right) == 1
    planted = folder / source.name
    planted.write_text(text.replace(right, wrong))
    return [planted if path == source else path for path in sources]


@pytest.mark.parametrize(("right", "wrong"), BUGS.values(), ids=BUGS)
def test_wrong_kernels_are_noticed_and_not_used(
    right: str, wrong: str, fresh_library: pytest.MonkeyPatch, tmp_path: Path, kernels: NativeKernels
) -> None:
    fresh_library.setattr(compiler, "SOURCES", plant(compiler.SOURCES, right, wrong, tmp_path))
    path = save(CONFIGS["llama"], tmp_path / "model")
    model = make_engine(path, None).target.model
    assert isinstance(model, FusedDecoder)
    assert not model.is_native
    assert logits_in_parts(model, list(range(sum(PARTS))), list(range(8))).isfinite().all()


def test_a_query_that_is_scored_twice_is_caught(fresh_library: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right, wrong = "queries[rows[0]], queries[rows[1]]", "queries[rows[0]], queries[rows[0]]"
    fresh_library.setattr(compiler, "SOURCES", plant(compiler.SOURCES, right, wrong, tmp_path))
    loaded = library.load_library()
    if loaded is None:
        pytest.skip("no C compiler")
    shape, rows = SHAPES["a head for each"], BATCHES["a prompt alone"]
    with pytest.raises(AssertionError):
        check_attention(shape, rows, TableOfAngles(shape.head_size, True), NativeKernels(loaded))


def test_wrong_linear_layers_are_noticed_and_not_used(
    fresh_library: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kernels: NativeKernels,
) -> None:
    """Nothing else is compared of families whose layers are transformers'."""
    assert linear_library() is not None
    library.load_library.cache_clear()
    sources = plant(compiler.SOURCES, "value += add[i];", "value -= add[i];", tmp_path)
    fresh_library.setattr(compiler, "SOURCES", sources)
    assert linear_library() is None
    assert "linear layers differ" in caplog.text


def test_no_openmp(kernels: NativeKernels) -> None:
    """OpenMP's threads would spin while the kernels' own work."""
    assert b"libgomp" not in Path(kernels.library._name).read_bytes()

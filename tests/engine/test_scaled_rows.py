"""Layers in 8-bit floating point as a GPU computes them, without one: torch multiplies such numbers on a CPU,
too."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import test_eight_bit, torch_block_kernels
from tests.engine.block_gates import rounds_rows
from tests.engine.test_eight_bit import FORMATS, IDS, VOCAB_SIZE
from tests.gguf_blocks import random_blocks
from tests.models import make_engine, run_engine, save_random_llama
from truedraft.engine.checkpoints.checkpoint import EMBEDDINGS, HEAD, Checkpoint
from truedraft.engine.checkpoints.quantise import ROUTERS, ScaledCheckpoint
from truedraft.engine.checkpoints.quantization import open_for_gpu
from truedraft.engine.cuda.quantised import BlockLinears
from truedraft.engine.cuda.scaled import DTYPE, ScaledLinear, is_right
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers.linear import TorchLinear
from truedraft.engine.layers.weight import ScaledRows, Weight
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models import fused, loader
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.identity import weight_types
from truedraft.engine.models.loader import load_model
from truedraft.engine.models.options import LoadOptions

CPU = torch.device("cpu")
SERVED = ("fp8, a scale of the tensor", "fbgemm", "compressed-tensors, rows", "compressed-tensors, tensor")
round_rows = torch_block_kernels.round_rows


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has the kernels of a GPU, by torch's operations, and none in C."""
    linears = partial(BlockLinears, torch_block_kernels, has_fp8=True)
    monkeypatch.setattr(fused, "find_linears", linears)
    monkeypatch.setattr(fused, "multiplies_bfloat16", lambda _: False)
    monkeypatch.setattr(fused, "_kernels", lambda *_: None)
    monkeypatch.setattr(loader, "multiplies_fp8", lambda *_: True)
    monkeypatch.setattr(loader, "_is_on_cpu", lambda _: False)
    monkeypatch.setattr(loader, "_keeps_blocks", lambda _: True)


def test_rows_are_rounded_by_their_largest_number() -> None:
    rounds_rows(torch_block_kernels)
    matrix = torch.tensor([[0.0, 0.0], [-448.0, 1.0], [1e-3, -2e-3]])
    rows = ScaledRows.of(matrix)
    assert rows.scales[1:].tolist() == pytest.approx([1.0, 2e-3 / 448])
    assert torch.allclose(rows.dense(), matrix, rtol=2**-4)
    again = ScaledRows.of(rows.dense())  # what is rounded already keeps its bits
    assert torch.equal(again.values.view(torch.uint8), rows.values.view(torch.uint8))


def test_products_are_those_of_rounded_numbers() -> None:
    torch.manual_seed(1)
    parts = [ScaledRows.of(torch.randn(n, 64)) for n in (32, 16)]
    bias, residual = torch.linspace(-1, 1, 48).to(DTYPE), torch.randn(5, 48).to(DTYPE)
    linear = ScaledLinear(round_rows, parts, bias, multiplier=0.5)
    x = torch.randn(5, 64).to(DTYPE)
    x[1] *= 1000  # each row has a scale of its own
    values, scales = round_rows(x)
    weights = torch.cat([part.dense() for part in parts]).double()
    expected = ((values.double() * scales[:, None]) @ weights.t() + bias) * 0.5
    size = expected.abs().amax(1, keepdim=True)
    assert linear(x).dtype == DTYPE
    assert bool(((linear(x) - expected).abs() <= 0.01 * size).all())
    assert bool(((linear.add_to(residual, x) - expected - residual).abs() <= 0.02 * (size + 1)).all())
    assert linear(x[:0]).shape == (0, 48)


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_the_check_at_load(factor: float) -> None:
    def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = round_rows(x)
        return values, scales * factor

    assert is_right(rounded, CPU) == (factor == 1)


def test_sizes_that_torch_does_not_multiply_become_dense() -> None:
    numbers = torch.randn(24, 64).to(DTYPE)
    weight = Weight("weight", (24, 64), lambda: numbers, scaled_rows=ScaledRows.of(numbers.float()))
    linears = BlockLinears(torch_block_kernels, DTYPE, CPU, has_fp8=True)
    assert isinstance(linears.make([weight], None), TorchLinear)


def test_quantize_fp8(tmp_path: Path, as_on_a_gpu: None) -> None:
    folder = save_random_llama(tmp_path, seed=1, vocab_size=48, hidden=64, std=0.15)
    exact = load_model(folder, LoadOptions(DTYPE))
    model = load_model(folder, LoadOptions(DTYPE, quantize="fp8"))
    assert isinstance(exact, FusedDecoder)
    assert isinstance(model, FusedDecoder)
    assert not exact.is_quantised
    assert model.is_quantised
    assert model.rounds_inputs
    assert weight_types(model) == ["float8_e4m3fn", "bfloat16"]
    assert isinstance(model.weights.head, TorchLinear)
    ours, theirs = (
        FreshModel(folder, LoadOptions(DTYPE, quantize=quantize)).logits(IDS[:20], 48).float()
        for quantize in ("fp8", "none")
    )
    assert 0 < (ours - theirs).square().mean().sqrt() < 0.2 * theirs.std()
    params = SamplingParams(max_tokens=12, temperature=0)
    core = make_engine(folder, "self:int4", dtype="bfloat16", quantize="none", num_speculative_tokens=2)
    assert core.draft is not None
    assert len(run_engine(core, [[1, 2, 3]], params)[0]) == 12


def test_what_is_not_rounded() -> None:
    """Embeddings, output layer, routers and stacks of experts stay; so does what is quantised already."""

    class Source(Checkpoint):
        def read(self, names: Any) -> dict[str, torch.Tensor]:
            return {
                name: torch.ones(2, 16, 16) if "experts" in name else torch.ones(16, 16) for name in names
            }

        def blocks(self, name: str) -> Any:
            return random_blocks("Q4_0", 16, 32, seed=1) if "down_proj" in name else None

    layer = "model.layers.0"
    rounded, *others = (
        f"{layer}.self_attn.q_proj.weight",
        EMBEDDINGS,
        HEAD,
        *map(f"{layer}{{}}".format, ROUTERS),
    )
    others += [f"{layer}.mlp.experts.gate_up_proj", f"{layer}.mlp.down_proj.weight"]
    checkpoint = ScaledCheckpoint(Source(dict.fromkeys((rounded, *others), "")))
    assert checkpoint.scaled_rows(rounded) is not None
    assert [name for name in others if checkpoint.scaled_rows(name) is not None] == []


@pytest.mark.parametrize("name", FORMATS)
def test_checkpoints(name: str, tmp_path: Path, as_on_a_gpu: None) -> None:
    """Weights with a scale for the tensor or for each row are multiplied as they are."""
    module = test_eight_bit.make(tmp_path, FORMATS[name])
    source = Checkpoint.find(str(tmp_path), allow_pickle=False)
    assert source is not None
    checkpoint = open_for_gpu(source, FORMATS[name].config, has_fp8=True)
    assert open_for_gpu(source, FORMATS[name].config, has_fp8=False) is None
    assert (checkpoint is not None) == (name in SERVED)
    if checkpoint is None:
        return
    weight_name = "model.layers.0.mlp.down_proj.weight"
    stored = source.read([weight_name])[weight_name]
    rows = checkpoint.scaled_rows(weight_name)
    assert rows is not None
    assert torch.equal(rows.values.view(torch.uint8), stored.view(torch.uint8))
    assert torch.equal(rows.dense(), checkpoint.read([weight_name])[weight_name])
    model = load_model(str(tmp_path), LoadOptions(DTYPE))
    assert isinstance(model, FusedDecoder)
    assert all(isinstance(layer.mlp.down, ScaledLinear) for layer in model.weights.layers)
    ours = FreshModel(str(tmp_path), LoadOptions(DTYPE)).logits(IDS, VOCAB_SIZE).float()
    expected = test_eight_bit.logits_of(module)
    assert (ours - expected).square().mean().sqrt() < 0.2 * expected.std()


def test_elsewhere_it_is_refused(tmp_path: Path) -> None:
    folder = save_random_llama(tmp_path, seed=1, vocab_size=48, hidden=64, std=0.15)
    with pytest.raises(ModelLoadError, match="cannot be quantised to fp8.*8.9.*int8"):
        load_model(folder, LoadOptions(DTYPE, quantize="fp8"))


def test_a_wrong_product_is_not_used(
    tmp_path: Path, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever asked for FP8 is told so; a checkpoint's weights become dense."""

    def wrong(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return round_rows(x.roll(1, 1))

    monkeypatch.setattr(torch_block_kernels, "round_rows", wrong)
    folder = save_random_llama(tmp_path / "dense", seed=1, vocab_size=48, hidden=64, std=0.15)
    with caplog.at_level(logging.WARNING), pytest.raises(ModelLoadError, match="cannot be quantised"):
        load_model(folder, LoadOptions(DTYPE, quantize="fp8"))
    assert "the logits differ" in caplog.text
    (tmp_path / "fp8").mkdir()
    test_eight_bit.make(tmp_path / "fp8", next(FORMATS[name] for name in FORMATS if "row" in name))
    model: Any = load_model(str(tmp_path / "fp8"), LoadOptions(DTYPE))
    assert not model.is_quantised

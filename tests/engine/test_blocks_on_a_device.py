"""Quantised weights as a GPU keeps them, without one: by torch's operations over the same memory, in Triton's
interpreter, and through its compiler."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from transformers import LlamaConfig

from tests.engine import block_gates, test_packed, torch_block_kernels
from tests.engine.graph_gates import graphs_of
from tests.engine.test_gguf import IDS, expected_logits, logits_in
from tests.engine.test_round_graphs import kernels_for
from tests.engine.test_triton_attention import needs_triton, run
from tests.gguf_blocks import random_blocks
from tests.gguf_models import save_gguf
from tests.models import make_engine, run_engine, save_random_llama
from tests.tape import TapeCapture
from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.checkpoints.quantization import open_for_gpu
from truedraft.engine.config import EngineConfig
from truedraft.engine.cuda import quantised
from truedraft.engine.cuda.blocks import COLUMNS, KINDS, pack
from truedraft.engine.cuda.quantised import (
    MAX_ROWS,
    BlockKernels,
    BlockLinears,
    PackedEmbeddings,
    PackedLinear,
    is_right,
)
from truedraft.engine.layers.linear import TorchLinear
from truedraft.engine.layers.quantised_blocks import TYPES, QuantisedBlocks
from truedraft.engine.layers.weight import Weight
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models import agreement, fused, options
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.identity import weight_types
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.rounds.capture import plan as plan_module

CPU = torch.device("cpu")
SERVED = [name for name, number in TYPES.items() if number in KINDS]
CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
)


@pytest.mark.parametrize("name", SERVED)
def test_repacked_weights_are_those_of_gguf_to_the_bit(name: str) -> None:
    block_gates.same_weights(torch_block_kernels, name)
    block_gates.same_products(torch_block_kernels, name, torch.bfloat16, rows=3)


def test_no_weight_takes_more_than_its_share() -> None:
    """A GPU reads these bytes in every pass; those of a file are as many, or an eighth of a bit fewer."""
    expected = {"Q2_K": 2.625, "Q3_K": 3.5625, "MXFP4": 4.25, "IQ4_XS": 4.3125, "IQ4_NL": 4.5, "Q4_0": 4.5}
    expected |= {"Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625, "Q8_0": 8.5}
    names = list(expected)
    packed = [pack(random_blocks(name, 2 * COLUMNS, 1024, seed=1), CPU) for name in names]
    bits = [8 * each.num_bytes / (each.rows * each.in_features) for each in packed]
    assert bits == list(expected.values())
    sizes = [gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] for name in names]
    assert all(0 <= mine - 8 * size / n <= 1 / 8 for mine, (n, size) in zip(bits, sizes, strict=True))


def test_rows_in_another_order() -> None:
    """llama.cpp orders queries and keys so."""
    order = torch.randperm(71).numpy()
    stored = random_blocks("Q4_K", 71, 256, seed=4)
    blocks = QuantisedBlocks(stored.type, stored.data, 256, order)
    ours = torch_block_kernels.unpack(pack(blocks, CPU), torch.float32, range(71))
    assert torch.equal(ours, block_gates.weights_of(blocks))


@pytest.mark.parametrize("has_residual", [False, True])
def test_many_rows_are_multiplied_by_unpacked_weights(
    has_residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They agree with few rows; parts of the weights are unpacked, one after the other."""
    monkeypatch.setattr(quantised, "UNPACKED", 256 * COLUMNS)
    parts = [pack(random_blocks(name, 100, 256, seed=5), CPU) for name in ("Q4_K", "Q6_K")]
    linear = PackedLinear(torch_block_kernels, parts, torch.linspace(-1, 1, 200), multiplier=0.5)
    x, residual = torch.randn(MAX_ROWS + 1, 256), torch.randn(MAX_ROWS + 1, 200)

    def product(rows: slice) -> torch.Tensor:
        return linear.add_to(residual[rows].clone(), x[rows]) if has_residual else linear(x[rows])

    together, halves = product(slice(None)), [product(slice(200)), product(slice(200, None))]
    assert torch.allclose(together, torch.cat(halves), atol=3e-3)


class WithoutKernelsInC:
    """Loads models as on a GPU, on a CPU: torch's operations stand in for the kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.backends: list[BlockLinears] = []
        monkeypatch.setattr(fused, "_kernels", lambda *_: None)
        self.stand_in(torch_block_kernels)

    def stand_in(self, kernels: BlockKernels) -> None:
        def find(dtype: torch.dtype, device: torch.device) -> BlockLinears:
            self.backends.append(BlockLinears(kernels, dtype, device))
            return self.backends[-1]

        self.patch.setattr(fused, "find_linears", find)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> WithoutKernelsInC:
    return WithoutKernelsInC(monkeypatch)


def save_mixed(path: Path) -> Any:
    return save_gguf(path, CONFIG, "Q4_K", value_kind="Q6_K", embedding_kind="Q5_0")


def test_a_file_stays_as_it_is(tmp_path: Path, as_on_a_gpu: WithoutKernelsInC) -> None:
    path = tmp_path / "model.gguf"
    expected = expected_logits(save_mixed(path))
    model = load_model(str(path), LoadOptions())
    assert isinstance(model, FusedDecoder)
    assert model.is_quantised
    assert not model.rounds_inputs
    embeddings, head = model.weights.embeddings, model.weights.head
    assert isinstance(embeddings, PackedEmbeddings)
    assert isinstance(head, PackedLinear)
    assert head.parts == [embeddings.packed]  # they are there once
    assert all(isinstance(linear, PackedLinear) for linear in model.weights.linears)
    assert weight_types(model) == ["Q4_K", "Q6_K", "Q5_0"]
    assert torch.allclose(logits_in(model, [len(IDS)]), expected, atol=2e-4, rtol=1e-4)
    # What is served is the reference of checks, which needs no other memory.
    assert FreshModel(str(path), LoadOptions()).served is not None


def test_float32_by_name_dequantises(tmp_path: Path, as_on_a_gpu: WithoutKernelsInC) -> None:
    save_mixed(tmp_path / "model.gguf")
    model = load_model(str(tmp_path / "model.gguf"), LoadOptions(compact_weights=False))
    assert isinstance(model, FusedDecoder)
    assert not model.is_quantised
    assert not as_on_a_gpu.backends


def test_16_bits_say_what_a_gpu_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "resolve_device", torch.device)
    monkeypatch.setattr(options, "resolve_dtype", lambda *_: torch.float32)
    for device, kept in (("cuda", {"auto", "bfloat16", "float16"}), ("cpu", {"auto"})):
        for dtype in ("auto", "float32", "bfloat16", "float16"):
            config = EngineConfig.model_validate({"target": "t", "device": device, "dtype": dtype})
            assert options.load_options(config).compact_weights == (dtype in kept)


def test_a_draft_of_the_targets_own_weights(tmp_path: Path, as_on_a_gpu: WithoutKernelsInC) -> None:
    folder = save_random_llama(tmp_path, seed=1, vocab_size=48, hidden=64, std=0.15)
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3)
    plain = run_engine(make_engine(folder, None), [[1, 2, 3]], params)
    core = make_engine(folder, "self:int4", num_speculative_tokens=3)
    assert run_engine(core, [[1, 2, 3]], params) == plain
    assert core.draft is not None
    assert weight_types(core.draft.model) == ["Q4_0", "Q8_0"]
    assert core.stats.num_accepted_tokens > core.stats.num_draft_tokens / 3


def test_captured_rounds_say_what_phases_say(
    tmp_path: Path, as_on_a_gpu: WithoutKernelsInC, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "model.gguf")
    save_mixed(Path(path))
    monkeypatch.setattr(plan_module, "make_capture", TapeCapture)
    monkeypatch.setattr(agreement, "find_kernels", kernels_for)
    settings: dict[str, Any] = {"native_kernels": False, "dtype": "auto", "num_speculative_tokens": 2}
    settings |= {"max_num_sequences": 2}
    cores = [make_engine(path, path, cuda_graphs=captured, **settings) for captured in (True, False)]
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3)
    texts = [run_engine(core, [IDS[:9], IDS[9:12]], params) for core in cores]
    assert texts[0] == texts[1]
    assert graphs_of(cores[0]).num_replays
    assert not graphs_of(cores[0]).num_misses


@pytest.mark.parametrize("name", list(test_packed.CHECKPOINTS)[:2])
def test_packed_checkpoints(name: str, tmp_path: Path, as_on_a_gpu: WithoutKernelsInC) -> None:
    module = test_packed.make(tmp_path, *test_packed.CHECKPOINTS[name])
    model = load_model(str(tmp_path), LoadOptions())
    assert isinstance(model, FusedDecoder)
    assert all(isinstance(layer.mlp.gate_up, PackedLinear) for layer in model.weights.layers)
    assert isinstance(model.weights.head, TorchLinear)
    served = FreshModel(str(tmp_path), LoadOptions())
    assert served.served is not None
    ids = test_packed.IDS
    assert torch.allclose(
        served.logits(ids, test_packed.VOCAB_SIZE), test_packed.logits_of(module), atol=2e-4, rtol=1e-4
    )


def test_other_layouts_are_left_to_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, is_symmetric = next(iter(test_packed.CHECKPOINTS.values()))
    test_packed.make(tmp_path, config, is_symmetric)
    source = Checkpoint.find(str(tmp_path), allow_pickle=False)
    assert source is not None
    assert open_for_gpu(source, config, has_fp8=False) is not None
    with caplog.at_level(logging.WARNING):
        assert open_for_gpu(source, config | {"bits": 3}, has_fp8=False) is None
    assert "left to transformers" in caplog.text


def wrong_products(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch_block_kernels.multiply(x.roll(1, 1), *others)


def wrong_weights(*given: Any) -> torch.Tensor:
    return torch_block_kernels.unpack(*given) * (1 + 2**-20)


def fails(*_: Any) -> torch.Tensor:
    raise RuntimeError("out of resource: shared memory")


BUGS: dict[str, dict[str, Callable[..., torch.Tensor]]] = {
    "wrong products": {"multiply": wrong_products},
    "wrong weights": {"unpack": wrong_weights},
    "a kernel that fails": {"multiply": fails},
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_kernel_is_not_used(
    bug: str, tmp_path: Path, as_on_a_gpu: WithoutKernelsInC, caplog: pytest.LogCaptureFixture
) -> None:
    kernels: Any = SimpleNamespace(
        **{"multiply": torch_block_kernels.multiply, "unpack": torch_block_kernels.unpack} | BUGS[bug]
    )
    as_on_a_gpu.stand_in(kernels)
    path = tmp_path / "model.gguf"
    expected = expected_logits(save_mixed(path))
    with caplog.at_level(logging.WARNING):
        model = load_model(str(path), LoadOptions())
    assert isinstance(model, FusedDecoder)
    assert not model.is_quantised
    assert "The kernel for Q4_K" in caplog.text
    assert torch.allclose(logits_in(model, [len(IDS)]), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_check_at_load_finds_it_right(dtype: torch.dtype) -> None:
    assert all(is_right(torch_block_kernels, TYPES[name], dtype, CPU) for name in SERVED)


def test_types_without_a_kernel_become_dense() -> None:
    numbers = torch.randn(64, 32)
    blocks = QuantisedBlocks(-1, random_blocks("Q4_0", 64, 32, seed=1).data, 32)
    weight = Weight("weight", (64, 32), lambda: numbers, blocks)
    linear = BlockLinears(torch_block_kernels, torch.float32, CPU).make([weight], None)
    assert isinstance(linear, TorchLinear)
    assert torch.equal(linear.weight, numbers)


@needs_triton
def test_in_the_interpreter() -> None:
    """Runs them in a process of their own, as triton must know before it is imported."""
    cases = "tests/engine/triton_block_cases.py"
    run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", cases, TRITON_INTERPRET="1")


@needs_triton
def test_compiles_for_gpus(tmp_path: Path) -> None:
    """Another process runs Triton's compiler, as the interpreter's variable must not be set."""
    module = "tests.engine.triton_block_compile"
    run("-m", module, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))

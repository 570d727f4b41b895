"""Caches in float16: which models have them, what is kept there, and that a token depends on nothing else."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.planners import loops_in_c
from tests.engine.test_native import BATCHES, SHAPES, TableOfAngles, make_batch, make_cache
from tests.models import make_engine, run_engine, save_perturbed, save_random_llama
from truedraft.engine.commands.check_weights import check_weights
from truedraft.engine.config import EngineConfig
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.layers.torch_run import TorchRun
from truedraft.engine.memory.batch import ForwardBatch
from truedraft.engine.memory.kv_cache import AttentionCache, KVCache, narrowed
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.identity import fingerprint
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.native.library import load_library
from truedraft.engine.native.native_run import NativeKernels, qkv_width

CPU = torch.device("cpu")
HALF = torch.float16
pytestmark = pytest.mark.usefixtures("needs_compiler")


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    library = load_library()
    assert library is not None
    return NativeKernels(library)


def attend(make_run: Any, shape: AttentionShape, batch: ForwardBatch, qkv: Any, dtype: Any) -> Any:
    """Returns the outputs and the cache, which held numbers of 16 bits before."""
    wide, heads = make_cache(shape), (shape.num_kv_heads, shape.head_size)
    values = None if shape.values_are_keys else heads
    cache = KVCache([AttentionCache(heads, values, dtype, CPU)], len(wide.keys[0]) // 4, 4)
    cache.keys[0].copy_(wide.keys[0].to(HALF))
    cache.values[0].copy_(wide.values[0].to(HALF))
    run = make_run(batch, cache, TableOfAngles(shape.head_size, has_table=True))
    return run.attend(shape, qkv.clone()), cache


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.norm is None])
@pytest.mark.parametrize("rows", ["beside a prompt", "a lone row"])
def test_numbers_of_16_bits_are_attended_as_in_float32(name: str, rows: str, kernels: NativeKernels) -> None:
    """To the bit, where new keys and values lose nothing: they are neither normed nor rotated."""
    shape, batch = replace(SHAPES[name], rotary=None), make_batch(BATCHES[rows])
    torch.manual_seed(5)
    width = qkv_width(shape)
    qkv = torch.randn(len(batch.slots), width).half().float()
    (half, stored), (wide, expected) = (
        attend(kernels, shape, batch, qkv, dtype) for dtype in (HALF, torch.float32)
    )
    assert torch.equal(half, wide)
    assert torch.equal(stored.keys[0].float(), expected.keys[0])
    assert torch.equal(stored.values[0].float(), expected.values[0])
    by_torch, _ = attend(TorchRun, shape, batch, qkv, HALF)
    torch.testing.assert_close(by_torch, wide, rtol=1e-4, atol=2e-5)
    # Numbers between those of float16 are rounded to them, by both in the same way.
    qkv = torch.randn(len(batch.slots), width)
    ours, theirs = (attend(run, shape, batch, qkv, HALF)[1] for run in (kernels, TorchRun))
    assert torch.equal(ours.keys[0], theirs.keys[0])
    assert torch.equal(ours.values[0], theirs.values[0])


def test_what_is_too_large_is_the_largest(kernels: NativeKernels) -> None:
    given = torch.tensor([65504.0, 65519.0, 65520.0, -1e6, 3e38, float("inf"), -float("inf"), float("nan")])
    expected = torch.tensor([65504.0, 65504, 65504, -65504, 65504, float("inf"), -float("inf"), float("nan")])
    assert torch.equal(narrowed(given, HALF).nan_to_num(nan=1), expected.half().nan_to_num(nan=1))
    shape, batch = replace(SHAPES["a head of 16"], rotary=None), make_batch([(0, 1)])
    qkv = torch.zeros(1, 6 * 16)
    qkv[0, 64:72] = given
    for run in (kernels, TorchRun):
        _, cache = attend(run, shape, batch, qkv, HALF)
        stored = cache.keys[0][batch.slots[0], 0, :8]
        assert torch.equal(stored.nan_to_num(nan=1), expected.half().nan_to_num(nan=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The checkpoint is in float32, and its weights need it."""
    return save_random_llama(tmp_path_factory.mktemp("models") / "target", seed=1, hidden=64)


@pytest.fixture(scope="module")
def halves(folder: str) -> str:
    path = f"{folder}-16"
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(path)
    return path


def load(path: str, **options: Any) -> FusedDecoder:
    model = load_model(path, LoadOptions(**options))
    assert isinstance(model, FusedDecoder)
    return model


def test_caches_have_the_bits_that_weights_have(folder: str, halves: str) -> None:
    assert load(folder).cache_dtype == torch.float32
    assert load(folder, quantize="int8").cache_dtype == HALF
    assert load(halves).cache_dtype == HALF
    assert load(halves, compact_weights=False).cache_dtype == torch.float32
    assert load(halves, cache_dtype="float32").cache_dtype == torch.float32
    model = load(folder, cache_dtype="float16")
    assert model.cache_dtype == HALF
    assert model.cache_bytes_per_token * 2 == load(folder).cache_bytes_per_token
    assert fingerprint(model, EngineConfig(target=folder)) != fingerprint(
        load(folder), EngineConfig(target=folder)
    )


def test_what_cannot_have_them_is_refused(folder: str) -> None:
    for options, words in (
        ({"device": torch.device("cuda")}, "on a GPU caches have the model's type"),
        (
            {"dtype": torch.bfloat16, "native_kernels": False},
            "the model is computed in bfloat16: leave it out",
        ),
    ):
        with pytest.raises(ModelLoadError, match=words):
            load_model(folder, LoadOptions(cache_dtype="float16", **options))


def test_values_that_do_not_fit_are_found_at_load(
    halves: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module: Any = AutoModelForCausalLM.from_pretrained(halves, dtype=torch.bfloat16)
    for layer in module.model.layers:
        layer.self_attn.v_proj.weight.data *= 2.0**20
        layer.self_attn.o_proj.weight.data /= 2.0**20
    module.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load(str(tmp_path)).cache_dtype == torch.float32
    assert "do not fit into float16" in caplog.text
    with pytest.raises(ModelLoadError, match="set cache_dtype to float32"):
        load(str(tmp_path), cache_dtype="float16")


@pytest.mark.parametrize("kernels", [True, False], ids=["C", "torch"])
def test_speculation_preemption_and_hits_change_no_token(folder: str, kernels: bool, tmp_path: Path) -> None:
    draft = save_perturbed(tmp_path, folder, seed=2, noise=0.02)
    settings = {"cache_dtype": "float16", "native_kernels": kernels}
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=3)
    prompts = [[(7 * i + i // 3 + text // 2) % 16 for i in range(30 + 7 * text)] for text in range(5)]
    plain = make_engine(folder, None, **settings)
    alone = [run_engine(plain, [prompt], params)[0] for prompt in prompts]
    # Both caches hold about two of the texts.
    pair = make_engine(folder, draft, cache_memory=2 * 44 * 4 * 2 * 2 * 32 * 2, **settings)
    assert loops_in_c(pair) == kernels
    assert run_engine(pair, prompts, params) == alone
    assert pair.scheduler.num_preemptions > 0
    assert pair.stats.num_accepted_tokens > pair.stats.num_draft_tokens / 5
    assert run_engine(pair, [prompts[0]], params) == alone[:1]  # its beginning may be there


def test_the_price_is_reported(halves: str) -> None:
    options = LoadOptions()
    target = FreshModel(halves, options)
    assert target.served is not None
    result = check_weights(target, halves, options, None)
    assert result is not None
    assert result.wide_cache is not None
    assert 0 < abs(result.served - result.wide_cache) < 0.01
    assert f"with caches in float32 {result.wide_cache:.4f}" in result.in_words
    assert target.served.cache_dtype == HALF
    assert FreshModel(halves, LoadOptions(cache_dtype="float32")).served is None

"""Linear layers that multiply in bfloat16: exact but for the rounding, whatever is computed with a row."""

from ctypes import CDLL
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.engine.native_pair import make_twins, save_pair
from tests.engine.test_llama import CONFIGS, logits_in_parts, save
from tests.models import make_engine, run_engine
from truedraft.engine.layers.linear import DenseEmbeddings
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.native.library import load_library
from truedraft.engine.native.linear import NativeLinear
from truedraft.engine.native.threads import set_num_threads

BFLOAT16 = LoadOptions(torch.bfloat16)
# Rounding a number to eight bits changes it by this share at most.
ROUNDING = 2.0**-8


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(12)


@pytest.fixture(scope="module")
def library() -> CDLL:
    loaded = load_library()
    if loaded is None or not loaded.multiplies_bfloat16():
        pytest.skip("no kernels that multiply in bfloat16")
    return loaded


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 12, 13, 70])
@pytest.mark.parametrize(("out", "size"), [(64, 48), (100, 33), (1, 200), (33, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_products_are_those_of_rounded_numbers(
    out: int, size: int, rows: int, bias: bool, dtype: torch.dtype, library: CDLL
) -> None:
    weights = list((torch.randn(out, size) * 0.02).to(dtype).split(-(-out // 2)))
    added = torch.randn(out) if bias else None
    linear = NativeLinear(library, weights, added, None, bf16=True)
    x, residual = torch.randn(rows, size), torch.randn(rows, out)
    weight = torch.cat(weights)
    rounded = F.linear(
        x.bfloat16().double(), weight.bfloat16().double(), None if added is None else added.double()
    )
    torch.testing.assert_close(linear(x).double(), rounded, rtol=0, atol=3e-6)
    torch.testing.assert_close(linear.add_to(residual, x).double(), rounded + residual, rtol=0, atol=5e-6)
    exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
    sizes = F.linear(x.double().abs(), weight.double().abs())
    assert ((linear(x) - exact).abs() <= 2.01 * ROUNDING * sizes + 3e-6).all()


@pytest.mark.usefixtures("one_thread_afterwards")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("out", "size"), [(576, 192), (33, 3), (100, 35), (2000, 512)])
def test_a_row_does_not_depend_on_the_others(out: int, size: int, threads: int, library: CDLL) -> None:
    """To the last bit, for any number of rows and threads."""
    linear = NativeLinear(library, [torch.randn(out, size) * 0.02], torch.randn(out), None, bf16=True)
    x, residual = torch.randn(100, size), torch.randn(100, out)
    alone = torch.cat([linear.add_to(residual[i : i + 1], x[i : i + 1]) for i in range(100)])
    set_num_threads(threads)
    for rows in (*range(1, 31), 64, 100):
        assert torch.equal(linear.add_to(residual[:rows], x[:rows]), alone[:rows])


def test_broken_and_extreme_numbers_are_not_hidden(library: CDLL) -> None:
    linear = NativeLinear(library, [torch.eye(40)], None, None, bf16=True)
    x = torch.zeros(3, 40)
    x[0, 5], x[1, 7], x[2, 9] = torch.nan, torch.inf, 3e38
    said = linear(x)
    assert said[0].isnan().all()
    assert said[1, 7] == torch.inf
    assert said[2, 9] == pytest.approx(3e38, rel=ROUNDING)


@pytest.mark.parametrize("name", CONFIGS)
def test_models_multiply_in_bfloat16_where_it_is_asked_for(name: str, tmp_path: Path, library: CDLL) -> None:
    path = save(CONFIGS[name], tmp_path)
    model = load_model(path, BFLOAT16)
    assert isinstance(model, FusedDecoder)
    assert (model.is_native, model.dtype, model.arithmetic) == (True, torch.float32, torch.bfloat16)
    for linear in (model.weights.head, *(layer.mixer.qkv for layer in model.weights.layers)):
        assert isinstance(linear, NativeLinear)
        assert linear.dtype == torch.bfloat16
    assert isinstance(model.weights.embeddings, DenseEmbeddings)
    assert model.weights.embeddings.weight.dtype == torch.bfloat16
    ids = list(range(40))
    exact = logits_in_parts(load_model(path, LoadOptions()), ids, list(range(16)))
    said = logits_in_parts(model, ids, list(range(16)))
    assert 1e-4 < (said - exact).norm() / (exact - exact.mean()).norm() < 0.1
    fresh = FreshModel(path, BFLOAT16)
    assert torch.equal(
        fresh.logits(ids, model.vocab_size), FreshModel(path, BFLOAT16).logits(ids, model.vocab_size)
    )
    assert fresh.served is not None


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_the_same_with_and_without_drafts(temperature: float, tmp_path: Path) -> None:
    """Rounds in C and phases, prompts whole and in chunks; samples by ``coupled`` draws."""
    pair = save_pair(tmp_path)
    prompts = [[(7 * i * i + row) % 40 for i in range(3 + 25 * row)] for row in range(4)]
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=5, verification="coupled")
    plain = make_engine(pair[0], None, dtype="bfloat16", num_speculative_tokens=0)
    expected = run_engine(plain, prompts, params)
    for length in (1, 4, 8):
        for core in make_twins(
            *pair, dtype="bfloat16", num_speculative_tokens=length, max_num_batched_tokens=48
        ):
            assert core.target.model.bf16_linears
            assert core.draft is not None
            assert core.draft.model.bf16_linears
            assert run_engine(core, prompts, params) == expected
            assert 0 < core.stats.num_accepted_tokens < core.stats.num_draft_tokens


def test_a_target_in_bfloat16_drafts_for_itself_in_fewer_bits(tmp_path: Path, library: CDLL) -> None:
    path = save(CONFIGS["llama"], tmp_path)
    core = make_engine(path, "self:int8", dtype="bfloat16")
    assert core.draft is not None
    assert isinstance(core.draft.model, FusedDecoder)
    assert (core.target.model.bf16_linears, core.draft.model.is_quantised) == (True, True)


def test_checkpoints_of_sixteen_bits_are_rounded_like_the_same_in_float32(
    tmp_path: Path, library: CDLL
) -> None:
    models = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(4)
        module = AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.float32).bfloat16().to(dtype)
        module.save_pretrained(tmp_path / str(dtype))
        models.append(load_model(str(tmp_path / str(dtype)), BFLOAT16))
    ids = list(range(40))
    assert torch.equal(*(logits_in_parts(model, ids, list(range(16))) for model in models))


def test_elsewhere_torch_computes_and_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, library: CDLL
) -> None:
    path = save(CONFIGS["llama"], tmp_path)
    assert load_model(path, BFLOAT16).bf16_linears
    assert not caplog.records
    for settings in ({"native_kernels": False}, {}):
        if not settings:
            monkeypatch.setattr(library, "multiplies_bfloat16", lambda: 0)
        caplog.clear()
        model = load_model(path, replace(BFLOAT16, **settings))
        assert (model.bf16_linears, model.dtype, model.arithmetic) == (False, torch.bfloat16, torch.bfloat16)
        assert "bfloat16 is left to torch" in caplog.text

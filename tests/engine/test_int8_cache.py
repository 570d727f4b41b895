"""Caches in int8: what is kept and read, each token by its own scale, and that a token depends on nothing
else."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from tests.engine.conftest import Models
from tests.engine.head_runs import save_small_hybrid
from tests.engine.planners import loops_in_c
from tests.engine.test_hybrids import few_slots
from tests.engine.test_native import BATCHES, SHAPES, TableOfAngles, make_batch, make_cache
from tests.families import FAMILIES, SHAPE, save_random
from tests.heads import Shape, random_head, save_head
from tests.hybrids import HYBRIDS
from tests.models import make_engine, outputs_by_choice, run_engine, save_perturbed, save_random_llama
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.embedding.load import load_vectors
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers import attention
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.layers.torch_run import TorchRun
from truedraft.engine.memory.batch import ForwardBatch, Span
from truedraft.engine.memory.kv_cache import AttentionCache, KVCache, quantised, widened
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions, load_options
from truedraft.engine.native.library import load_library
from truedraft.engine.native.native_run import NativeKernels, qkv_width
from truedraft.engine.rounds.round import RoundRunner

CPU = torch.device("cpu")
INT8 = torch.int8
VOCAB_SIZE = 16
pytestmark = pytest.mark.usefixtures("needs_compiler")


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    library = load_library()
    assert library is not None
    return NativeKernels(library)


def attend(make_run: Any, shape: AttentionShape, batch: ForwardBatch, qkv: torch.Tensor, dtype: Any) -> Any:
    """Returns the outputs and the cache, which held before what int8 keeps of some numbers."""
    wide, heads = make_cache(shape), (shape.num_kv_heads, shape.head_size)
    # Heads of tokens are of different sizes: another one's scale shows.
    sizes = torch.rand(len(wide.keys[0]), shape.num_kv_heads, 1, generator=torch.Generator().manual_seed(3))
    kept = [quantised(part * (4 * sizes).exp() / 8) for part in (wide.keys[0], wide.values[0])]
    cache = KVCache(
        [AttentionCache(heads, None if shape.values_are_keys else heads, dtype, CPU)], len(sizes) // 4, 4
    )
    for part, numbers in zip((cache.keys[0], cache.values[0]), kept, strict=True):
        part.copy_(numbers if dtype == INT8 else widened(numbers, dtype))
    run = make_run(batch, cache, TableOfAngles(shape.head_size, has_table=True))
    return run.attend(shape, qkv.clone()), cache


def kept_in_float32(shape: AttentionShape, qkv: torch.Tensor) -> torch.Tensor:
    """Rounds keys and values to what int8 keeps of them."""
    heads = qkv.view(len(qkv), -1, shape.head_size).clone()
    heads[:, shape.num_heads :] = widened(quantised(heads[:, shape.num_heads :]), torch.float32)
    return heads.flatten(1)


def is_attended_as_in_float32(make_run: Any, shape: AttentionShape, batch: ForwardBatch) -> None:
    qkv = torch.randn(len(batch.slots), qkv_width(shape), generator=torch.Generator().manual_seed(5))
    # Heads of new tokens are of different sizes, too.
    qkv *= torch.rand(len(qkv), 1, generator=torch.Generator().manual_seed(6)) * 4
    ours, _ = attend(make_run, shape, batch, qkv, INT8)
    wide, _ = attend(make_run, shape, batch, kept_in_float32(shape, qkv), torch.float32)
    torch.testing.assert_close(ours, wide, rtol=1e-4, atol=2e-5)


PLAIN = {
    name: replace(shape, rotary=None)
    for name, shape in SHAPES.items()
    if shape.norm is None and not shape.gated
}


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("name", PLAIN)
def test_attention_is_that_of_the_numbers_kept(name: str, rows: str, kernels: NativeKernels) -> None:
    shape, batch = PLAIN[name], make_batch(BATCHES[rows])
    for make_run in (kernels, TorchRun):
        is_attended_as_in_float32(make_run, shape, batch)
    qkv = torch.randn(len(batch.slots), qkv_width(shape))
    (_, ours), (_, theirs) = (attend(run, shape, batch, qkv, INT8) for run in (kernels, TorchRun))
    assert torch.equal(ours.keys[0], theirs.keys[0])
    assert torch.equal(ours.values[0], theirs.values[0])


@pytest.mark.parametrize("rows", BATCHES)
def test_a_row_has_its_bits_whatever_is_computed_beside_it(rows: str, kernels: NativeKernels) -> None:
    """A text's last token attends as it does alone, also where others' keys are turned over."""
    for shape in PLAIN.values():
        batch = make_batch(BATCHES[rows])
        qkv = torch.randn(len(batch.slots), qkv_width(shape))
        together, cache = attend(kernels, shape, batch, qkv, INT8)
        for span, end in zip(batch.spans, batch.offsets[1:], strict=True):
            span.table.num_computed_tokens = span.end - 1
            lone = ForwardBatch.build([Span(span.table, [1], 1)], 4, CPU)
            run = kernels(lone, cache, TableOfAngles(shape.head_size, has_table=True))
            assert torch.equal(run.attend(shape, qkv[end - 1 : end].clone())[0], together[end - 1])


def test_a_head_has_the_127th_of_its_largest_number_as_its_unit() -> None:
    x = torch.randn(500, 3, 32) * torch.randn(500, 3, 1).exp()
    kept = quantised(x)
    assert kept.shape == (500, 3, 36)
    largest = x.abs().amax(-1, keepdim=True)
    assert ((widened(kept, torch.float32) - x).abs() <= largest * (1.0001 / 254)).all()
    # Another scale, or none, is far away.
    wrong = kept.clone()
    wrong[..., -4:] = kept.roll(1, 0)[..., -4:]
    assert not ((widened(wrong, torch.float32) - x).abs() <= largest * (1.0001 / 254)).all()


UNUSUAL = {
    "zeros": [0.0, -0.0],
    "below all normal numbers": [1e-39, -3e-42],
    "a scale below all normal numbers": [1e-37, -1e-37],
    "the largest numbers": [3.4028234e38, -3.4028234e38, 1e38],
    "halves": [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5],
    "infinity": [1.0, float("inf")],
    "no number": [1.0, float("nan"), 7.0],
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_numbers(name: str, kernels: NativeKernels) -> None:
    """What is not finite is not finite when it is read; what is too small is zero."""
    shape, batch = replace(SHAPES["a head of 16"], rotary=None), make_batch([(0, 1)])
    qkv = torch.zeros(1, 6 * 16)
    given = torch.tensor(UNUSUAL[name])
    qkv[0, 64 : 64 + len(given)] = given
    found = [
        attend(run, shape, batch, qkv, INT8)[1].keys[0][batch.slots[0], 0] for run in (kernels, TorchRun)
    ]
    for kept in found:
        read = widened(kept, torch.float32)
        if given.isfinite().all():
            assert (read[: len(given)] - given).abs().max() <= given.abs().max() * (1.0001 / 254) + 2e-36
            assert not read[len(given) :].any()
        else:
            assert not read.isfinite().any()
    ours, theirs = (widened(kept, torch.float32).nan_to_num(nan=7) for kept in found)
    assert torch.equal(ours, theirs)


@dataclass
class Kind:
    """Is a pair of some kind of model, and how it drafts."""

    target: str
    draft: str | None
    config: dict[str, Any] = field(default_factory=dict)

    def engine(self, draft: str | None, **config: Any) -> EngineCore:
        method = self.config if draft else {}
        return make_engine(self.target, draft, **{"cache_dtype": "int8", **method, **config})


FAMILY_OF = {
    "windows": "Gemma 3 in C",
    "windows and sinks": "GPT-OSS in C",
    "latent": "DeepSeek-V3 in C",
    "layers that share keys": "Gemma 4 E in C",
    "heads of 8, by torch": "Gemma 3",
}
HYBRID_OF = {"Gated DeltaNet": "Qwen3.5, two value heads for each key head", "Mamba 2": "Granite 4 H"}
KINDS = ("dense", "dense by torch", *FAMILY_OF, *HYBRID_OF, "n-grams", "MTP head", "EAGLE head")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Is a target whose heads are large enough for the kernels in C."""
    return save_random_llama(tmp_path_factory.mktemp("wide") / "target", 1, hidden=64)


@pytest.fixture(scope="module")
def kinds(models: Models, wide: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kind]:
    def make(name: str) -> Kind:
        folder = tmp_path_factory.mktemp("kind")
        if name == "dense by torch":
            return Kind(models.target, models.close_draft)
        if name == "dense":
            return Kind(wide, save_perturbed(folder / "draft", wide, 2, 0.02))
        if name == "n-grams":
            return Kind(wide, "none", {"method": "ngram", "ngram_min_match": 1})
        if name == "MTP head":
            return Kind(save_small_hybrid(folder / "target"), "mtp", {"method": "mtp"})
        if name == "EAGLE head":
            target = save_random_llama(folder / "target", 1, layers=5, hidden=64, std=0.2)
            head = save_head(folder / "head", random_head(Shape(64, VOCAB_SIZE), target))
            return Kind(target, head, {"method": "eagle"})
        model_type, config = FAMILIES[FAMILY_OF[name]] if name in FAMILY_OF else HYBRIDS[HYBRID_OF[name]]
        target = save_random(folder / "target", model_type, SHAPE | config)
        return Kind(target, save_perturbed(folder / "draft", target, 2, 0.02))

    return make


def text(number: int, length: int) -> list[int]:
    return [(5 * i * i + i + 7 * number) % VOCAB_SIZE for i in range(length)]


# Some of these texts begin alike.
PROMPTS = [text(1, 64), text(1, 97), [*text(1, 64), *text(2, 33)], text(3, 81), text(4, 5)]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=temperature, seed=seed)
    for seed, temperature in enumerate((0.0, 0.9, 1.2, 0.0, 1.0))
]


@pytest.mark.parametrize("name", KINDS)
def test_nothing_but_its_text_decides_a_token(kinds: Callable[[str], Kind], name: str) -> None:
    """Alone = in company = in other chunks = after a preemption = after a hit, with drafts and without."""
    kind = kinds(name)
    alone = kind.engine(None, prefix_caching=False)
    model = alone.target.model
    assert isinstance(model, FusedDecoder)
    assert (model.is_native, model.cache_dtype) == (not name.endswith("by torch"), INT8)
    expected = [run_engine(alone, [prompt], each)[0] for prompt, each in zip(PROMPTS, PARAMS, strict=True)]
    for draft, num_tokens in product((None, kind.draft), (8, 40)):
        core = kind.engine(draft, max_num_batched_tokens=num_tokens)
        assert run_engine(core, PROMPTS, PARAMS, [0, 3, 9, 14, 20]) == expected, (draft, num_tokens)
        found = core.scheduler.num_prefix_hits
        assert run_engine(core, [PROMPTS[1]], PARAMS[1]) == [expected[1]]
        assert core.scheduler.num_prefix_hits > found
    assert core.stats.num_draft_tokens > 0
    # Two of the longest texts have no room together.
    has_states = alone.scheduler.target_pool.states is not None
    size = {} if has_states else {"cache_memory": 44 * 4 * model.cache_bytes_per_token}
    small = kind.engine(None, **size)
    if has_states:
        few_slots(small, 5, num_blocks=44)
    assert run_engine(small, PROMPTS, PARAMS) == expected
    assert small.scheduler.num_preemptions > 0


def test_a_prediction_drafts(wide: str) -> None:
    params = structs.replace(PARAMS[1], max_tokens=40)
    plain = make_engine(wide, None, cache_dtype="int8")
    expected = run_engine(plain, [PROMPTS[1]], params)[0]
    core = make_engine(wide, None, cache_dtype="int8", method="auto")
    core.add(Generate("0", PROMPTS[1], params, prediction_token_ids=[*expected[:20], 3, *expected[21:]]))
    assert outputs_by_choice(core)["0", 0] == expected
    assert core.stats.drafts["prediction"].num_accepted_tokens > 10


def test_choices_share_a_prompt(wide: str) -> None:
    """Blocks are copied where several choices go on from one that isn't full."""
    plain = make_engine(wide, None, cache_dtype="int8", prefix_caching=False)
    core = make_engine(wide, wide, cache_dtype="int8")
    core.add(Generate("0", PROMPTS[1], PARAMS[1], n=4))
    together = outputs_by_choice(core)
    plain.add(Generate("0", PROMPTS[1], PARAMS[1], n=4))
    assert together == outputs_by_choice(plain)
    assert len({tuple(tokens) for tokens in together.values()}) > 1


@pytest.mark.parametrize(
    ("cache_dtype", "draft_cache_dtype", "expected"),
    [
        ("int8", "auto", (INT8, INT8)),
        ("int8", "float16", (INT8, torch.float16)),
        ("auto", "int8", (torch.float32, INT8)),
    ],
)
@pytest.mark.parametrize("name", ["dense", "MTP head", "EAGLE head"])
def test_a_draft_may_have_another_type(
    kinds: Callable[[str], Kind],
    name: str,
    cache_dtype: str,
    draft_cache_dtype: str,
    expected: tuple[Any, Any],
) -> None:
    kind = kinds(name)
    plain = kind.engine(None, cache_dtype=cache_dtype)
    core = kind.engine(kind.draft, cache_dtype=cache_dtype, draft_cache_dtype=draft_cache_dtype)
    assert isinstance(core.runner, RoundRunner)
    ((drafting,),) = (proposer.runners for proposer in core.runner.proposers)
    assert (core.target.model.cache_dtype, drafting.model.cache_dtype) == expected
    assert run_engine(core, PROMPTS, PARAMS) == run_engine(plain, PROMPTS, PARAMS)


# Keys and values of two layers with two heads each.
NUM_HEADS = 2 * 2 * 2


def test_a_token_takes_a_byte_for_each_number_and_four_for_each_head(wide: str) -> None:
    of_half, of_int8 = (
        make_engine(wide, None, cache_dtype=kind, cache_memory=100_000) for kind in ("float16", "int8")
    )
    bytes_per_token = of_half.target.model.cache_bytes_per_token, of_int8.target.model.cache_bytes_per_token
    assert bytes_per_token == (NUM_HEADS * 16 * 2, NUM_HEADS * (16 + 4))
    for core, size in zip((of_half, of_int8), bytes_per_token, strict=True):
        num_blocks = core.scheduler.target_pool.num_blocks
        assert num_blocks == 100_000 // (4 * size)
        assert core.target.cache.num_bytes == num_blocks * 4 * size


def test_rounds_stay_in_c(wide: str) -> None:
    assert loops_in_c(make_engine(wide, wide, cache_dtype="int8"))


def test_what_cannot_have_it_is_refused(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelLoadError, match="cache_dtype is int8, but on a GPU"):
        load_model(models.target, LoadOptions(device=torch.device("cuda"), cache_dtype="int8"))
    with pytest.raises(ModelLoadError, match="cache_dtype is int8, but the model is computed in bfloat16"):
        load_model(models.target, LoadOptions(dtype=torch.bfloat16, native_kernels=False, cache_dtype="int8"))
    unfused = save_random(tmp_path / "gpt2", *FAMILIES["GPT-2"])
    with pytest.raises(ModelLoadError, match="leave out cache_dtype, which is int8"):
        load_model(unfused, LoadOptions(cache_dtype="int8"))
    with pytest.raises(ModelLoadError, match="does not write text"):
        load_vectors(EngineConfig(target=models.target, device="cpu", cache_dtype="int8"), "embed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ModelLoadError, match="draft_cache_dtype is int8, but on a GPU"):
        load_options(EngineConfig(device="cuda", draft_cache_dtype="int8", dtype="float32"))


def scale_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    honest = attention.widened

    def shifted(kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        kept = kept.clone()
        if kept.dtype == INT8:
            kept[..., -4:] = kept[..., -4:].roll(1, -2)
        return honest(kept, dtype)

    patch.setattr(attention, "widened", shifted)


def one_scale_for_all_heads(patch: pytest.MonkeyPatch) -> None:
    honest = attention.widened

    def spread(kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        kept = kept.clone()
        if kept.dtype == INT8:
            kept[..., -4:] = kept[:, :1, :, -4:]
        return honest(kept, dtype)

    patch.setattr(attention, "widened", spread)


@pytest.mark.parametrize("plant", [scale_of_the_neighbour, one_scale_for_all_heads])
def test_planted_bugs_are_seen(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, batch = PLAIN["shared heads"], make_batch(BATCHES["scoring"])
    is_attended_as_in_float32(TorchRun, shape, batch)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        is_attended_as_in_float32(TorchRun, shape, batch)

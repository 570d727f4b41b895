"""LoRA adapters in the engine: each row gets its own, to the bit, whatever is computed with it."""

import ctypes
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.adapters import SHAPE, named, save_adapter, written
from tests.heads import Shape, random_head, save_head
from tests.models import make_engine, save_perturbed, save_random_llama
from truedraft.engine.checkpoints.quantise import quantised_to_four_bits
from truedraft.engine.config import BUNDLED_PAIR
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.layers.adapters import LowRank, Part, Place, part_of
from truedraft.engine.layers.weight import ScaledBytes, Weight
from truedraft.engine.llm import LLM
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import Adapter, Generate, SamplingParams
from truedraft.engine.models import adapters as models_adapters
from truedraft.engine.models.adapters import AdapterTable
from truedraft.engine.native.adapters import NativeAdapters
from truedraft.engine.native.library import load_library
from truedraft.engine.native.linear import NativeLinear
from truedraft.engine.native.linears import NativeLinears

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
# A family, and the modules that are adapted.
FAMILIES: dict[str, tuple[PreTrainedConfig, list[str]]] = {
    "llama, biases, output": (
        LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
        [*ATTENTION, *MLP, "lm_head"],
    ),
    "phi 3, joined modules": (Phi3Config(**SHAPE), ["qkv_proj", "gate_up_proj", "o_proj"]),
    "gemma 2, norms after": (
        Gemma2Config(**SHAPE, head_dim=32, tie_word_embeddings=False),
        [*ATTENTION, *MLP],
    ),
    "qwen 3, some": (Qwen3Config(**SHAPE, head_dim=16), ["v_proj", "down_proj"]),
    "qwen 3 next, gates, a state, a shared expert": (
        Qwen3NextConfig(
            **SHAPE,
            head_dim=32,
            partial_rotary_factor=0.25,
            layer_types=["linear_attention", "full_attention"],
            linear_conv_kernel_dim=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
        [*ATTENTION, "shared_expert_gate", "in_proj_qkvz", "in_proj_ba", "out_proj"],
    ),
    "qwen 3 experts, attention": (
        Qwen3MoeConfig(**SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        ATTENTION,
    ),
}
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [*range(10, 50)], [11]]
GREEDY = SamplingParams(max_tokens=10, temperature=0, logprobs=0)
BACKENDS = {"C": {}, "torch": {"native_kernels": False}, "C, 16 bits": {"dtype": "auto"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_random_llama(tmp_path_factory.mktemp("base"), 1, vocab_size=96, hidden=64)


@pytest.fixture(scope="module")
def modules(base: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two adapters of one base that change different modules, as ``lora_modules``."""
    folder = tmp_path_factory.mktemp("adapters")
    one = save_adapter(folder / "one", base, [*ATTENTION, *MLP], 1)
    two = save_adapter(
        folder / "two", base, ["q_proj", "o_proj", "up_proj", "lm_head"], 2, 3, use_rslora=True
    )
    return [f"one={one}", f"two={two}"]


@pytest.mark.filterwarnings("ignore")  # PEFT warns of patterns for other families
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_the_merged_checkpoint(family: str, backend: str, tmp_path: Path) -> None:
    """PEFT makes the adapter, and merges it."""
    config, targets = FAMILIES[family]
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    lora = LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=targets,
        init_lora_weights=False,
        rank_pattern={"layers.1.self_attn.o_proj": 5},
        alpha_pattern={"down_proj": 7, "o_proj": 2},
    )
    peft: Any = get_peft_model(model, lora)
    peft.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    peft.merge_and_unload().save_pretrained(tmp_path / "merged")
    settings = BACKENDS[backend]
    merged = make_engine(str(tmp_path / "merged"), None, **settings)
    adapted = make_engine(
        str(tmp_path / "base"), None, lora_modules=[f"a={tmp_path / 'adapter'}"], **settings
    )
    (adapter,) = named(adapted)
    assert adapter.rank == (5 if "o_proj" in targets else 3)
    expected = written(merged, [(prompt, None) for prompt in PROMPTS], GREEDY)
    found = written(adapted, [(prompt, adapter) for prompt in PROMPTS], GREEDY)
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(found, expected, strict=True):
        assert tokens == other_tokens
        numbers, others = ([one.logprob for one in each] for each in (logprobs, other_logprobs))
        assert numbers == pytest.approx(others, abs=2e-3)
    plain = make_engine(str(tmp_path / "base"), None, **settings)
    asked = [(prompt, None) for prompt in PROMPTS]
    without = written(adapted, asked, GREEDY)
    assert without == written(plain, asked, GREEDY)
    assert without != found


def test_a_shared_expert_is_adapted(tmp_path: Path) -> None:
    """PEFT itself takes the names of its modules for those of routed experts, so it is merged by hand."""
    config, _ = FAMILIES["qwen 3 next, gates, a state, a shared expert"]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "base")
    path = save_adapter(tmp_path / "a", str(tmp_path / "base"), MLP, 1)
    tensors = load_file(Path(path) / "adapter_model.safetensors")
    with torch.no_grad():
        for name, module in model.named_modules():
            if (down := tensors.get(f"base_model.model.{name}.lora_A.weight")) is not None:
                module.weight += 2 * tensors[f"base_model.model.{name}.lora_B.weight"] @ down
    model.save_pretrained(tmp_path / "merged")
    adapted = make_engine(str(tmp_path / "base"), None, lora_modules=[f"a={path}"])
    found = written(adapted, [(prompt, named(adapted)[0]) for prompt in PROMPTS], GREEDY)
    merged = make_engine(str(tmp_path / "merged"), None)
    expected = written(merged, [(prompt, None) for prompt in PROMPTS], GREEDY)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def asked_of(adapters: list[Adapter]) -> list[tuple[list[int], Adapter | None]]:
    """Returns every prompt with every adapter and without one, next to each other by turns."""
    return [(prompt, adapter) for prompt, adapter in product(PROMPTS, [None, *adapters])]


SAMPLED = SamplingParams(max_tokens=10, temperature=0.9, seed=7, logprobs=0)
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"num_speculative_tokens": 0},
    "draft model": {"method": "draft_model"},
    "draft model, rounds in C": {"method": "draft_model", "step_seconds": 10},
    "n-grams": {"method": "ngram", "ngram_min_match": 1, "step_seconds": 10},
}


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_bits_do_not_depend_on_neighbours_and_drafts(
    base: str, modules: list[str], tmp_path: Path, params: SamplingParams, drafts: str
) -> None:
    alone = make_engine(base, None, lora_modules=modules, num_speculative_tokens=0)
    expected = [written(alone, [one], params)[0] for one in asked_of(named(alone))]
    draft = save_perturbed(tmp_path / "draft", base, 5, 0.02) if "draft model" in drafts else None
    core = make_engine(base, draft, lora_modules=modules, max_num_batched_tokens=23, **DRAFTS[drafts])
    assert written(core, asked_of(named(core)), params) == expected
    assert len({str(tokens) for tokens, _ in expected[:3]}) == 3  # adapters do something


def test_rounds_in_c_take_rows_with_adapters(base: str, modules: list[str]) -> None:
    core = make_engine(base, None, lora_modules=modules, num_speculative_tokens=0, step_seconds=10)
    plain = SamplingParams(max_tokens=10, temperature=0)
    alone = [written(core, [one], plain)[0][0] for one in asked_of(named(core))]
    assert core.stats.num_rows["c"] > 0
    assert [tokens for tokens, _ in written(core, asked_of(named(core)), plain)] == alone


def test_preempted_rows_keep_their_adapters(base: str, modules: list[str]) -> None:
    core = make_engine(base, None, lora_modules=modules, cache_memory="60KiB", num_speculative_tokens=0)
    alone = [written(core, [one], GREEDY)[0] for one in asked_of(named(core))]
    assert written(core, asked_of(named(core)), GREEDY) == alone
    assert core.scheduler.num_preemptions > 0


def test_beginnings_are_not_shared_by_adapters(base: str, modules: list[str]) -> None:
    """Nor by a salt that looks like an adapter's."""
    core = make_engine(base, None, lora_modules=modules, num_speculative_tokens=0)
    one, two = named(core)
    prompt = PROMPTS[2]
    fresh = [written(core, [(prompt, adapter)], GREEDY)[0] for adapter in (one, two, None, None)]
    salts = ["", "", "", f"{one.digest}/"]
    for number, (adapter, salt) in enumerate(zip((one, two, None, None), salts, strict=True)):
        before = core.scheduler.num_prefix_hits
        assert written(core, [(prompt, adapter)], GREEDY, [salt])[0] == fresh[number]
        assert core.scheduler.num_prefix_hits == before
    before = core.scheduler.num_prefix_hits
    assert written(core, [(prompt, one)], GREEDY, [""])[0] == fresh[0]
    assert core.scheduler.num_prefix_hits > before


def shared_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "prefix_salt", property(lambda self: self.cache_salt))


def neighbours_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = NativeAdapters.begin
    monkeypatch.setattr(
        NativeAdapters, "begin", lambda self, numbers: begin(self, [numbers[0]] * len(numbers))
    )


def forgotten_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    read = models_adapters.read_adapter

    def unscaled(*given: Any) -> Any:
        found = read(*given)
        for module, low in found.modules.items():
            found.modules[module] = LowRank(low.down, low.up / 2)
        return found

    monkeypatch.setattr(models_adapters, "read_adapter", unscaled)


def turned_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(low: LowRank, places: Any) -> Part:
        down, up, first = part_of(low, places)
        return Part(down, up.flip(0), first)

    monkeypatch.setattr(models_adapters, "part_of", turned)


@pytest.mark.parametrize(
    "plant", [shared_prefixes, neighbours_adapter, forgotten_scale, turned_rows], ids=lambda f: f.__name__
)
def test_planted_bugs_show(
    base: str, modules: list[str], monkeypatch: pytest.MonkeyPatch, plant: Callable[..., None]
) -> None:
    def texts() -> Any:
        core = make_engine(base, None, lora_modules=modules, num_speculative_tokens=0)
        asked = asked_of(named(core))
        # Long prompts go through passes in Python, and the second time through the prefix cache.
        first = written(core, asked, GREEDY, [""] * len(asked))
        return first, written(core, asked, GREEDY, [""] * len(asked))

    expected = texts()
    assert expected[0] == expected[1]
    plant(monkeypatch)
    assert texts() != expected


KINDS = ["float32", "float16", "bfloat16", "bytes", "blocks"]


def layer(library: ctypes.CDLL, kind: str, weight: torch.Tensor) -> NativeLinear:
    if kind == "bytes":
        found = ScaledBytes(
            (weight * 50).round().clamp(-127, 127).to(torch.int8), torch.full((96, 1), 0.02), 64
        )
        given = Weight("w", (96, 64), found.dense, scaled_bytes=found)
        return NativeLinears(library, compact=True).make([given], None)
    if kind == "blocks":
        given = quantised_to_four_bits(Weight("w", (96, 64), lambda: weight))
        return NativeLinears(library, compact=True).make([given], None)
    if kind == "bfloat16":
        return NativeLinear(library, [weight], None, None, bf16=True)
    return NativeLinear(library, [weight.half()], None, 1.0 if kind == "float16" else None)


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_layers_in_c_add_what_adapters_say(kind: str) -> None:
    library = load_library()
    assert library is not None
    if kind == "bfloat16" and not library.multiplies_bfloat16():
        pytest.skip("this processor does not multiply in bfloat16")
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 64, generator=generator) * 0.2
    linear, bare = layer(library, kind, weight), layer(library, kind, weight)
    adapters = NativeAdapters(library)

    def part(rank: int, first: int, end: int) -> Part:
        shapes = (rank, 64), (end - first, rank)
        return Part(*(torch.randn(shape, generator=generator) for shape in shapes), first)

    parts = {0: [part(1, 0, 96)], 2: [part(5, 33, 64), part(3, 64, 96)], 9: [part(16, 1, 95)]}
    for number, own in parts.items():  # the last one does not fit into the first table
        adapters.put(number, {linear: own})
    x, residual = torch.randn(31, 64, generator=generator), torch.randn(31, 96, generator=generator)
    numbers = [(-1, 0, 2, 2, 9, 1)[int(n)] for n in torch.randint(6, (31,), generator=generator)]
    expected = bare.add_to(residual, x)
    for row, number in enumerate(numbers):
        for down, up, first in parts.get(number, ()):
            expected[row, first : first + len(up)] += up @ (down @ x[row])
    adapters.begin(numbers)
    found = linear.add_to(residual, x)
    assert torch.allclose(found, expected, atol=1e-3)
    without = [row for row, number in enumerate(numbers) if number not in parts]
    assert torch.equal(found[without], bare.add_to(residual, x)[without])
    for row, number in enumerate(numbers):
        adapters.begin([number])
        assert torch.equal(linear.add_to(residual[row : row + 1], x[row : row + 1])[0], found[row])
    adapters.begin([0] * 30)
    assert linear(x).isnan().all()  # nobody knows whose the rows are
    adapters.end()
    assert torch.equal(linear(x), bare(x))
    adapters.drop(9)
    adapters.begin([9] * 31)
    assert torch.equal(linear(x), bare(x))


def test_modules_are_found_in_joined_layers() -> None:
    low = LowRank(torch.ones(1, 2) * 5, torch.arange(3.0)[:, None] + 5)
    one, two = torch.tensor([2, 0]).numpy(), torch.tensor([1]).numpy()
    linear: Any = None
    found = part_of(low, [Place(linear, 3, 2, 3, None, 2.0)])
    assert (found.down.tolist(), found.up.tolist(), found.first) == ([[5, 5]], [[10], [12], [14]], 3)
    found = part_of(low, [Place(linear, 6, 2, 3, two, 1.0), Place(linear, 3, 2, 3, one, 1.0)])
    assert (found.up.tolist(), found.first) == ([[7], [5], [0], [6]], 3)


def test_adapters_come_and_go_while_others_run(base: str, modules: list[str], tmp_path: Path) -> None:
    """A sequence keeps the adapter that it has begun with, though another one has its name by now."""
    core = make_engine(base, None, lora_modules=modules, num_speculative_tokens=0)
    one, two = named(core)
    folder = tmp_path / "three"
    three = core.load_adapter("three", save_adapter(folder, base, ATTENTION, 11))
    expected = {each.digest: written(core, [(PROMPTS[0], each)], GREEDY)[0][0] for each in (one, two, three)}
    core.add(Generate("old", PROMPTS[0], GREEDY, adapter=three))
    core.step()
    core.unload_adapter(three.digest)
    core.unload_adapter("unknown")
    again = core.load_adapter("three", save_adapter(folder, base, ATTENTION, 12))
    assert again.digest != three.digest
    core.add(Generate("new", PROMPTS[0], GREEDY, adapter=again))
    texts: dict[str, list[int]] = {"old": [], "new": []}
    while core.has_work:
        for output in core.step():
            texts[output.request_id] += output.token_ids
    del output
    assert expected[three.digest][1:] == texts["old"]
    assert texts["new"] == written(core, [(PROMPTS[0], again)], GREEDY)[0][0] != expected[three.digest]
    assert core.admission.adapters.num_loaded == 3  # the old one has gone with its last sequence
    with pytest.raises(RequestError, match="not those that were loaded"):
        core.add(Generate("gone", PROMPTS[0], GREEDY, adapter=three))
    assert core.admission.adapters.num_loaded == 3
    with pytest.raises(RequestError, match="not those that were loaded") as error:
        core.add(Generate("gone", PROMPTS[0], GREEDY, adapter=Adapter("x", "/some/where", "digest")))
    assert "/some" not in str(error.value)
    core.unload_adapter(again.digest)
    assert written(core, [(PROMPTS[0], again)], GREEDY)[0][0] == texts["new"]  # it is loaded anew


@pytest.mark.parametrize("next_use", ["a request without an adapter", "a moment without work"])
def test_memory_of_an_unloaded_adapter_is_free_soon(base: str, modules: list[str], next_use: str) -> None:
    core = make_engine(base, None, lora_modules=modules, num_speculative_tokens=0)
    (one, _), table = named(core), core.admission.adapters
    assert isinstance(table, AdapterTable)
    core.add(Generate("old", PROMPTS[0], GREEDY, adapter=one))
    core.unload_adapter(one.digest)
    while core.has_work:
        core.step()
    assert len(table._num_users) == 2
    if next_use == "a moment without work":
        core.free_unused()
    else:
        core.add(Generate("new", PROMPTS[0], GREEDY))
    assert len(table._num_users) == 1


def test_a_table_knows_its_adapter() -> None:
    assert BlockTable().adapter == -1


def test_library_chooses_by_name(tmp_path: Path) -> None:
    target = str(BUNDLED_PAIR / "target")
    path = save_adapter(tmp_path / "a", target, ["q_proj", "down_proj"], 1)
    prompts = ["Once upon a time", "The"]
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(lora_modules=[f"own={path}"], device="cpu", num_speculative_tokens=3) as llm:

        def texts(model: str | None = None) -> list[str]:
            return [one.text for one in llm.generate(prompts, params, model=model, progress=False)]

        plain, adapted = texts(), texts("own")
        assert plain != adapted
        assert texts() == plain
        assert "".join(delta.text for delta in llm.stream(prompts[0], params, model="own")) == adapted[0]
        with pytest.raises(RequestError, match="no LoRA adapter 'other'; lora_modules has own"):
            llm.generate("x", model="other")


def test_engines_without_adapters_refuse_them(base: str) -> None:
    core: EngineCore = make_engine(base, None)
    with pytest.raises(RequestError, match="takes no LoRA adapters"):
        core.add(Generate("x", [1], GREEDY, adapter=Adapter("a", "path", "digest")))
    with pytest.raises(RequestError, match="takes no LoRA adapters"):
        core.load_adapter("a", "path")


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("step_seconds", [0, 10], ids=["lone rounds", "shared steps"])
def test_heads_draft_without_adapters_and_change_nothing(tmp_path: Path, step_seconds: float) -> None:
    """A head shares the output layer, which is adapted for the target only."""
    base = save_random_llama(tmp_path / "base", 1, vocab_size=96, layers=5, hidden=64)
    head = save_head(tmp_path / "head", random_head(Shape(64, 96), base))
    path = save_adapter(tmp_path / "a", base, ["q_proj", "down_proj", "lm_head"], 1)
    other = save_adapter(tmp_path / "b", base, ["lm_head", "v_proj"], 2)
    modules = [f"a={path}", f"b={other}"]
    alone = make_engine(base, None, lora_modules=modules, num_speculative_tokens=0)
    for params in (GREEDY, SAMPLED):
        expected = [written(alone, [one], params)[0] for one in asked_of(named(alone))]
        core = make_engine(base, head, lora_modules=modules, method="eagle", step_seconds=step_seconds)
        assert written(core, asked_of(named(core)), params) == expected
        assert core.stats.drafts["eagle"].num_draft_tokens > 0

"""Several ranks compute what one process does: the bits of its logits in C, and its texts, whoever drafts.

The ranks are threads here; ``tests/integration/test_rank_processes.py`` has processes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from tests.engine.grammars import GRAMMAR, VOCAB_SIZE, know_grammars
from tests.engine.rank_threads import ThreadFollowers, ThreadGroup, on_ranks
from tests.engine.test_mtp import OTHERS, save_other
from tests.families import FAMILIES, SHAPE, save_random
from tests.gguf_models import save_gguf
from tests.heads import Shape, random_head, save_head
from tests.hybrids import HYBRIDS
from tests.models import make_engine, run_engine, save_perturbed, save_random_llama
from truedraft.engine import build
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers import sharding, split_linear
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models import ranks
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.models.probe_texts import packed_logits, probe_texts
from truedraft.engine.models.ranks import LeadingDecoder, load_ranked
from truedraft.engine.parallel.group import RankLostError

# Shares of these sizes fill the kernels' panels, so that C computes each number as one process does.
WIDE: dict[str, Any] = {
    **SHAPE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "vocab_size": 128,
    "head_dim": 32,
}
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}
LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", WIDE),
    "dense with biases": ("llama", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    "one head of keys": ("llama", {**WIDE, "num_key_value_heads": 1}),
    "windows and softcaps": ("gemma2", {**WIDE, **FAMILIES["Gemma 2"][1], "head_dim": 32}),
    "norms of all heads": ("olmo2", WIDE),
    "gates, Gated DeltaNet": (
        "qwen3_5_text",
        {**WIDE, **DELTA, **LAYERS, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    ),
    "short convolutions": ("lfm2", {**WIDE, "layer_types": ["conv", "full_attention"]}),
    "Mamba 2": ("nemotron_h", HYBRIDS["Nemotron-H"][1]),
    "Mamba 2 with one norm": ("granitemoehybrid", HYBRIDS["Granite 4 H"][1]),
}
# Experts in C round otherwise than one by one, and panels that are not full otherwise than full ones.
TOLERANCE = 1e-5
NOT_DIVIDED = "a value head for each key head"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "set_num_threads", lambda number: None)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EngineCore]]:
    """Makes engines whose ranks are threads, which end with the test."""
    made: list[EngineCore] = []

    def make(target: str, draft: str | None = None, **config: Any) -> EngineCore:
        made.append(make_engine(target, draft, **config))
        return made[-1]

    monkeypatch.setattr(build, "load_ranked", partial(load_ranked, start=ThreadFollowers))
    yield make
    for core in made:
        if isinstance(core.target.model, LeadingDecoder):
            core.target.model.followers.close()


def logits_of(path: str, options: LoadOptions) -> list[torch.Tensor]:
    model = load_model(path, options)
    assert isinstance(model, FusedDecoder)
    return packed_logits(model, probe_texts(model.facts))


def logits_on_ranks(path: str, size: int, options: LoadOptions) -> list[list[torch.Tensor]]:
    return on_ranks(size, lambda group: logits_of(path, replace(options, group=group)))


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("kind", EXACT)
def test_ranks_have_the_bits_of_one_process(tmp_path: Path, kind: str) -> None:
    path = save_random(tmp_path, *EXACT[kind])
    one = logits_of(path, LoadOptions())
    for ours in logits_on_ranks(path, 2, LoadOptions()):
        assert all(map(torch.equal, ours, one))


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_families_are_divided_or_refused(tmp_path: Path, family: str) -> None:
    """Every family has the logits of one process up to rounding, or is refused by name."""
    model_type, values = HYBRIDS[family] if family in HYBRIDS else FAMILIES[family]
    path = save_random(tmp_path, model_type, values if family in HYBRIDS else {**SHAPE, **values})
    options = LoadOptions()
    first = load_model(path, options)
    if not isinstance(first, FusedDecoder):
        with pytest.raises(ModelLoadError, match="not divided among 2 ranks"):
            logits_on_ranks(path, 2, options)
        return
    if NOT_DIVIDED in family:
        with pytest.raises(ModelLoadError, match="with 3 heads, and 3 of keys is not divided among 2 ranks"):
            logits_on_ranks(path, 2, options)
        return
    one, (ours, others) = logits_of(path, options), logits_on_ranks(path, 2, options)
    assert all(map(torch.equal, ours, others))
    for mine, whole in zip(ours, one, strict=True):
        assert (mine - whole).abs().max() <= TOLERANCE * whole.abs().max()


TOKENS = 24
ASKED = [
    SamplingParams(max_tokens=TOKENS, temperature=0),
    SamplingParams(max_tokens=TOKENS, temperature=0.9, seed=5),
    SamplingParams(max_tokens=TOKENS, temperature=0.8, top_p=0.9, seed=3, repetition_penalty=1.2),
    SamplingParams(max_tokens=TOKENS, temperature=0, presence_penalty=0.5, logit_bias={3: 1.0}),
]
PROMPTS = [[1, 2, 3, 4], [5, 6, 7], [9] * 20, [3, 1, 4, 1, 5]]
# What sets each kind of layer apart; and whether its weights can be quantised at load.
TARGETS: dict[str, tuple[tuple[str, dict[str, Any]], bool]] = {
    "dense": (EXACT["dense"], True),
    "gates, Gated DeltaNet": (EXACT["gates, Gated DeltaNet"], True),
    "Mamba 2": (("nemotron_h", HYBRIDS["Nemotron-H"][1]), True),
    "sinks": (("gpt_oss", {**SHAPE, **FAMILIES["GPT-OSS in C"][1]}), False),
    "experts": (
        ("qwen2_moe", {**SHAPE, **FAMILIES["Qwen2-MoE in C"][1], "moe_intermediate_size": 32}),
        False,
    ),
    "latents": (("deepseek_v3", {**SHAPE, **FAMILIES["DeepSeek-V3 in C"][1]}), False),
}


def texts(core: EngineCore) -> list[list[int]]:
    return run_engine(core, PROMPTS, ASKED)


@pytest.mark.parametrize("kind", TARGETS)
def test_texts_are_those_of_one_process(
    tmp_path: Path, engines: Callable[..., EngineCore], kind: str
) -> None:
    target = save_random(tmp_path / "target", *TARGETS[kind][0])
    draft = save_perturbed(tmp_path / "draft", target, 2, 0.01)
    expected = texts(engines(target))
    assert texts(engines(target, tensor_parallel_size=2)) == expected
    drafting = engines(target, draft, tensor_parallel_size=2)
    assert texts(drafting) == expected
    assert drafting.stats.num_accepted_tokens > 0


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize(
    "kind", [kind for kind, (_, can_be_quantised) in TARGETS.items() if can_be_quantised]
)
def test_quantised_texts_are_those_of_one_process(
    tmp_path: Path, engines: Callable[..., EngineCore], kind: str, bits: str
) -> None:
    target = save_random(tmp_path / "target", *TARGETS[kind][0])
    given = {"dtype": "auto", "quantize": bits}
    expected = texts(engines(target, **given))
    assert texts(engines(target, tensor_parallel_size=2, **given)) == expected
    drafting = engines(target, "self:int4", tensor_parallel_size=2, **given)
    assert texts(drafting) == expected
    assert drafting.stats.num_accepted_tokens > 0


@pytest.mark.usefixtures("needs_compiler")
def test_files_of_super_blocks_are_divided(tmp_path: Path, engines: Callable[..., EngineCore]) -> None:
    """Values in 6 bits are packed apart from keys in 4."""
    config = LlamaConfig(**{**WIDE, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64})
    target = str(tmp_path / "target.gguf")
    save_gguf(Path(target), config, "Q4_K", value_kind="Q6_K")
    expected = texts(engines(target, dtype="auto"))
    ours = engines(target, target, dtype="auto", tensor_parallel_size=2)
    assert texts(ours) == expected
    assert ours.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("name", ["Qwen3-Next", "DeepSeek-V3"])
def test_heads_draft_from_the_states_of_ranks(
    tmp_path: Path, engines: Callable[..., EngineCore], name: str
) -> None:
    target, _ = save_other(tmp_path / "target", OTHERS[name])
    expected = texts(engines(target))
    ours = engines(target, "mtp", method="mtp", tensor_parallel_size=2)
    assert texts(ours) == expected
    assert ours.stats.num_draft_tokens > 0


def test_an_eagle_head_drafts(tmp_path: Path, engines: Callable[..., EngineCore]) -> None:
    target = save_random_llama(tmp_path / "target", 1, layers=5)
    head = save_head(tmp_path / "head", random_head(Shape(32, 16), target))
    expected = run_engine(engines(target), [[1, 2, 3]], ASKED[0])
    ours = engines(target, head, method="eagle", tensor_parallel_size=2)
    assert run_engine(ours, [[1, 2, 3]], ASKED[0]) == expected
    assert ours.stats.num_draft_tokens > 0


def test_four_ranks_share_two_heads_of_keys(tmp_path: Path, engines: Callable[..., EngineCore]) -> None:
    target = save_random_llama(tmp_path / "target", 1)
    expected = run_engine(engines(target), [[1, 2, 3]], ASKED)
    assert run_engine(engines(target, tensor_parallel_size=4), [[1, 2, 3]], ASKED) == expected


@pytest.mark.parametrize("kind", ["dense", "Mamba 2"])
def test_preempted_rows_and_found_prefixes_change_nothing(
    tmp_path: Path, engines: Callable[..., EngineCore], kind: str
) -> None:
    """States are copied on every rank when a text begins as another one."""
    target = save_random(tmp_path / "target", *TARGETS[kind][0])
    shared = [(7 * i + i // 3) % 40 for i in range(60)]
    prompts = [[*shared[: 20 + 8 * number], number] for number in range(6)]
    params = [SamplingParams(max_tokens=40, seed=number, temperature=0.9) for number in range(6)]
    expected = run_engine(engines(target), prompts, params)
    ours = engines(target, target, tensor_parallel_size=2)
    assert run_engine(ours, prompts, params) == expected
    assert run_engine(ours, prompts, params) == expected
    assert ours.scheduler.num_prefix_hits > 0
    tight = engines(target, tensor_parallel_size=2)
    tight.scheduler.target_pool.__init__(45, 4, tight.scheduler.target_pool.states)  # type: ignore[misc]
    assert run_engine(tight, prompts, params) == expected
    assert tight.scheduler.num_preemptions > 0


def test_grammars_hold(tmp_path: Path, engines: Callable[..., EngineCore]) -> None:
    target = save_random_llama(tmp_path / "target", 1, vocab_size=VOCAB_SIZE)
    params = SamplingParams(max_tokens=6, seed=1, grammar=GRAMMAR)
    expected = run_engine(know_grammars(engines(target)), [[0, 2, 3]], params)
    ours = know_grammars(engines(target, target, tensor_parallel_size=2))
    assert run_engine(ours, [[0, 2, 3]], params) == expected


def test_each_rank_has_its_share(tmp_path: Path) -> None:
    """Embeddings and norms are whole; layers, the output layer and caches are divided."""
    target = save_random(tmp_path, *EXACT["dense"])
    options = LoadOptions(compact_weights=False)
    (whole,) = on_ranks(1, lambda group: sizes(target, options))
    halves = on_ranks(2, lambda group: sizes(target, replace(options, group=group)))
    assert halves == [(whole[0] // 2, whole[1] // 2)] * 2


def sizes(path: str, options: LoadOptions) -> tuple[int, int]:
    model = load_model(path, options)
    assert isinstance(model, FusedDecoder)
    weights = sum(linear.weights.nbytes for linear in model.weights.linears)  # type: ignore[attr-defined]
    return weights, model.cache_bytes_per_token


@pytest.mark.parametrize(
    ("setting", "named"),
    [({"lora_modules": ["a=/tmp"]}, "lora_modules"), ({"prefix_cache_dir": "/tmp/x"}, "prefix_cache_dir")],
)
def test_settings_of_one_process_are_refused(setting: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=f"tensor_parallel_size is 2, and {named} is for a model in one"):
        make_engine("nowhere", None, tensor_parallel_size=2, **setting)


def test_heads_that_cannot_be_divided_are_refused_unread(
    tmp_path: Path, engines: Callable[..., EngineCore]
) -> None:
    target = save_random_llama(tmp_path, 1)
    weights = tmp_path / "model.safetensors"
    stored = weights.read_bytes()
    weights.write_bytes(stored[:-8] + b"\xff" * 8)  # These would be NaN.
    with pytest.raises(ModelLoadError, match="with 4 heads, and 2 of keys is not divided among 3 ranks"):
        engines(target, tensor_parallel_size=3)


def gathered_as_they_came(plant: pytest.MonkeyPatch) -> None:
    honest = ThreadGroup.gather

    def gather(self: ThreadGroup, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(honest(self, x).chunk(self.size, 1)[::-1], 1)

    plant.setattr(ThreadGroup, "gather", gather)


def heads_swapped(plant: pytest.MonkeyPatch) -> None:
    honest = sharding.Sharding._heads

    def heads(self: sharding.Sharding, *counts: int) -> Any:
        own, keys = honest(self, *counts)
        return own[::-1].copy(), keys

    plant.setattr(sharding.Sharding, "_heads", heads)


def another_share_of_the_residual(plant: pytest.MonkeyPatch) -> None:
    def add_to(self: split_linear.SplitLinear, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        own = self.own.add_to(residual[:, : len(self.rows)].contiguous(), self._inputs(x))
        return self._whole(own)

    plant.setattr(split_linear.SplitLinear, "add_to", add_to)


def gates_not_paired(plant: pytest.MonkeyPatch) -> None:
    def gating(self: sharding.Sharding, mlp: Any) -> Any:
        size = sharding.pending(mlp.gate_up).out_features // self.group.size
        rows = range(size * self.group.rank, size * (self.group.rank + 1))
        return replace(mlp, gate_up=self._rows(mlp.gate_up, torch.tensor(rows).numpy()))

    plant.setattr(sharding.Sharding, "_gating", gating)


@pytest.mark.parametrize(
    "bug", [gathered_as_they_came, heads_swapped, another_share_of_the_residual, gates_not_paired]
)
def test_wrong_shares_are_found_when_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Ranks compare their logits with those of transformers' layers, and none of them serves wrong ones."""
    target = save_random(tmp_path, *EXACT["dense"])
    bug(monkeypatch)
    with pytest.raises(ModelLoadError, match="not divided among 2 ranks"):
        logits_on_ranks(target, 2, LoadOptions())


def test_a_follower_that_is_a_message_behind_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: Callable[..., EngineCore]
) -> None:
    core = engines(save_random_llama(tmp_path, 1), tensor_parallel_size=2)
    honest, kept, lag = ranks._obey, list[bytes](), 1

    def late(data: bytes, *rest: Any) -> None:
        kept.append(data)
        honest(kept[-lag], *rest)

    monkeypatch.setattr(ranks, "_obey", late)
    run_engine(core, [[1, 2, 3]], ASKED[0])
    lag = 2
    with pytest.raises(RankLostError, match="ranks have begun different passes"):
        run_engine(core, [[1, 2, 3]], ASKED[0])

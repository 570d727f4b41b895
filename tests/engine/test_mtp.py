"""MTP heads in the engine: they draft what their definition says, and what is emitted is the target's."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests import gguf_latent
from tests.engine.head_runs import (
    TRAINED,
    compare_with_definition,
    fed_one_token_short,
    mtp_engine,
    own_states_after_acceptance,
    story_prompts,
)
from tests.engine.test_gguf import CONFIGS
from tests.families import FAMILIES, SHAPE, save_random
from tests.gguf_hybrids import save_hybrid_gguf
from tests.gguf_models import save_gguf
from tests.hybrids import HYBRIDS
from tests.models import make_engine, run_engine
from tests.mtp import DEEPSEEK, QWEN, NaiveMtp, add_to_checkpoint, random_head, trained_head
from truedraft.engine.build import drafting_method
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.heads import mtp
from truedraft.engine.models.heads.head import Head
from truedraft.engine.models.heads.mtp import load_mtp
from truedraft.engine.models.load import load_model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions

GREEDY = SamplingParams(max_tokens=24, temperature=0, method="mtp")


@dataclass(frozen=True)
class Trained:
    head: NaiveMtp
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return story_prompts()


@pytest.fixture(scope="module")
def trained(prompts: list[list[int]]) -> Trained:
    return Trained(trained_head(TRAINED), prompts)


def drafts_are_the_definitions(trained: Trained, core: EngineCore) -> None:
    assert compare_with_definition(trained.head, core, trained.prompts, GREEDY) > 60
    assert core.scheduler.num_prefix_hits >= 16


@pytest.mark.usefixtures("needs_compiler")
def test_the_trained_head_drafts_what_it_is_defined_to(trained: Trained) -> None:
    drafts_are_the_definitions(trained, mtp_engine())


def test_layers_in_torch_draft_it_too(trained: Trained) -> None:
    compare_with_definition(trained.head, mtp_engine(native_kernels=False), trained.prompts[1:2], GREEDY)


@dataclass(frozen=True)
class Other:
    """Is a family with a random head in some layout: ``prefix`` and ``layer`` begin the tensors' names."""

    model_type: str
    config: dict[str, Any]
    layout: dict[str, str]
    prefix: str
    layer: str


OTHERS = {
    "Qwen3-Next": Other(*HYBRIDS["Qwen3-Next"], QWEN, "mtp.", "layers.0."),
    "GLM-4.5": Other("glm4_moe", SHAPE | FAMILIES["GLM-4.5 in C"][1], DEEPSEEK, "model.layers.2.", ""),
    "DeepSeek-V3": Other(
        "deepseek_v3", SHAPE | FAMILIES["DeepSeek-V3 in C"][1], DEEPSEEK, "model.layers.2.", ""
    ),
    "GLM-4.7-Flash": Other(
        "glm4_moe_lite",
        SHAPE | FAMILIES["GLM-4.7-Flash in C"][1] | {"num_nextn_predict_layers": 1},
        DEEPSEEK,
        "model.layers.2.",
        "",
    ),
}


def save_other(folder: Path, other: Other) -> tuple[str, NaiveMtp]:
    target = save_random(folder, other.model_type, other.config)
    head = random_head(target)
    named = head.named_tensors(other.layout, other.layer)
    add_to_checkpoint(target, {other.prefix + name: tensor for name, tensor in named.items()})
    return target, head


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_and_experts(tmp_path: Path, name: str) -> None:
    target, head = save_other(tmp_path / "target", OTHERS[name])
    prompts, core = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [5]], mtp_engine(target)
    compare_with_definition(head, core, prompts, structs.replace(GREEDY, max_tokens=12))
    models = [runner.model.weights for runner in (core.target, core.scheduler.proposers[0].runner)]  # type: ignore[attr-defined]
    assert models[0].rotary is models[1].rotary  # a table of angles is as long as the context


@pytest.mark.parametrize("name", ["GLM-4.5", "Qwen3-Next"])
def test_heads_in_fp8(tmp_path: Path, name: str) -> None:
    """Scales of a head's weights are none of its tensors; the definition has the weights that are meant."""
    target, head = save_other(tmp_path / "target", OTHERS[name])
    scale, file, config = 1 / 64, Path(target) / "model.safetensors", Path(target) / "config.json"
    stored = load_file(file)
    for each in [each for each in stored if each.endswith("_proj.weight") and "eh_proj" not in each]:
        stored[each] = (stored[each] / scale).to(torch.float8_e4m3fn)
        stored[f"{each}_scale_inv"] = torch.tensor([scale])
    save_file(stored, file, metadata={"format": "pt"})
    method = {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}
    config.write_text(json.dumps(json.loads(config.read_text()) | method))
    with torch.no_grad():
        for module in (head, head.target[0]):
            for each, parameter in module.named_parameters():
                if each.removesuffix(".weight").endswith("_proj"):
                    parameter.copy_((parameter / scale).to(torch.float8_e4m3fn).float() * scale)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [5]]
    compare_with_definition(head, mtp_engine(target), prompts, structs.replace(GREEDY, max_tokens=12))


def test_own_embeddings_and_output_layer(tmp_path: Path) -> None:
    """Most checkpoints have the target's once more, which are read once; others are the head's own."""
    target, head = save_other(tmp_path / "target", OTHERS["GLM-4.5"])
    model = head.target[0]
    add_to_checkpoint(
        target,
        {
            "model.layers.2.embed_tokens.weight": model.model.embed_tokens.weight,
            "model.layers.2.shared_head.head.weight": model.lm_head.weight.flip(0),
        },
    )
    loaded = load_model(target, LoadOptions())
    found = load_mtp(target, loaded, LoadOptions()).model.weights
    assert found.embeddings is loaded.weights.embeddings  # type: ignore[attr-defined]
    rows = torch.randn(2, 32)
    assert torch.allclose(found.head(rows), loaded.weights.head(rows).flip(1), atol=1e-5)  # type: ignore[attr-defined]


def test_text_is_the_same_with_and_without(prompts: list[list[int]]) -> None:
    """Few blocks and short chunks, so that sequences are preempted and beginnings taken over."""
    core, plain = mtp_engine(), make_engine(TRAINED, None, max_model_len=64)
    for pool in (core.scheduler.target_pool, *core.scheduler.draft_pools):
        pool.__init__(16, 4, pool.states, pool.lookahead)  # type: ignore[misc]
    seeded = SamplingParams(max_tokens=24, temperature=1.1, seed=3, method="mtp", verification="coupled")
    params = [GREEDY, seeded, GREEDY, seeded, seeded]
    found = run_engine(core, prompts, params)
    assert core.stats.drafts["mtp"].num_accepted_tokens > 20
    assert core.scheduler.num_preemptions > 0
    assert all(pool.usage == 0 for pool in (core.scheduler.target_pool, *core.scheduler.draft_pools))
    assert found == run_engine(plain, prompts, [structs.replace(each, method="none") for each in params])


def test_heads_in_gguf_files(trained: Trained, tmp_path: Path) -> None:
    """A file of F16 has the weights of the checkpoint; the head may have one of its own."""
    head, tensors = trained.head, trained.head.named_tensors(DEEPSEEK)
    whole, alone = str(tmp_path / "model.gguf"), str(tmp_path / "mtp-model.gguf")
    save_hybrid_gguf(Path(whole), TRAINED, "F16", head=tensors)
    save_hybrid_gguf(Path(alone), TRAINED, "F16", head=tensors, alone=True)
    assert [drafting_method(path) for path in (whole, alone, "mtp")] == ["draft_model", "mtp", "mtp"]
    for target, draft in ((whole, "mtp"), (TRAINED, alone)):
        compare_with_definition(head, mtp_engine(target, draft), trained.prompts[:1], GREEDY)
    without = tmp_path / "without.gguf"
    save_hybrid_gguf(without, save_random(tmp_path / "small", *HYBRIDS["Qwen3.5 with experts"]))
    with pytest.raises(ModelLoadError, match="has 0 layers that predict further tokens"):
        mtp_engine(str(without))
    with pytest.raises(ModelLoadError, match="which is not the target's glm4_moe"):
        mtp_engine(save_other(tmp_path / "target", OTHERS["GLM-4.5"])[0], alone)


# GGUF files of Qwen3-Next have experts in all of their layers.
NEXT = {name: value for name, value in HYBRIDS["Qwen3-Next"][1].items() if name != "mlp_only_layers"}


@pytest.mark.parametrize("family", [HYBRIDS["Qwen3.5 with experts"], ("qwen3_next", NEXT)])
def test_experts_of_a_head_in_a_gguf_file(tmp_path: Path, family: tuple[str, dict[str, Any]]) -> None:
    folder = save_random(tmp_path / "target", *family)
    head, path = random_head(folder), tmp_path / "model.gguf"
    save_hybrid_gguf(path, folder, head=head.named_tensors(DEEPSEEK, stacks=True))
    compare_with_definition(
        head, mtp_engine(str(path)), [[1, 2, 3, 4, 5]], structs.replace(GREEDY, max_tokens=12)
    )


@pytest.mark.parametrize(
    ("name", "number"), [("glm4moe", gguf.MODEL_ARCH.GLM4_MOE), ("deepseek2, GLM", gguf.MODEL_ARCH.DEEPSEEK2)]
)
def test_glm_in_a_gguf_file(tmp_path: Path, name: str, number: gguf.MODEL_ARCH) -> None:
    config = CONFIGS[name]
    head = random_head(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    # The package does not know that files of deepseek2 have heads, too.
    maps = [gguf.get_tensor_name_map(each, 3) for each in (number, gguf.MODEL_ARCH.GLM4_MOE)]
    block = f"blk.{config.num_hidden_layers}."
    stored: dict[str, torch.Tensor] = {}
    for own, tensor in head.named_tensors(DEEPSEEK, stacks=True).items():
        base, _, end = own.rpartition(".")
        if end == "gate_up_proj":
            gate, up = tensor.chunk(2, 1)
            stored |= {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
        elif end == "down_proj":
            stored["ffn_down_exps.weight"] = tensor
        elif end == "e_score_correction_bias":
            stored["exp_probs_b.bias"] = tensor
        elif base.endswith("kv_b_proj"):
            split = gguf_latent.split(f"model.layers.{config.num_hidden_layers}.{base}", tensor, config)
            stored |= {theirs.removeprefix(block): part for theirs, _, part in split}
        else:
            whole = f"model.layers.{config.num_hidden_layers}.{base}"
            theirs = maps[0].get_name(whole) or maps[1].get_name(whole)
            assert theirs is not None
            stored[f"{theirs.removeprefix(block)}.{end}"] = tensor
    further = {name: tensor.contiguous().numpy() for name, tensor in stored.items()}
    path = tmp_path / "model.gguf"
    key = f"{gguf.MODEL_ARCH_NAMES[number]}.nextn_predict_layers"
    module = save_gguf(path, config, "F32", further=further, **{key: 1})
    head.target = [module.eval()]
    compare_with_definition(
        head, mtp_engine(str(path)), [[1, 2, 3, 4, 5]], structs.replace(GREEDY, max_tokens=12)
    )


@torch.inference_mode()
def overlaps(text: list[int]) -> tuple[dict[str, float], str, str]:
    """Returns how much of the target's probability the head shares, on average, if it is fed with states
    before and after the norms: the target's, and its own in their place, one token later. Returns what it
    is fed with in the engine, too."""
    options = LoadOptions()
    target = load_model(TRAINED, options)
    head = load_mtp(TRAINED, target, options)
    num_layers = len(target.caches)
    law, states = forward(target, text, None, (num_layers - 1, num_layers))
    found = {}
    for place, name in enumerate(("before", "after")):
        logits, own = forward(head.model, text[1:], states[:-1, place], (0, 1))
        found[f"the target's {name}"] = shared(logits, law[1:])
        if name == "after":
            for number, whose in enumerate(("before", "after")):
                later, _ = forward(head.model, text[2:], own[:-1, number], (0,))
                found[f"its own {whose}"] = shared(later, law[2:])
    chosen = head.taps == (num_layers,), head.output == 1
    return found, ("before", "after")[chosen[0]], ("before", "after")[chosen[1]]


def forward(
    model: Any, text: list[int], states: torch.Tensor | None, taps: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    runner = ModelRunner.build(model, 64, 16, num_state_slots=2)
    table = BlockTable()
    BlockPool(64, 16).reserve(table, len(text))
    table.state_slot = 0
    logits, hidden = runner.forward([Span(table, text, len(text), states=states)], taps=taps)
    assert hidden is not None
    return logits.softmax(-1), hidden


def shared(drafted: torch.Tensor, law: torch.Tensor) -> float:
    return float(torch.minimum(drafted, law[: len(drafted)]).sum(-1).mean())


def fed_with_what_fits(text: list[int]) -> None:
    found, target_state, own_state = overlaps(text)
    other = {"after": "before", "before": "after"}
    assert found[f"the target's {target_state}"] > found[f"the target's {other[target_state]}"] + 0.005
    assert found[f"its own {own_state}"] > found[f"its own {other[own_state]}"] + 0.005


@pytest.fixture(scope="module")
def story(prompts: list[list[int]]) -> list[int]:
    params = SamplingParams(max_tokens=400, temperature=1, seed=1)
    return run_engine(make_engine(TRAINED, None), prompts[:1], params)[0]


def test_the_trained_head_is_fed_with_what_fits(story: list[int]) -> None:
    """Loaders of such heads have been wrong about it, which shows in nothing but acceptance."""
    fed_with_what_fits(story)


def made_otherwise(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    def make(*values: Any, **named: Any) -> Head:
        return replace(Head(*values, **named), **changes)

    patch.setattr(mtp, "Head", make)


def state_before_the_norm(patch: pytest.MonkeyPatch) -> None:
    made_otherwise(patch, taps=(7,))


def own_state_before_the_norm(patch: pytest.MonkeyPatch) -> None:
    made_otherwise(patch, norm_output=False)


PLANTED = [own_states_after_acceptance, fed_one_token_short, state_before_the_norm, own_state_before_the_norm]


@pytest.mark.parametrize("plant", PLANTED)
def test_planted_bugs_are_caught(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        drafts_are_the_definitions(trained, mtp_engine())


@pytest.mark.parametrize("plant", [state_before_the_norm, own_state_before_the_norm])
def test_what_does_not_fit_shows_in_acceptance(
    story: list[int], monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        fed_with_what_fits(story)


def test_what_is_no_head_for_the_target_is_refused(tmp_path: Path) -> None:
    plain = save_random(tmp_path / "plain", *HYBRIDS["Qwen3-Next"])
    with pytest.raises(ModelLoadError, match=r"has no MTP head: there is no mtp\.fc\.weight"):
        mtp_engine(plain)
    with pytest.raises(ModelLoadError, match="method is mtp, but the draft is no MTP head"):
        make_engine(TRAINED, None, method="mtp")
    with pytest.raises(ModelLoadError, match="a gpt_neox model that is not served by fused layers"):
        mtp_engine(save_random(tmp_path / "neox", "gpt_neox", SHAPE))


def test_a_head_whose_config_is_not_the_targets_is_refused(tmp_path: Path) -> None:
    """The layer is computed by the target's config: another one is named, and is not left unread."""
    stored = load_file(Path(TRAINED, "model.safetensors"))
    head = {name: tensor for name, tensor in stored.items() if name.startswith("mtp.")}
    save_file(head, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(Path(TRAINED, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    mtp_engine(TRAINED, str(tmp_path))
    for name, value in (("rms_norm_eps", 0.5), ("head_dim", 8), ("mtp_num_hidden_layers", 2)):
        (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
        with pytest.raises(ModelLoadError, match=name):
            mtp_engine(TRAINED, str(tmp_path))

"""EAGLE-3 heads in the engine: they draft what a naive head says, and what is emitted is the target's.

The naive head computes the whole text anew for every token, from transformers' states. Drafts are equal to
its drafts in every round only if layers, shifts, positions, vocabulary and what is fed again are right.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from tests.engine.gates import PROMPTS
from tests.engine.grammars import END, GRAMMAR, know_grammars
from tests.engine.grammars import VOCAB_SIZE as VOCABULARY_OF_GRAMMARS
from tests.engine.head_runs import (
    fed_one_token_short,
    own_states_after_acceptance,
    places_are_found_by_their_own_tokens,
    state_before_the_last,
    traces_of,
)
from tests.engine.native_pair import VOCAB_SIZE
from tests.engine.test_distribution import SIGNIFICANCE, make_pair, p_values_of
from tests.heads import NaiveHead, Shape, fitted, random_head, save_head, target_states
from tests.models import make_engine, run_engine, save_random_llama, stepped
from truedraft.engine.build import drafting_method
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.models.heads.eagle_config import EagleConfig, read_eagle_config

HIDDEN, LAYERS = 64, 5
MOST = tuple(range(0, VOCAB_SIZE, 2)) + (1, 3, 5)
GREEDY = SamplingParams(max_tokens=20, temperature=0, method="eagle")
# Prompts that are longer than a chunk, and the beginnings of which are found in the cache.
TEXTS = [*PROMPTS[:4], [*range(30), 7], [*range(30), 8], [*range(28), 8, 8]]

# These go on otherwise after blocks that are found: one wrong place of thirty changes drafts of few texts.
OTHERS = [[*range(28), token_id, token_id] for token_id in range(9, 25)]


@dataclass(frozen=True)
class Trained:
    target: str
    head: NaiveHead
    path: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Makes a target of a shape that the kernels in C run, and a head that has learned its greedy texts."""
    root = tmp_path_factory.mktemp("trained")
    target = save_random_llama(
        root / "target", 1, vocab_size=VOCAB_SIZE, layers=LAYERS, hidden=HIDDEN, std=0.2
    )
    plain = make_engine(target, None)
    outputs = run_engine(plain, TEXTS, SamplingParams(max_tokens=20, temperature=0))
    texts = [prompt + output for prompt, output in zip(TEXTS, outputs, strict=True)]
    head = fitted(random_head(Shape(HIDDEN, VOCAB_SIZE), target), target, texts)
    return Trained(target, head, save_head(root / "head", head))


def engine(trained: Trained, path: str | None = None, **config: Any) -> EngineCore:
    """Makes one with short chunks of prompts, so that a text's states come in pieces."""
    settings = {"method": "auto", "max_num_batched_tokens": 12, **config}
    return make_engine(trained.target, path or trained.path, **settings)


def drafts_are_the_naive_heads(
    trained: Trained, core: EngineCore, texts: Sequence[list[int]] = TEXTS
) -> None:
    num_compared = num_accepted = 0
    for text, rounds in traces_of(core, texts, GREEDY):
        states = target_states(trained.target, text)
        for one in rounds:
            known = [layer[: one.position - 1] for layer in states]
            expected = trained.head.draft(text[: one.position], known, len(one.draft_ids))
            assert one.draft_ids == expected, (one.position, one.draft_ids, expected)
            num_compared, num_accepted = num_compared + 1, num_accepted + one.num_accepted
    assert num_compared > 30
    assert num_accepted > 5


SHAPES = {
    "original": Shape(HIDDEN, VOCAB_SIZE, drafted=MOST),
    "speculators": Shape(HIDDEN, VOCAB_SIZE, MOST, (2, 3), has_parts=True, norm_before_residual=True),
    "norms": Shape(
        HIDDEN,
        VOCAB_SIZE,
        None,
        (3, 2, 4),
        fc_norm=True,
        norm_before_fc=True,
        norm_output=True,
        has_parts=True,
    ),
    "own embeddings": Shape(HIDDEN, VOCAB_SIZE, kind="qwen3", has_embeddings=True),
}


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize(("name", "native_kernels"), [*((name, True) for name in SHAPES), ("norms", False)])
def test_drafts_are_those_of_the_definition(
    trained: Trained, tmp_path: Path, name: str, native_kernels: bool
) -> None:
    head = random_head(SHAPES[name], trained.target)
    texts = [
        text
        for text, _ in traces_of(
            make_engine(trained.target, None), TEXTS, structs.replace(GREEDY, method=None)
        )
    ]
    mine = Trained(trained.target, fitted(head, trained.target, texts), "")
    path = save_head(tmp_path / "head", mine.head)
    core = engine(trained, path, native_kernels=native_kernels)
    assert core.scheduler.proposers[0].runner.model.is_native == native_kernels  # type: ignore[attr-defined]
    drafts_are_the_naive_heads(mine, core)


def is_accepted(trained: Trained, core: EngineCore) -> None:
    """A head that has learned these texts guesses most first tokens of them."""
    firsts = [one.num_accepted > 0 for _, rounds in traces_of(core, TEXTS, GREEDY) for one in rounds]
    assert sum(firsts) > 0.5 * len(firsts) > 0


def hits_keep_drafts_right(trained: Trained, core: EngineCore) -> None:
    """A text whose beginning is in the cache is drafted as without: none of the head's places is stale."""
    drafts_are_the_naive_heads(trained, core, [*TEXTS, *OTHERS])
    assert core.scheduler.num_prefix_hits >= 56


GATES = {"drafts": drafts_are_the_naive_heads, "hits": hits_keep_drafts_right, "accepted": is_accepted}


@pytest.mark.parametrize("gate", ["hits", "accepted"])
def test_a_fitted_head(trained: Trained, gate: str) -> None:
    GATES[gate](trained, engine(trained))


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection", "block"])
def test_text_is_the_same_with_and_without(trained: Trained, rule: str) -> None:
    """Few blocks and short chunks, so that sequences are preempted and beginnings taken over."""
    core, plain = engine(trained), make_engine(trained.target, None)
    for pool in (core.scheduler.target_pool, *core.scheduler.draft_pools):
        pool.__init__(22, 4, lookahead=pool.lookahead)  # type: ignore[misc]
    params = [
        GREEDY
        if rule == "greedy"
        else SamplingParams(max_tokens=24, temperature=1.1, seed=seed, method="eagle", verification=rule)  # type: ignore[arg-type]
        for seed in range(len(TEXTS))
    ]
    found = run_engine(core, TEXTS, params)
    assert core.stats.drafts["eagle"].num_draft_tokens > 100
    assert core.scheduler.num_preemptions > 0
    assert all(pool.usage == 0 for pool in (core.scheduler.target_pool, *core.scheduler.draft_pools))
    if rule in ("greedy", "coupled"):  # the others draw from the same law, as the next test shows
        alone = [structs.replace(each, method="none") for each in params]
        assert found == run_engine(plain, TEXTS, alone)


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_sampled_text_has_the_law_of_the_target(tmp_path: Path, verification: str) -> None:
    """The head drafts four of six tokens: the others come from residuals alone."""
    pair = make_pair(tmp_path, hidden=64, layers=2)
    shape = Shape(64, 6, (0, 2, 3, 5), (2, 2), has_parts=True)
    path = save_head(tmp_path / "head", random_head(shape, pair.target))
    core = make_engine(pair.target, path, method="eagle", verification=verification, max_num_sequences=16)
    assert min(p_values_of(core, pair, 1500)) > SIGNIFICANCE
    assert core.stats.drafts["eagle"].num_accepted_tokens > 100


@pytest.mark.parametrize("temperature", [0, 1])
def test_parameters_and_grammars_hold_where_the_head_knows_none_of_the_tokens(
    trained: Trained, tmp_path: Path, temperature: float
) -> None:
    """A grammar's letters and biased tokens are beyond what the head drafts; log-probabilities stay."""
    target = save_random_llama(tmp_path / "target", 7, VOCABULARY_OF_GRAMMARS, 4, eos_token_id=END)
    head = random_head(Shape(32, VOCABULARY_OF_GRAMMARS, (3, 5), (2, 3), has_parts=True), target)
    core = know_grammars(make_engine(target, save_head(tmp_path / "head", head), method="eagle"))
    plain = know_grammars(make_engine(target, None, num_speculative_tokens=0))
    common = SamplingParams(max_tokens=8, temperature=temperature, seed=3, logprobs=2)
    params = [
        structs.replace(common, grammar=GRAMMAR),
        structs.replace(common, logit_bias={0: 100.0}),
        structs.replace(common, min_tokens=5, stop_token_ids=[3, 5], presence_penalty=1.0),
        common,
    ]
    found, alone = (logprobs_of(each, params) for each in (core, plain))
    assert found == alone
    assert core.stats.drafts["eagle"].num_draft_tokens > 10


def logprobs_of(core: EngineCore, params: list[SamplingParams]) -> list[list[tuple[int, float]]]:
    """Returns each text's tokens with their log-probabilities, rounded as sums in another order may be."""
    found: list[list[tuple[int, float]]] = [[] for _ in params]
    for number, each in enumerate(params):
        core.add(Generate(str(number), [1, 0, 2], each))
    while core.has_work:
        for output in stepped(core):
            known = [(one.token_id, round(one.logprob, 3)) for one in output.logprobs or []]
            found[int(output.request_id)] += known
    return found


def tap_off_by_one(patch: pytest.MonkeyPatch) -> None:
    honest = EagleConfig.taps
    patch.setattr(
        EagleConfig, "taps", lambda self, num_layers: tuple(tap + 1 for tap in honest(self, num_layers - 1))
    )


def tap_one_too_low(patch: pytest.MonkeyPatch) -> None:
    honest = EagleConfig.taps
    patch.setattr(
        EagleConfig, "taps", lambda self, num_layers: tuple(tap - 1 for tap in honest(self, num_layers))
    )


MUTANTS: list[tuple[str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("drafts", own_states_after_acceptance),
    ("drafts", state_before_the_last),
    ("drafts", fed_one_token_short),
    ("drafts", tap_off_by_one),
    ("accepted", state_before_the_last),
    ("accepted", tap_off_by_one),
    ("accepted", tap_one_too_low),
    ("hits", places_are_found_by_their_own_tokens),
]


@pytest.mark.parametrize(("gate", "plant"), MUTANTS)
def test_planted_bugs_are_caught(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, gate: str, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        GATES[gate](trained, engine(trained))


def changed(
    trained: Trained, to: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
) -> str:
    """Saves the head with other tensors or another config."""
    to.mkdir()
    tensors = load_file(Path(trained.path, "model.safetensors"))
    config = json.loads(Path(trained.path, "config.json").read_text())
    change(tensors, config)
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(config))
    return str(to)


def said(name: str, value: Any) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]:
    return lambda tensors, config: config.setdefault("eagle_config", {}).update({name: value})


ABSOLUTE = torch.tensor([0, 2, 3])
REFUSED: dict[str, Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]] = {
    "does not use, such as 'more'": lambda tensors, config: tensors.update(more=torch.ones(1)),
    "lacks the tensor 'norm.weight'": lambda tensors, config: tensors.pop("norm.weight"),
    r"must be \[64, 192\]": lambda tensors, config: tensors.update({"fc.weight": torch.ones(64, 128)}),
    "drafts 3 of the target's 40 tokens": lambda tensors, config: config.update(draft_vocab_size=3),
    "its distance to another one": lambda tensors, config: (
        config.update(draft_vocab_size=3),
        tensors.update({"d2t": ABSOLUTE + 37, "lm_head.weight": torch.ones(3, 64)}),
    ),
    "d2t and t2d": lambda tensors, config: (
        config.update(draft_vocab_size=3),
        tensors.update({"d2t": ABSOLUTE, "t2d": torch.arange(40) < 3, "lm_head.weight": torch.ones(3, 64)}),
    ),
    "one layer of the type llama or qwen3": lambda tensors, config: config.update(num_hidden_layers=2),
    "the target has layers 1 to 4": lambda tensors, config: config.update(
        eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}
    ),
    r"has eagle_aux_hidden_state_layer_ids \[2, 3.5\]": lambda tensors, config: config.update(
        eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3.5]}
    ),
    "config.json.*literal": lambda tensors, config: config.update(draft_vocab_size="many"),
    "hidden_act 'gelu' are not known": lambda tensors, config: config.update(hidden_act="gelu"),
    "has use_last_layernorm = False; only True is served": said("use_last_layernorm", False),
    "has next_layer_regular = False; only True is served": said("next_layer_regular", False),
    "has parallel_drafting = True; only False is served": said("parallel_drafting", True),
    "has parallel_draft_step = 4; only 0 or 1 is served": said("parallel_draft_step", 4),
    "has use_mtp_layernorm = True; only False": said("use_mtp_layernorm", True),
    "has use_aux_hidden_state = False; only True": said("use_aux_hidden_state", False),
    "has embedding_scale = 2, which is not known of a head": said("embedding_scale", 2),
    "has quantization_config = .*, which is not known": said("quantization_config", {"quant_method": "fp8"}),
    "for a target with target_hidden_size 32": said("target_hidden_size", 32),
    "EAGLE's first versions": lambda tensors, config: config.update(architectures=["EagleLlamaForCausalLM"]),
    "'eagle3' are served": lambda tensors, config: config.update(speculators_model_type="dflash"),
}


def test_settings_that_say_what_is_done_anyway_change_nothing(trained: Trained, tmp_path: Path) -> None:
    """Model Optimizer writes these into its heads' files, and transformers the others."""
    of_a_head = {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }
    of_transformers = {"transformers_version": "4.51.0", "torch_dtype": "bfloat16", "use_cache": True}
    of_transformers |= {"diversity_penalty": 0.0, "num_beams": 1, "rope_scaling": None, "head_dim": None}

    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        config |= {name: config.get(name) or value for name, value in of_transformers.items()}
        config.setdefault("eagle_config", {}).update(of_a_head)

    engine(trained, changed(trained, tmp_path / "head", change))


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_no_head_for_the_target_is_refused(trained: Trained, tmp_path: Path, words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        engine(trained, changed(trained, tmp_path / "head", REFUSED[words]))


def test_drafts_that_are_no_head_are_left_to_loading(tmp_path: Path) -> None:
    """A GGUF file has no config.json, and a path to nothing gets loading's words."""
    file = tmp_path / "draft.gguf"
    file.write_bytes(b"GGUF")
    for path in (str(file), str(tmp_path), str(tmp_path / "nothing"), "~/nothing/of/that/name"):
        assert read_eagle_config(path) is None


def test_who_drafts_is_known_from_the_folder(trained: Trained) -> None:
    assert drafting_method(trained.path) == "eagle"
    assert [drafting_method(draft) for draft in (trained.target, "self:int4")] == ["draft_model"] * 2
    with pytest.raises(ModelLoadError, match="is no EAGLE-3 head"):
        make_engine(trained.target, None, method="eagle")

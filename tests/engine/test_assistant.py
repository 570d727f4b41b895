"""Gemma 4's assistants draft what transformers drafts with them, and what is emitted is the target's."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from tests.assistants import FULL, SHAPES, Pair, Shape, fit, save_assistant, save_gguf, save_pair
from tests.engine.gates import PROMPTS
from tests.engine.grammars import END, VOCAB_SIZE, enumerated
from tests.engine.head_runs import traces_of
from tests.engine.test_check import run_check
from tests.engine.test_mtp_law import KINDS, RULES, Enumerated, law_is_the_targets
from tests.engine.test_replay import traced
from tests.engine.test_replay_heads import reports_of
from tests.models import make_engine, run_engine, save_random_llama, stepped
from truedraft.engine.build import drafting_method, load_draft
from truedraft.engine.commands import check
from truedraft.engine.commands.replay_round import Outcome
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.proposer import Observation
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import Generate, RoundTrace, SamplingParams
from truedraft.engine.models.heads import assistant, assistant_file
from truedraft.engine.models.heads.assistant import AssistantRunner, FreshAssistant
from truedraft.engine.models.heads.assistant_file import load_assistant
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.native.quantised import QuantisedLinear
from truedraft.engine.proposers.assistant import AssistantProposer
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.lone import LoneText

GREEDY = SamplingParams(max_tokens=16, temperature=0, method="assistant")
# Prompts that are longer than a chunk and than windows, and the beginnings of which are found in the cache.
TEXTS = [*PROMPTS[:4], [*range(30), 7], [*range(30), 8], [*range(28), 8, 8]]
EXACT = LoadOptions(compact_weights=False)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Returns the pair of a shape, made once."""
    root, made = tmp_path_factory.mktemp("pairs"), dict[str, Pair]()

    def get(name: str) -> Pair:
        if name not in made:
            made[name] = save_pair(root / str(len(made)), SHAPES[name])
        return made[name]

    return get


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Makes a pair whose assistant has learned the target's greedy texts."""
    pair = save_pair(tmp_path_factory.mktemp("fitted"), SHAPES["two sizes of heads"], seed=3)
    plain = run_engine(make_engine(pair.target, None), TEXTS, structs.replace(GREEDY, method=None))
    fit(pair, [prompt + output for prompt, output in zip(TEXTS, plain, strict=True)])
    return pair


def engine(pair: Pair, **config: Any) -> EngineCore:
    """Makes one with short chunks of prompts, so that a text's states come in pieces."""
    return make_engine(pair.target, pair.path, **{"method": "auto", "max_num_batched_tokens": 12, **config})


def proposer_of(core: EngineCore) -> AssistantProposer:
    (proposer,) = core.scheduler.proposers
    assert isinstance(proposer, AssistantProposer)
    return proposer


def drafts_are_transformers(pair: Pair, core: EngineCore, texts: Sequence[list[int]] = TEXTS) -> int:
    """Returns how many drafts were accepted."""
    num_compared = num_accepted = 0
    for text, rounds in traces_of(core, texts, GREEDY):
        num_compared += len(rounds)
        num_accepted += compared(pair, text, rounds)
    assert num_compared > 20
    return num_accepted


def compared(pair: Pair, text: list[int], rounds: list[RoundTrace]) -> int:
    for one in rounds:
        expected, _ = pair.draft(text[: one.position], len(one.draft_ids))
        assert one.draft_ids == expected, (one.position, one.draft_ids, expected)
    return sum(one.num_accepted for one in rounds)


def neighbours_change_no_draft(pair: Pair, core: EngineCore) -> None:
    texts, rounds = [list(text) for text in TEXTS], list[list[RoundTrace]]([] for _ in TEXTS)
    for number, text in enumerate(texts):
        core.add(Generate(str(number), list(text), structs.replace(GREEDY, trace=True)))
    while core.has_work:
        for output in stepped(core):
            number = int(output.request_id)
            texts[number] += output.token_ids
            rounds[number] += [output.trace] if output.trace and output.trace.draft_ids else []
    assert sum(map(len, rounds)) > 20
    for text, of_text in zip(texts, rounds, strict=True):
        compared(pair, text, of_text)


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("native_kernels", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_drafts_are_those_of_transformers(
    pairs: Callable[[str], Pair], name: str, native_kernels: bool
) -> None:
    pair = pairs(name)
    core = engine(pair, native_kernels=native_kernels)
    runner = proposer_of(core).runner
    assert isinstance(runner.fast_pass, NativeDecoder) == native_kernels
    assert runner.model.cache_bytes_per_token == 0
    drafts_are_transformers(pair, core, TEXTS if native_kernels else TEXTS[2:5])
    assert core.scheduler.num_prefix_hits > 0 or not native_kernels


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("native_kernels", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_transformers(
    pairs: Callable[[str], Pair], name: str, native_kernels: bool
) -> None:
    pair, options = pairs(name), replace(EXACT, native_kernels=native_kernels)
    target = load_model(pair.target, options)
    fresh = FreshAssistant(target, load_assistant(pair.path, target, options))
    for text in ([3, 5], TEXTS[2], TEXTS[4], TEXTS[3]):
        drafts, expected = pair.draft(text, 4)
        lone = LoneText(GREEDY, Rule.EXACT_MATCH, token_ids=text)
        found = fresh.following(lone, drafts[:-1], target.vocab_size)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


def is_accepted(pair: Pair, core: EngineCore) -> None:
    """An assistant that has learned these texts guesses most first tokens of them."""
    firsts = [one.num_accepted > 0 for _, rounds in traces_of(core, TEXTS, GREEDY) for one in rounds]
    assert sum(firsts) > 0.4 * len(firsts) > 0


def test_a_fitted_one_is_accepted(fitted: Pair) -> None:
    core = engine(fitted)
    is_accepted(fitted, core)
    assert drafts_are_transformers(fitted, core) > 5


def test_neighbours_change_no_draft(fitted: Pair) -> None:
    neighbours_change_no_draft(fitted, engine(fitted))


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection", "block"])
def test_text_is_the_same_with_and_without(fitted: Pair, rule: str) -> None:
    """Few blocks and short chunks, so that sequences are preempted and beginnings taken over."""
    core, plain = engine(fitted), make_engine(fitted.target, None)
    (pool,) = {core.scheduler.target_pool, *core.scheduler.draft_pools}
    pool.__init__(22, 4)  # type: ignore[misc]
    params = [
        GREEDY
        if rule == "greedy"
        else structs.replace(GREEDY, max_tokens=24, temperature=1.1, seed=seed, verification=rule)
        for seed in range(len(TEXTS))
    ]
    found = run_engine(core, TEXTS, params)
    assert core.stats.drafts["assistant"].num_draft_tokens > 100
    assert core.scheduler.num_preemptions > 0
    assert pool.usage == 0
    if rule in ("greedy", "coupled"):  # the others draw from the same law, as the next test shows
        alone = [structs.replace(each, method="none") for each in params]
        assert found == run_engine(plain, TEXTS, alone)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Enumerated]:
    """Makes a pair whose texts can be enumerated."""
    shape = replace(SHAPES["layers that read, and clusters"], clusters=(3, 2))
    sizes = {"vocab_size": VOCAB_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE, "eos_token_id": END}
    pair = save_pair(tmp_path_factory.mktemp("small"), shape, **sizes)
    texts = {kind: enumerated(pair.target, params) for kind, params in KINDS.items()}
    return pair, Enumerated(pair.target, texts)


@pytest.mark.parametrize("rule", RULES)
def test_texts_have_the_law_of_the_target(small: tuple[Pair, Enumerated], rule: Any) -> None:
    pair, target = small
    law_is_the_targets(target, rule, list(KINDS), RULES[rule], draft=pair.path, method="assistant")


# --- Planted bugs ------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def position_advances(patch: Patch) -> None:
    """Each drafted token moves the query on by one."""
    honest, passes = assistant.AssistantRunner.next_token, list[int]()

    def next_token(self: AssistantRunner, tables: Any, ids: Any, states: Any) -> Any:
        passes.append(0 if isinstance(ids, list) else passes[-1] + 1)
        moved = self.model.weights.rotary.module
        moved.number = passes[-1]
        self.fast_pass = None
        self.model.weights.rotary.table = None
        return honest(self, tables, ids, states)

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, *kind: str) -> Any:
        return self.rotary(x, position_ids + 1 + getattr(self, "number", 0), *kind)

    patch.setattr(AssistantRunner, "next_token", next_token)
    patch.setattr(assistant_file._OnePlaceOn, "forward", forward)


def position_of_the_last_stored_token(patch: Patch) -> None:
    patch.setattr(
        assistant_file._OnePlaceOn,
        "forward",
        lambda self, x, position_ids, *kind: self.rotary(x, position_ids, *kind),
    )


def keys_of_the_first_layers(patch: Patch) -> None:
    honest = assistant_file._Reader._places

    def places(self: Any) -> tuple[int, ...]:
        shapes = self.target.weights.attention
        windows = [shapes[place].sliding_window for place in honest(self)]
        return tuple(next(each.layer for each in shapes if each.sliding_window == one) for one in windows)

    patch.setattr(assistant_file._Reader, "_places", places)


def state_of_the_neighbour(patch: Patch) -> None:
    honest = AssistantRunner.next_token

    def next_token(self: AssistantRunner, tables: Any, ids: Any, states: Any) -> Any:
        return honest(self, tables, ids, [*states[1:], states[0]])

    patch.setattr(AssistantRunner, "next_token", next_token)


def state_one_token_old(patch: Patch) -> None:
    """The state before the last accepted token is kept."""
    honest = AssistantProposer.observe

    def observe(self: AssistantProposer, observations: list[Observation]) -> None:
        honest(self, observations)
        for seen in observations:
            if seen.hidden is not None and len(seen.hidden) > 1:
                self._last[seen.sequence] = (self._last[seen.sequence][0], seen.hidden[-2].clone())

    patch.setattr(AssistantProposer, "observe", observe)


def state_after_rejected_drafts(patch: Patch) -> None:
    """The first token's state of a pass is kept, as if all drafts had been rejected."""
    honest = AssistantProposer.observe

    def observe(self: AssistantProposer, observations: list[Observation]) -> None:
        honest(self, observations)
        for seen in observations:
            if seen.hidden is not None and seen.first >= seen.sequence.num_prompt_tokens:
                self._last[seen.sequence] = (self._last[seen.sequence][0], seen.hidden[0].clone())

    patch.setattr(AssistantProposer, "observe", observe)


def key_of_the_pending_token(patch: Patch) -> None:
    """A slot is looked at in which nothing, or a rejected draft, is stored."""

    def seen(table: BlockTable) -> BlockTable:
        copied = BlockTable()
        copied.block_ids, copied.num_computed_tokens = table.block_ids, table.num_computed_tokens
        return copied

    patch.setattr(assistant, "_seen", seen)


MUTANTS: list[tuple[Callable[[Pair, EngineCore], Any], Callable[[Patch], None]]] = [
    (drafts_are_transformers, position_advances),
    (drafts_are_transformers, position_of_the_last_stored_token),
    (drafts_are_transformers, keys_of_the_first_layers),
    (drafts_are_transformers, state_one_token_old),
    (drafts_are_transformers, state_after_rejected_drafts),
    (drafts_are_transformers, key_of_the_pending_token),
    (neighbours_change_no_draft, state_of_the_neighbour),
]


@pytest.mark.parametrize(("gate", "plant"), MUTANTS)
def test_planted_bugs_are_caught(
    fitted: Pair, monkeypatch: Patch, gate: Callable[[Pair, EngineCore], Any], plant: Callable[[Patch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        gate(fitted, engine(fitted))


# --- What does not fit -------------------------------------------------------------------------------------


def changed(pair: Pair, to: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]) -> str:
    """Saves the assistant with other tensors or another config."""
    to.mkdir()
    tensors = load_file(Path(pair.path, "model.safetensors"))
    config = json.loads(Path(pair.path, "config.json").read_text())
    change(tensors, config)
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(config))
    return str(to)


def said(name: str, value: Any) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]:
    return lambda tensors, config: config.update({name: value})


def said_of_text(name: str, value: Any) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]:
    return lambda tensors, config: config["text_config"].update({name: value})


REFUSED: dict[str, Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]] = {
    "for a target with hidden_size 40; this one has 32": said("backbone_hidden_size", 40),
    "for a target with vocab_size 50; this one has 48": said_of_text("vocab_size", 50),
    r"window \[16, 2, 9\]; this target's last one has \[16, 2, 8\]": said_of_text("sliding_window", 9),
    r"of the type full_attention .* \[64, 2, None\]; .* \[32, 2, None\]": said_of_text(
        "per_layer_config", {"2": {"head_dim": 64}}
    ),
    "lacks the tensor 'post_projection.weight'": lambda tensors, config: tensors.pop(
        "post_projection.weight"
    ),
    "does not use, such as 'more'": lambda tensors, config: tensors.update(more=torch.ones(1)),
    "pre_projection.weight of the shape": lambda tensors, config: tensors.update(
        {"pre_projection.weight": torch.ones(64, 63)}
    ),
    "is not its embeddings": lambda tensors, config: tensors.update({"lm_head.weight": torch.ones(48, 64)}),
    "tie_word_embeddings false": said("tie_word_embeddings", False),
    "the type gemma4_unified_assistant; those of gemma4_assistant": said(
        "model_type", "gemma4_unified_assistant"
    ),
    "is a quantised assistant": said("quantization_config", {"quant_method": "fp8"}),
    "hidden_size_per_layer_input must be 0": said_of_text("hidden_size_per_layer_input", 8),
    "lacks the tensor 'masked_embedding.token_ordering'|masked_embedding.centroids": said(
        "use_ordered_embeddings", True
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_fit_the_target_is_refused(fitted: Pair, tmp_path: Path, words: str) -> None:
    path = changed(fitted, tmp_path / "changed", REFUSED[words])
    with pytest.raises(ModelLoadError, match=words) as refusal:
        engine(Pair(fitted.target, path))
    assert "\n" not in str(refusal.value)


def test_ids_of_clusters_must_be_the_targets(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    def twice(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["masked_embedding.token_ordering"][0] = tensors["masked_embedding.token_ordering"][1]

    pair = pairs("layers that read, and clusters")
    for number, change in enumerate((twice, said("centroid_intermediate_top_k", 13))):
        path = changed(pair, tmp_path / str(number), change)
        with pytest.raises(ModelLoadError, match="each of the target's 48 ids once, in 12 clusters"):
            engine(Pair(pair.target, path))


def test_another_family_is_no_target(fitted: Pair, tmp_path: Path) -> None:
    target = save_random_llama(tmp_path / "llama", 1, vocab_size=48)
    with pytest.raises(ModelLoadError, match="for a target with model_type gemma4_text; this one has llama"):
        engine(Pair(target, fitted.path))


def test_who_drafts_is_known_from_the_folder(fitted: Pair) -> None:
    assert drafting_method(fitted.path) == "assistant"
    with pytest.raises(ModelLoadError, match="is no assistant of Gemma 4"):
        make_engine(fitted.target, None, method="assistant")
    with pytest.raises(ModelLoadError, match="draft_vocab_size and draft_vocab_file are of heads"):
        engine(fitted, draft_vocab_size=20)


def test_ranks_are_refused_before_weights_are_read(fitted: Pair) -> None:
    settings = EngineConfig(target=fitted.target, draft=fitted.path, device="cpu", tensor_parallel_size=2)
    target = load_model(fitted.target, EXACT)
    with pytest.raises(ModelLoadError, match="no rank has whole: leave out tensor_parallel_size"):
        load_draft(settings, target)


def test_one_that_lies_next_to_the_target_is_tried(fitted: Pair, tmp_path: Path) -> None:
    """It is measured as it drafts."""
    target, drafter = tmp_path / "gemma-4-tiny", tmp_path / "gemma-4-tiny-assistant"
    shutil.copytree(fitted.target, target)
    save_assistant(drafter, fitted.target, Shape({}, (FULL,), hidden=16))  # smaller than its target
    core = make_engine(str(target), "auto", method="auto", num_speculative_tokens="auto")
    (line,) = [line for line in core.tried if line.startswith(f"{drafter}: ")]
    assert "times the speed" in line
    assert "not tried" not in "".join(core.tried)
    if core.drafter is not None:
        assert proposer_of(core).runner.vocab_size == 48


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("cache_dtype", ["float16", "int8"])
def test_caches_of_fewer_bits(fitted: Pair, cache_dtype: str) -> None:
    """What is stored is read as the target reads it; greedy text stays the target's."""
    core = engine(fitted, cache_dtype=cache_dtype, dtype="auto")
    plain = make_engine(fitted.target, None, cache_dtype=cache_dtype, dtype="auto")
    assert core.target.model.cache_dtype == plain.target.model.cache_dtype != torch.float32
    found = run_engine(core, TEXTS, GREEDY)
    assert found == run_engine(plain, TEXTS, structs.replace(GREEDY, method=None))
    drafts = core.stats.drafts["assistant"]
    assert drafts.num_accepted_tokens > 0.1 * drafts.num_draft_tokens > 0


# --- GGUF files --------------------------------------------------------------------------------------------


def logits_of(pair: Pair, path: str, text: list[int], drafts: list[int]) -> torch.Tensor:
    target = load_model(pair.target, EXACT)
    fresh = FreshAssistant(target, load_assistant(path, target, EXACT))
    return fresh.following(LoneText(GREEDY, Rule.EXACT_MATCH, token_ids=text), drafts, target.vocab_size)


@pytest.mark.parametrize("name", ["two sizes of heads", "experts, and keys that are values"])
def test_files_are_the_assistants_they_were_made_from(
    pairs: Callable[[str], Pair], tmp_path: Path, name: str
) -> None:
    pair, path = pairs(name), tmp_path / "mtp-gemma.gguf"
    save_gguf(path, pair)
    text, drafts = TEXTS[3], [3, 5]
    found = logits_of(pair, str(path), text, drafts)
    assert torch.equal(found, logits_of(pair, pair.path, text, drafts))
    assert drafting_method(str(path)) == "assistant"
    drafts_are_transformers(pair, engine(Pair(pair.target, str(path))))


@pytest.mark.usefixtures("needs_compiler")
def test_blocks_are_multiplied_as_they_are_stored(fitted: Pair, tmp_path: Path) -> None:
    """Inputs are rounded to 8 bits, so that logits are not quite those of the weights."""
    path = tmp_path / "model.gguf"
    save_assistant(tmp_path / "wide", fitted.target, SHAPES["two sizes of heads"], inner=64)
    wide = Pair(fitted.target, str(tmp_path / "wide"))
    module = save_gguf(path, wide, kind="Q8_0")
    object.__setattr__(wide, "modules", (wide.modules[0], module))
    core = engine(Pair(fitted.target, str(path)), dtype="auto")
    weights = proposer_of(core).runner.model.weights
    assert all(isinstance(linear, QuantisedLinear) for linear in weights.linears)
    num_equal = num_drafts = 0
    for text, rounds in traces_of(core, TEXTS, GREEDY):
        for one in rounds:
            num_equal += one.draft_ids[0] == wide.draft(text[: one.position], 1)[0][0]
            num_drafts += 1
    assert num_equal > 0.8 * num_drafts > 10


SAME: dict[str, Any] = {
    "attention.shared_kv_layers": [0, None],
    "final_logit_softcapping": [30.0],
    "nextn_predict_layers": [None],
}
REFUSED_KEYS: list[tuple[str, Any, str]] = [
    ("nextn_predict_layers", 1, "nextn_predict_layers = 1; only 3 is served"),
    ("attention.shared_kv_layers", 2, "shared_kv_layers = 2; only 0 or 3 is served"),
    ("embedding_length_out", None, "does not say the size of its target's states"),
    ("embedding_length_out", 40, "for a target with hidden_size 40"),
    ("embedding_length_per_layer_input", 8, "lacks|hidden_size_per_layer_input"),
    ("attention.sliding_window", 7, "the window"),
    ("attention.sliding_window_pattern", None, "sliding_window_pattern"),
    ("attention.head_count_kv", 4, "number and the window"),
    ("rope.scaling.type", "yarn", "scales its positions"),
    ("a_key_of_tomorrow", 1, "a_key_of_tomorrow"),
]


def test_keys_that_change_nothing(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    pair = pairs("two sizes of heads")
    expected = logits_of(pair, pair.path, [3, 5, 7], [2])
    files = [{key: value} for key, values in SAME.items() for value in values]
    clusters = {"masked_embd_centroids.weight": np.ones((4, 64)), "masked_embd_ordering": np.ones(48)}
    for number, keys in enumerate([*files, {}]):
        path = tmp_path / f"{number}.gguf"
        save_gguf(path, pair, keys, {} if keys else clusters)
        assert torch.equal(logits_of(pair, str(path), [3, 5, 7], [2]), expected)


@pytest.mark.parametrize(("key", "value", "words"), REFUSED_KEYS)
def test_keys_that_are_refused(
    pairs: Callable[[str], Pair], tmp_path: Path, key: str, value: Any, words: str
) -> None:
    pair, path = pairs("two sizes of heads"), tmp_path / "model.gguf"
    save_gguf(path, pair, {key: value})
    with pytest.raises(ModelLoadError, match=words):
        engine(Pair(pair.target, str(path)))


def test_tensors_that_are_refused(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    pair = pairs("two sizes of heads")
    for name, tensor, words in (
        ("nextn.pre_projection.weight", None, "lacks the tensor 'pre_projection.weight'"),
        ("blk.1.attn_q.weight", None, "lacks the tensor 'model.layers.1.self_attn.q_proj.weight'"),
        ("blk.0.more.weight", np.ones((32, 64)), "has the tensor blk.0.more.weight"),
        ("rope_freqs.weight", None, "rope_freqs.weight"),
        ("output_norm.weight", np.ones(63), "of the shape"),
    ):
        path = tmp_path / "model.gguf"
        save_gguf(path, pair, None, {name: tensor})
        with pytest.raises(ModelLoadError, match=words):
            engine(Pair(pair.target, str(path)))


# --- Commands ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled", "exact_match"])
def test_a_trace_verifies(fitted: Pair, rule: str) -> None:
    """Another assistant is refused."""
    params = {"temperature": 0} if rule == "exact_match" else {"verification": rule, "temperature": 1.3}
    config = {"method": "auto", "num_speculative_tokens": 3}
    answer = traced(fitted.target, fitted.path, config=config, max_tokens=12, method="assistant", **params)
    reports = reports_of(answer, (fitted.target, fitted.path))
    assert [report.findings for report in reports if report.findings] == []
    drafted = [token for report in reports for token in report.round.drafted]
    assert any(0 < token.draft_prob < 1 for token in drafted) == (rule != "exact_match")


def test_another_assistant_is_refused(fitted: Pair, tmp_path: Path) -> None:
    save_assistant(tmp_path / "other", fitted.target, SHAPES["two sizes of heads"], seed=9)
    config = {"method": "auto", "num_speculative_tokens": 3}
    answer = traced(
        fitted.target, fitted.path, config=config, max_tokens=12, method="assistant", temperature=1.3
    )
    reports = reports_of(answer, (fitted.target, str(tmp_path / "other")))
    assert Outcome.WRONG in {report.outcome for report in reports}


def test_check_says_that_it_is_exact(
    fitted: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(check, "PROMPTS", check.PROMPTS[:2])
    code, report = run_check(fitted.target, fitted.path, capsys)
    assert code == 0
    assert report["exact"]
    assert report["greedy"]["differences"] == []
    assert [result["verification"] for result in report["sampling"]] == ["rejection", "block", "coupled"]
    assert all(speed["acceptance_rate"] > 0 for speed in report["speeds"] if speed["temperature"] == 0)

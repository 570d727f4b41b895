"""Vectors and scores are those of transformers' own modules, and have the same bits in any batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from tests.gguf_models import save_gguf
from tests.vector_models import (
    CLASSIFIERS,
    DECODER,
    DECODERS,
    ENCODERS,
    texts_of,
    write_model,
    write_modules,
)
from truedraft.engine.config import EngineConfig
from truedraft.engine.embedding.core import EmbedCore
from truedraft.engine.embedding.load import Loaded, load_vectors
from truedraft.engine.embedding.task import task_of
from truedraft.engine.embedding.vectors import pool
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers.attention import AttentionCall
from truedraft.engine.memory.batch import AttentionGroup
from truedraft.engine.messages import Embed, Embedded, Failed, Task, Text
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.native.library import load_library

LENGTHS = (1, 9, 33, 34, 60, 100)
WAYS = [pytest.param(True, id="C"), pytest.param(False, id="torch")]


def load(folder: Path, task: Task | None = None, **settings: Any) -> Loaded:
    config = EngineConfig(target=str(folder), device="cpu", **settings)
    return load_vectors(config, task or task_of(str(folder)))


def states_by_transformers(model: Any, ids: list[int], second_from: int | None = None) -> torch.Tensor:
    kinds = {}
    if second_from is not None and getattr(model.config, "type_vocab_size", 0) > 1:
        kinds["token_type_ids"] = torch.tensor([[int(i >= second_from) for i in range(len(ids))]])
    with torch.no_grad():
        states: torch.Tensor = model(input_ids=torch.tensor([ids]), **kinds).last_hidden_state[0]
    return states


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    # transformers' own float32 is up to 2e-4 of the largest number away from its float64; a mask makes 0.3.
    return torch.allclose(ours, theirs, rtol=0, atol=1e-3 * float(theirs.abs().max()))


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("family", ENCODERS)
def test_states_are_those_of_transformers(tmp_path: Path, family: str, native: bool) -> None:
    model = write_model(tmp_path, *ENCODERS[family])
    loaded = load(tmp_path, native_kernels=native)
    assert loaded.task == "embed"
    assert loaded.way.endswith("in C" if native and load_library() is not None else "in torch")
    texts = texts_of(*LENGTHS)
    for ids, states in zip(texts, loaded.model.states([Text(ids) for ids in texts]), strict=True):
        assert same(states, states_by_transformers(model, ids)), len(ids)


@pytest.mark.parametrize("family", ENCODERS)
def test_bits_do_not_depend_on_the_batch(tmp_path: Path, family: str) -> None:
    write_model(tmp_path, *ENCODERS[family])
    loaded = load(tmp_path)
    if loaded.way.endswith("torch"):
        pytest.skip("only kernels in C compute the same bits in any batch")
    texts = [Text(ids) for ids in texts_of(*LENGTHS, 5, 17, 49)]
    alone = [loaded.vectors(loaded.model.states([text])[0]) for text in texts]
    for size in (2, 3, 5, len(texts)):
        for order in (texts, texts[::-1]):
            found = [
                loaded.vectors(states)
                for start in range(0, len(order), size)
                for states in loaded.model.states(order[start : start + size])
            ]
            expected = alone if order is texts else alone[::-1]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), size


def test_padding_within_a_text_has_a_position_of_its_own(tmp_path: Path) -> None:
    model = write_model(tmp_path, *ENCODERS["roberta"])
    ids = [5, 6, 1, 7, 1, 1, 8]
    (states,) = load(tmp_path).model.states([Text(ids)])
    # transformers would not look at padding, unless a mask says that it is there.
    with torch.no_grad():
        mask = torch.ones(1, len(ids), dtype=torch.long)
        expected = model(input_ids=torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
    assert same(states, expected)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_scores_are_those_of_the_classifier(tmp_path: Path, family: str) -> None:
    model = write_model(tmp_path, *CLASSIFIERS[family], num_labels=1)
    loaded = load(tmp_path)
    assert loaded.task == "rerank"
    for ids in texts_of(7, 40):
        second = 4
        kinds = {}
        if model.config.model_type == "bert":
            kinds["token_type_ids"] = torch.tensor([[int(i >= second) for i in range(len(ids))]])
        with torch.no_grad():
            logit = model(input_ids=torch.tensor([ids]), **kinds).logits[0]
        (states,) = loaded.model.states([Text(ids, second)])
        assert torch.allclose(loaded.vectors(states), logit.sigmoid(), atol=1e-4)
        assert torch.allclose(loaded.vectors(states, normalizes=False), logit, atol=1e-3)


def test_the_second_text_of_a_pair_counts(tmp_path: Path) -> None:
    write_model(tmp_path, *CLASSIFIERS["bert"], num_labels=1)
    loaded = load(tmp_path)
    scores = {
        loaded.vectors(loaded.model.states([Text(texts_of(9)[0], at)])[0]).item() for at in (None, 3, 5)
    }
    assert len(scores) == 3


@pytest.mark.parametrize("kind", ["whole", "bare"])
def test_a_decoder_gives_the_state_of_its_last_token(tmp_path: Path, kind: str) -> None:
    model = write_model(tmp_path, DECODERS[kind], Qwen3Config, DECODER)
    write_modules(tmp_path, {"pooling_mode_lasttoken": True, "include_prompt": True}, ("Normalize", {}))
    loaded = load(tmp_path)
    assert loaded.task == "embed"
    base = getattr(model, "model", model)
    texts = texts_of(1, 20, 70)
    for ids, states in zip(texts, loaded.model.states([Text(ids) for ids in texts]), strict=True):
        expected = F.normalize(states_by_transformers(base, ids)[-1], dim=0)
        assert same(loaded.vectors(states), expected)


def test_a_chat_model_makes_vectors_if_asked(tmp_path: Path) -> None:
    model = write_model(tmp_path, DECODERS["whole"], Qwen3Config, DECODER)
    assert task_of(str(tmp_path)) == "generate"
    loaded = load(tmp_path, "embed")
    (ids,) = texts_of(12)
    (states,) = loaded.model.states([Text(ids)])
    expected = F.normalize(states_by_transformers(model.model, ids)[-1], dim=0)
    assert same(loaded.vectors(states), expected)


def test_a_decoder_with_a_classifier_scores(tmp_path: Path) -> None:
    model = write_model(
        tmp_path, DECODERS["classifier"], Qwen3Config, {**DECODER, "pad_token_id": 0}, num_labels=1
    )
    loaded = load(tmp_path)
    assert loaded.task == "rerank"
    (ids,) = texts_of(12)
    (states,) = loaded.model.states([Text(ids)])
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0].sigmoid()
    assert torch.allclose(loaded.vectors(states), expected, atol=1e-4)


def test_a_decoder_scores_by_its_next_token(tmp_path: Path) -> None:
    model = write_model(tmp_path, DECODERS["whole"], Qwen3Config, DECODER)
    loaded = load(tmp_path, "rerank")
    (ids,) = texts_of(12)
    (states,) = loaded.model.states([Text(ids)])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
    yes, no = 4, 5
    assert torch.allclose(loaded.vectors(states), logits[[yes, no]].softmax(0)[:1], atol=1e-4)
    assert "{document}" in loaded.facts.pair_template


def test_a_decoder_that_is_asked_in_unknown_words_is_refused(tmp_path: Path) -> None:
    """A pair that is written otherwise than in training has some score, which means nothing."""
    write_model(tmp_path, LlamaForCausalLM, LlamaConfig, DECODER)
    with pytest.raises(ModelLoadError, match="how llama models are asked"):
        load(tmp_path, "rerank")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    write_model(folder, *ENCODERS["bert"])
    return folder


def test_poolings() -> None:
    states = torch.tensor([[1.0, 8.0], [3.0, 2.0], [5.0, -1.0], [7.0, 3.0]])
    expected = {
        "cls": [1, 8],
        "lasttoken": [7, 3],
        "max": [7, 8],
        "mean": [4, 3],
        "mean_sqrt_len_tokens": [8, 6],
        "weightedmean": [(1 + 6 + 15 + 28) / 10, (8 + 4 - 3 + 12) / 10],
    }
    for mode, vector in expected.items():
        assert torch.allclose(pool(mode, states), torch.tensor(vector, dtype=torch.float)), mode


def test_files_say_how_vectors_are_made(bert: Path, tmp_path: Path) -> None:
    """Pooling in both spellings, several modes together, a dense layer, prompts, and no normalisation."""
    for file in bert.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    dense = {"in_features": 128, "out_features": 8, "bias": True, "activation_function": "torch.nn.Tanh"}
    pooling = {
        "pooling_mode_cls_token": True,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
    }
    write_modules(
        tmp_path,
        pooling,
        ("Dense", dense),
        prompts={"query": "q: ", "empty": ""},
        default_prompt_name="query",
    )
    weight, bias = torch.randn(8, 128), torch.randn(8)
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")
    (tmp_path / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 50, "do_lower_case": True})
    )
    loaded = load(tmp_path)
    (ids,) = texts_of(11)
    (states,) = loaded.model.states([Text(ids)])
    both = torch.cat([states[0], states.mean(0)])
    assert torch.allclose(loaded.vectors(states), torch.tanh(weight @ both + bias), atol=1e-5)
    assert loaded.max_tokens == 50
    facts = loaded.facts
    assert (facts.size, facts.prompts, facts.default_prompt) == (8, {"query": "q: "}, "query")
    assert facts.lower_cases
    assert load(tmp_path, max_model_len=100).max_tokens == 100


def test_dimensions_come_before_the_length(bert: Path) -> None:
    loaded = load(bert)
    (states,) = loaded.model.states([Text(texts_of(11)[0])])
    whole, short = loaded.vectors(states, normalizes=False), loaded.vectors(states, 16)
    assert torch.allclose(short, F.normalize(whole[:16], dim=0))
    assert short.norm().item() == pytest.approx(1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another module": ({"modules": [("LSTM", {})]}, "LSTM"),
    "another way of pooling": ({"pooling": {"pooling_mode": "attention"}}, "'attention'"),
    "no way of pooling": ({"pooling": {"word_embedding_dimension": 64}}, "no way of pooling"),
    "prompts that are not pooled": (
        {"pooling": {"pooling_mode": "mean", "include_prompt": False}},
        "include_prompt",
    ),
    "another activation": (
        {"modules": [("Dense", {"activation_function": "torch.nn.modules.activation.Mish"})]},
        "Mish",
    ),
    "too long texts": ({"settings": {"max_model_len": 131}}, "only 130 tokens"),
    "a draft": ({"settings": {"draft": "x"}}, "leave out draft"),
    "fewer bits": ({"settings": {"quantize": "int8"}}, "leave out quantize"),
    "no classifier": ({"task": "rerank"}, "cannot rerank"),
    "another activation of the layers": ({"config": {"hidden_act": "swish"}}, "'swish'"),
    "relative positions": ({"config": {"position_embedding_type": "relative_key"}}, "'relative_key'"),
    "a missing weight": ({"drop": "encoder.layer.1.output.dense.weight"}, "lacks weights"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(bert: Path, tmp_path: Path, name: str) -> None:
    case, words = REFUSED[name]
    for file in bert.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if "modules" in case or "pooling" in case:
        write_modules(tmp_path, case.get("pooling"), *case.get("modules", ()))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | case.get("config", {})))
    if "drop" in case:
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors[case["drop"]]
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=words):
        load(tmp_path, case.get("task", "embed"), **case.get("settings", {}))


def test_several_classes_are_no_score(tmp_path: Path) -> None:
    write_model(tmp_path, *CLASSIFIERS["bert"], num_labels=3)
    with pytest.raises(ModelLoadError, match="no classifier of one score"):
        load(tmp_path)


# The core decides what is computed when.


def test_requests_share_passes_text_by_text(bert: Path) -> None:
    core = EmbedCore(load(bert), most_tokens=40)
    many = [Text(ids) for ids in texts_of(*[10] * 20)]
    core.add(Embed("long", many, tenant="a"))
    assert core.step() == []
    core.add(Embed("short", many[:1], tenant="b"))
    (answer,) = core.step()
    assert isinstance(answer, Embedded)
    assert answer.request_id == "short"
    answers = []
    while core.has_work:
        answers += core.step()
    (whole,) = answers
    assert isinstance(whole, Embedded)
    assert len(whole.vectors) == 20
    assert whole.vectors[0] == answer.vectors[0]


def test_a_text_alone_may_be_longer_than_a_pass(bert: Path) -> None:
    core = EmbedCore(load(bert), most_tokens=8)
    core.add(Embed("x", [Text(texts_of(100)[0]), Text([5, 6])]))
    assert core.step() == []
    (answer,) = core.step()
    assert isinstance(answer, Embedded)
    assert not core.has_work


def test_lower_priority_goes_first_and_an_abort_is_final(bert: Path) -> None:
    core = EmbedCore(load(bert), most_tokens=8)
    for name, priority in (("b", 1), ("a", 0), ("c", 2)):
        core.add(Embed(name, [Text([5, 6, 7, 8, 9])], priority=priority))
    core.abort("c")
    core.abort("unknown")
    order = [answer.request_id for _ in range(2) for answer in core.step()]
    assert order == ["a", "b"]
    assert not core.has_work


def test_no_number_is_a_failure_of_its_own_request(bert: Path) -> None:
    loaded = load(bert)
    words = loaded.model.embeddings.words
    words.weight[9] = torch.nan  # type: ignore[attr-defined]
    core = EmbedCore(loaded, most_tokens=100)
    core.add(Embed("good", [Text([5, 6])]))
    core.add(Embed("bad", [Text([5, 9]), Text([5, 6])]))
    found = {answer.request_id: type(answer) for answer in core.step()}
    assert found == {"good": Embedded, "bad": Failed}
    assert not core.has_work


# Planted bugs.


def causal(call: AttentionCall) -> AttentionCall:
    return AttentionCall(call.layer, call.scaling, call.sliding_window, call.softcap, call.sinks)


def _vectors(folder: Path, native: bool) -> list[torch.Tensor]:
    loaded = load(folder, native_kernels=native)
    texts = [Text(ids) for ids in texts_of(9, 50)]
    return [loaded.vectors(states) for states in loaded.model.states(texts)]


def test_a_causal_mask_is_found_at_load(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that hides later tokens makes other states, in torch's layers and in those in C."""
    monkeypatch.setattr(AttentionGroup, "mask_ahead", AttentionGroup.mask)
    with pytest.raises(ModelLoadError, match="its states are not those"):
        load(bert, native_kernels=False)
    monkeypatch.setattr(
        "truedraft.engine.families.encoders.AttentionShape",
        lambda **fields: __import__("truedraft.engine.layers.run", fromlist=["x"]).AttentionShape(
            **{**fields, "looks_ahead": False}
        ),
    )
    with pytest.raises(ModelLoadError, match="its states are not those"):
        load(bert)


def test_a_neighbours_token_is_seen_in_the_bits(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of batches fails if pooling takes in one more token."""
    loaded = load(bert)
    texts = [Text(ids) for ids in texts_of(9, 12)]
    alone = [loaded.vectors(loaded.model.states([text])[0]) for text in texts]
    lengths = [len(text.token_ids) for text in texts]
    packed = torch.cat(loaded.model.states(texts))
    shifted = [packed[1 : lengths[0] + 1], packed[lengths[0] - 1 :]]
    assert not any(
        torch.equal(loaded.vectors(states), vector) for states, vector in zip(shifted, alone, strict=True)
    )


@pytest.mark.parametrize(("number", "mode"), [(1, "mean"), (3, "lasttoken")])
def test_a_gguf_file_that_pools(tmp_path: Path, number: int, mode: str) -> None:
    config = Qwen3Config(**DECODER)
    file = tmp_path / "model.gguf"
    module = save_gguf(file, config, **{"qwen3.pooling_type": number})
    assert task_of(str(file)) == "embed"
    loaded = load(file)
    (ids,) = texts_of(20)
    (states,) = loaded.model.states([Text(ids)])
    expected = F.normalize(pool(mode, states_by_transformers(module.model, ids)), dim=0)
    assert loaded.vectors(states) @ expected > 0.995  # inputs of layers are rounded to 8 bits


def test_a_gguf_file_does_not_rerank(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    save_gguf(file, Qwen3Config(**DECODER), **{"qwen3.pooling_type": 3})
    with pytest.raises(ModelLoadError, match="does not rerank"):
        load(file, "rerank")
    with pytest.raises(ModelLoadError, match="task embed serves"):
        load_model(str(file), LoadOptions())

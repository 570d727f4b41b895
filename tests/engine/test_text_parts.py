"""Multimodal checkpoints: their text part is served, with the logits of transformers' whole model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING

from tests.models import make_engine, run_engine
from tools.family_table import TEXT, TOLERANCE, logits, save, tiny_config
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models import text_part
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.hf.module import load_causal_model
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions

GREEDY = SamplingParams(max_tokens=8, temperature=0)
FUSED = ("gemma3", "gemma4", "idefics3", "llava_next", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")
# Their text part is of no fused family: transformers' own forward runs it.
BY_LAYERS = ("aya_vision", "glm4v", "qwen3_vl_moe")

# Tensors have these names on the hub, by transformers' names: layouts that it renames.
HUB_NAMES: dict[str, dict[str, str]] = {
    "gemma3": {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "llava_next": {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "mistral3": {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "qwen2_5_vl": {"model.language_model.": "model.", "model.visual.": "visual."},
    "qwen2_vl": {"model.language_model.": "model.", "model.visual.": "visual."},
}

Saved = tuple[Path, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """The folder of a tiny checkpoint, and transformers' logits of the text; made once."""
    root, made = tmp_path_factory.mktemp("text-parts"), {}

    def get(model_type: str) -> Saved:
        if model_type not in made:
            folder = root / model_type
            expected, reason = save(tiny_config(model_type), str(folder))
            assert expected is not None, reason
            made[model_type] = folder, expected
        return made[model_type]

    return get


def deviation(folder: Path, expected: torch.Tensor, options: LoadOptions | None = None) -> float:
    got = logits(load_model(str(folder), options or LoadOptions()))
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("model_type", FUSED)
def test_ordinary_decoders_are_fused(saved: Callable[[str], Saved], model_type: str) -> None:
    folder, expected = saved(model_type)
    assert isinstance(load_model(str(folder), LoadOptions()), FusedDecoder)
    assert deviation(folder, expected) < TOLERANCE


@pytest.mark.parametrize("model_type", BY_LAYERS)
def test_others_are_run_by_transformers(saved: Callable[[str], Saved], model_type: str) -> None:
    folder, expected = saved(model_type)
    assert deviation(folder, expected) < TOLERANCE


@pytest.mark.parametrize("model_type", HUB_NAMES)
def test_layouts_of_the_hub(saved: Callable[[str], Saved], tmp_path: Path, model_type: str) -> None:
    folder, expected = saved(model_type)
    tensors = load_file(folder / "model.safetensors")
    renamed = {_renamed(name, HUB_NAMES[model_type]): tensor for name, tensor in tensors.items()}
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_text((folder / file).read_text())
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert isinstance(load_model(str(tmp_path), LoadOptions()), FusedDecoder)
    assert deviation(tmp_path, expected) < TOLERANCE


def _renamed(name: str, names: dict[str, str]) -> str:
    ours = next((ours for ours in names if name.startswith(ours)), "")
    return name.replace(ours, names.get(ours, ""), 1)


def test_the_reference_of_check_is_the_text_part(saved: Callable[[str], Saved]) -> None:
    folder, expected = saved("qwen3_vl")
    module = load_causal_model(str(folder), LoadOptions(), "eager")
    with torch.inference_mode():
        got = module(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    assert torch.allclose(got, expected, atol=1e-4)
    names = [name for name, _ in module.named_parameters()]
    assert not [name for name in names if "visual" in name]


def test_what_sees_is_not_read(saved: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it missed: the other parts' tensors are no leftovers, whichever way loads."""
    for model_type in ("gemma3", "aya_vision"):
        folder, _ = saved(model_type)
        with safe_open(folder / "model.safetensors", "pt") as opened:
            shapes = {name: opened.get_tensor(name).shape for name in opened.keys()}  # noqa: SIM118
        seeing = [name for name in shapes if "vision" in name or "projector" in name]
        assert seeing
        zeros = {name: torch.zeros(shapes[name]) for name in seeing}
        tensors = load_file(folder / "model.safetensors")
        before = logits(load_model(str(folder), LoadOptions()))
        save_file(tensors | zeros, folder / "model.safetensors", metadata={"format": "pt"})
        assert torch.equal(logits(load_model(str(folder), LoadOptions())), before)


def test_gemma_3_is_quantised_and_drafts_for_itself(saved: Callable[[str], Saved]) -> None:
    folder, expected = saved("gemma3")
    assert load_model(str(folder), LoadOptions(quantize="int4")).is_quantised
    plain = run_engine(make_engine(str(folder), None, dtype="auto"), [TEXT], GREEDY)
    drafted = make_engine(str(folder), "self:int4", dtype="auto", num_speculative_tokens=3)
    assert run_engine(drafted, [TEXT], GREEDY) == plain
    assert drafted.stats.num_draft_tokens > 0


def test_ends_of_either_config_are_taken(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    """The wrapper's list of ends is served, whichever way loads."""
    for model_type in ("gemma3", "aya_vision"):
        folder, _ = saved(model_type)
        config: Any = tiny_config(model_type)
        config.eos_token_id = [1, 7]
        config.save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        assert load_model(str(tmp_path), LoadOptions()).eos_token_ids == {1, 7}


def test_a_wrong_twin_is_noticed(saved: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: positions of Qwen3-VL's text are rotated by another base."""
    folder, expected = saved("qwen3_vl")
    honest = text_part.ordinary_decoder

    def other(config: Any) -> Any:
        plain = honest(config)
        plain.rope_parameters["rope_theta"] *= 2
        return plain

    monkeypatch.setattr("truedraft.engine.models.architecture.ordinary_decoder", other)
    assert deviation(folder, expected) > TOLERANCE


def test_every_wrapper_has_a_class() -> None:
    """A name that transformers does not know would never be compared."""
    known = {config.model_type for config in MODEL_FOR_MULTIMODAL_LM_MAPPING}
    assert set(text_part.PLAIN_INSIDE) <= known


def test_a_model_that_does_not_write_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelLoadError, match="vit models do not write text"):
        load_model(str(tmp_path), LoadOptions())

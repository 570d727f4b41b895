"""Hybrid families compute transformers' logits, however a text is cut, and no cut changes a bit.

The text has 200 tokens: the logits of each are those of a prompt that ends there.
"""

import json
import shutil
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families import VOCAB_SIZE, save_random
from tests.hybrids import HYBRID, HYBRIDS
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.load import check_config, load_model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.native.library import load_library

IDS = torch.randint(0, VOCAB_SIZE, (200,), generator=torch.Generator().manual_seed(1)).tolist()
BLOCK_SIZE, NUM_BLOCKS = 4, len(IDS) // 4
# Sizes of passes: few tokens at a time, which cross every chunk's end in another way, then long ones.
CUTS: list[list[int]] = [[len(IDS)], [*range(1, 10), 1, 1, 1, 16, 7, 40, 33, 56]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a family, made once."""
    root, folders = tmp_path_factory.mktemp("hybrids"), {}

    def get(family: str) -> str:
        if family not in folders:
            folders[family] = save_random(root / str(len(folders)), *HYBRIDS[family])
        return str(folders[family])

    return get


def logits_in(model: Model, sizes: list[int]) -> torch.Tensor:
    runner = ModelRunner.build(model, NUM_BLOCKS, BLOCK_SIZE, num_state_slots=2)
    table = BlockTable()
    table.block_ids, table.state_slot = list(range(NUM_BLOCKS))[::-1], 1
    found, start = [], 0
    for size in chain(sizes, repeat(1)):
        if start == len(IDS):
            return torch.cat(found)
        found.append(runner.forward([Span(table, IDS[start : start + size], size)]).logits)
        start += size
    raise AssertionError


@torch.inference_mode()
def expected_logits(module: Any) -> torch.Tensor:
    logits: torch.Tensor = module(input_ids=torch.tensor([IDS])).logits[0]
    return logits


@pytest.mark.parametrize("family", HYBRIDS)
def test_logits_are_those_of_transformers(folder: Callable[[str], str], family: str) -> None:
    path = folder(family)
    expected = expected_logits(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    ).float()
    model = load_model(path, LoadOptions())
    assert isinstance(model, FusedDecoder)
    # Kernels in C that deviate would not be used.
    assert model.is_native == (load_library() is not None)
    whole, *others = (logits_in(model, cut) for cut in CUTS)
    assert (whole - expected).abs().max() < 1e-4 * expected.abs().max()
    for logits in others:
        assert torch.equal(logits, whole) or not model.is_native


@pytest.mark.parametrize("model_type", ["lfm2", "lfm3"])
def test_layers_may_all_be_convolutions(model_type: str, tmp_path: Path) -> None:
    """Nothing is turned then; transformers' own cache does not know such a model of LFM3."""
    path = save_random(tmp_path, model_type, {**HYBRID, "layer_types": ["conv"] * 3})
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        expected = module(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    for native in (True, False):
        found = logits_in(load_model(path, LoadOptions(native_kernels=native)), CUTS[1])
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_steps_have_the_limits_of_the_makers(folder: Callable[[str], str], tmp_path: Path) -> None:
    """transformers keeps Nemotron-H's steps in prompts above a number that was for the beginning of training;
    in ``time_step_limit`` the others see a limit."""
    path = Path(shutil.copytree(folder("Nemotron-H"), tmp_path / "model"))
    found = [logits_in(load_model(str(path), LoadOptions()), CUTS[0])]
    config = json.loads((path / "config.json").read_text())
    for change in ({"time_step_min": 1.0}, {"time_step_limit": [1.0, 2.0]}):
        (path / "config.json").write_text(json.dumps(config | change))
        found.append(logits_in(load_model(str(path), LoadOptions()), CUTS[0]))
    assert torch.equal(found[0], found[1])
    assert (found[0] - found[2]).abs().max() > 0.1


QWEN, NEMOTRON = "Qwen3.5, a value head for each key head", "Nemotron-H with experts"
# Changes of configs, and what is said of them. transformers' own layers cannot serve the model, either.
UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    (QWEN, {"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid' cannot be served: only silu"),
    (QWEN, {"hidden_act": "gelu"}, "hidden_act 'gelu' cannot be served: only silu"),
    ("Qwen3-Next", {"shared_expert_intermediate_size": 0}, "has shared_expert_intermediate_size 0"),
    ("Granite 4 H", {"hidden_act": "gelu"}, "hidden_act 'gelu' cannot be served: only silu"),
    (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' cannot be served: only relu2"),
    (NEMOTRON, {"layers_block_type": ["moe"] * 4}, "nemotron_h models without a mixer of tokens cannot"),
    (NEMOTRON, {"moe_latent_size": 16}, "moe_latent_size 16 cannot be served: only None"),
    (NEMOTRON, {"n_group": 2}, "n_group 2 cannot be served: only 1"),
    (
        "Falcon-H1",
        {"mamba_rms_norm": True},
        "with mamba_rms_norm and mamba_norm_before_gate cannot be served",
    ),
    ("Falcon-H1", {"attention_bias": True}, "with attention_bias and attention_in_multiplier 1.3 cannot be"),
]


@pytest.mark.parametrize(("family", "change", "words"), UNKNOWN)
def test_settings_that_are_not_known_are_named(
    family: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model_type, values = HYBRIDS[family]
    path = tmp_path / "config.json"
    (tmp_path / "model.safetensors").touch()
    config = AutoConfig.for_model(model_type, **values)
    config.save_pretrained(tmp_path)
    check_config(str(tmp_path), LoadOptions())
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelLoadError, match=words):
        check_config(str(tmp_path), LoadOptions())

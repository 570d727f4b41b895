"""Every ``cache_memory`` serves that holds a block and a state, and less is refused in a sentence."""

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.hybrids import HYBRIDS
from tests.models import save_random_llama, stepped
from tests.seq2seq_models import save_random_seq2seq
from truedraft.engine import build
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.rounds import calibrate
from truedraft.engine.speculation.costs import PassCosts

BLOCK_SIZE = 16
FAMILIES = ("LFM2", "Qwen3.5, two value heads for each key head", "Granite 4 H", "Falcon-H1", "LFM3")
# States of a sequence and blocks of all layers.
BUDGETS = (
    (1, 0),
    (1, 1),
    (1, 2),
    (1, 30),
    (1.5, 0),
    (2, 1),
    (2, 100),
    (3, 4),
    (3.3, 0),
    (3, 100),
    (6, 17),
    (8, 90),
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"max_num_sequences": 3},
    {"max_num_sequences": 1},
    {"draft": "itself"},
)
PARAMS = SamplingParams(max_tokens=8, temperature=0)
PROMPTS = [3, 1, 4, 1, 5], [3, 1, 4, 1, 5] * 6


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "calibrate", partial(calibrate.calibrate, seconds=0.002))


def save_hybrid(folder: Path, family: str) -> str:
    kind, settings = HYBRIDS[family]
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**settings, "max_position_embeddings": 2048})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def served(config: EngineConfig) -> int:
    """Returns how many of the prompts fit; those are continued to their ends."""
    core = build.build_engine(config)
    count = 0
    for number, prompt in enumerate(PROMPTS):
        with suppress(RequestError):
            core.add(Generate(str(number), prompt, PARAMS))
            count += 1
    for _ in range(200):
        if not core.has_work:
            return count
        stepped(core)
    raise AssertionError("the engine does not come to an end")


def results(monkeypatch: pytest.MonkeyPatch, folder: str, settings: dict[str, Any]) -> list[int]:
    """Returns how many prompts each budget serves that holds a block and the states of a sequence; the others
    must be refused."""
    more = {name: folder if value == "itself" else value for name, value in settings.items()}
    config = partial(EngineConfig, target=folder, **more)
    models = build.load_models(config(), lambda stage: None)
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(build, "load_models", lambda config, begin: models)
        loaded = [model for model in (models.target, models.draft) if model is not None]
        state = sum(model.state_bytes_per_sequence for model in loaded)
        block = BLOCK_SIZE * sum(model.cache_bytes_per_token for model in loaded)
        for states, blocks in BUDGETS:
            memory = int(states * state) + blocks * block
            if memory < state + block:
                with pytest.raises(ModelLoadError, match="do not hold one block"):
                    build.build_engine(config(cache_memory=max(1, memory)))
            else:
                found.append(served(config(cache_memory=memory)))
    return found


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hybrid_is_served_in_whatever_holds_one_state_and_one_block(
    family: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = results(monkeypatch, save_hybrid(tmp_path, family), settings)
    assert min(found) == 1
    assert found.count(len(PROMPTS)) > len(found) // 2


@pytest.mark.parametrize("family", ["llama", "t5", "bart"])
def test_so_are_models_without_states(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if family == "llama":
        folder = save_random_llama(tmp_path, seed=1, context=2048)
    else:
        folder = save_random_seq2seq(tmp_path, family, seed=1)
    found = results(monkeypatch, folder, {"max_num_sequences": 3})
    assert max(found) == len(PROMPTS)


@pytest.mark.parametrize("planted", ["slots are not counted", "nothing is assumed"])
def test_what_is_not_looked_at_is_found(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_hybrid(tmp_path, FAMILIES[1])
    counted = BlockPool.has_slots

    def has_slots(pool: BlockPool, num_tables: int) -> bool:
        is_asked_ahead = sys._getframe(1).f_code.co_name == "_measure"
        return is_asked_ahead or counted(pool, num_tables)

    if planted == "slots are not counted":
        monkeypatch.setattr(BlockPool, "has_slots", has_slots)
    else:
        monkeypatch.setattr(calibrate, "PassCosts", lambda points, *rest: PassCosts({}, *rest))
    with pytest.raises((IndexError, KeyError)):
        results(monkeypatch, folder, SETTINGS[0])

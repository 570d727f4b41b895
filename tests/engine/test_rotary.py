"""The table of angles grows with the positions that texts reach, and its bits do not depend on how."""

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.engine.native_pair import make_twins, save_pair
from tests.models import make_engine, run_engine
from truedraft.engine.core.step import Round, StepPlan
from truedraft.engine.layers import rotary as rotary_module
from truedraft.engine.layers.rotary import Rotary
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import SamplingParams
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.rounds.native_loop import NativeLoop
from truedraft.engine.rows.table import Row

Patch = pytest.MonkeyPatch
SHAPE = {"hidden_size": 320, "num_attention_heads": 4, "num_hidden_layers": 6, "vocab_size": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
NUM_POSITIONS = 2000


def gemma() -> Rotary:
    config = Gemma3TextConfig(**SHAPE, head_dim=96, max_position_embeddings=NUM_POSITIONS)
    return Rotary(Gemma3RotaryEmbedding(config), config, torch.empty(0))


def llama(**settings: Any) -> Rotary:
    config = LlamaConfig(**SHAPE, max_position_embeddings=NUM_POSITIONS, **settings)
    return Rotary(LlamaRotaryEmbedding(config), config, torch.empty(0))


@pytest.mark.parametrize(
    "make",
    [llama, lambda: llama(rope_parameters=YARN), lambda: llama(rope_parameters=DYNAMIC), gemma],
    ids=["one kind", "YaRN", "dynamic", "two kinds"],
)
def test_a_table_that_has_grown_is_the_one_made_at_once(make: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(rotary_module, "GROWTH", 7)
    rotary = make()
    reached = [rotary.reach(end) for end in (0, 1, 3, 8, 500, 20, 1996, NUM_POSITIONS, NUM_POSITIONS + 1)]
    assert reached == [0, 7, 7, 14, 504, 504, 2000, NUM_POSITIONS, NUM_POSITIONS]
    at_once = rotary.compute(torch.arange(NUM_POSITIONS))
    assert all(torch.equal(*pair) for pair in zip(rotary.table, at_once, strict=True))


def test_angles_are_there_when_they_are_asked_for(monkeypatch: Patch) -> None:
    monkeypatch.setattr(rotary_module, "GROWTH", 16)
    rotary = llama()
    positions = torch.tensor([40, 3, 39])
    for angles, expected in zip(rotary.angles(positions), rotary.compute(positions), strict=True):
        assert torch.equal(angles, expected)
    assert rotary.num_reached == 48


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, needs_compiler: None) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("pair"))


def test_texts_are_those_of_a_whole_table(pair: tuple[str, str], monkeypatch: Patch) -> None:
    """Rounds of C reach further positions than the step before, of the draft model, too."""
    prompts, params = [[1, 2, 3], [4] * 8], SamplingParams(max_tokens=90, temperature=0)
    whole, _ = make_twins(*pair)
    expected = run_engine(whole, prompts, params)
    honest = NativeLoop.run

    def run_rounds(self: NativeLoop, plan: StepPlan, rows: list[Row]) -> list[Round]:
        assert (rounds := honest(self, plan, rows)), "logits were no distribution: phases do the step instead"
        return rounds

    monkeypatch.setattr(NativeLoop, "run", run_rounds)
    monkeypatch.setattr(rotary_module, "GROWTH", 4)
    for core in make_twins(*pair):
        assert run_engine(core, prompts, params) == expected
        assert core.draft is not None
        for model in (core.target.model, core.draft.model):
            assert 90 < model.rotary.num_reached < 120  # type: ignore[attr-defined]


def test_a_position_that_is_not_reached_has_no_logits(pair: tuple[str, str], monkeypatch: Patch) -> None:
    """The place of the table holds anything there: nothing must be computed of it."""
    monkeypatch.setattr(rotary_module, "GROWTH", 4)
    core = make_engine(pair[0], None)
    assert isinstance(core.target.fast_pass, NativeDecoder)

    def logits() -> torch.Tensor:
        table = BlockTable()
        core.scheduler.target_pool.reserve(table, 8)
        return core.target.forward([Span(table, [1, 2, 3, 4, 5, 6], 6)]).logits.isnan().any(dim=1)

    with monkeypatch.context() as patch:
        patch.setattr(NativeDecoder, "reach", lambda self, num_positions: None)
        core.target.fast_pass.decoder.num_reached = 4
        assert logits().tolist() == [False] * 4 + [True] * 2
    assert not logits().any()

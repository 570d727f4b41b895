"""Captured passes of models with latent attention, whose experts come in groups, say what phases say.

Tapes stand in for CUDA graphs and ``torch_kernels`` for those in Triton, as in ``test_round_graphs``.
"""

from pathlib import Path

import pytest

from tests.engine.graph_gates import same_as_eager
from tests.engine.test_round_graphs import kernels_for
from tests.families import save_family
from tests.tape import TapeCapture
from truedraft.engine.cuda.grouped_experts import GroupedExperts
from truedraft.engine.cuda.grouped_heads import GroupedHeads
from truedraft.engine.layers.latent import LatentProjection
from truedraft.engine.models import agreement
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.rounds.capture import plan

FAMILIES = ("DeepSeek-V2 in C, groups of experts", "DeepSeek-V3 in C", "GLM-4.7-Flash in C")


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "make_capture", TapeCapture)
    monkeypatch.setattr(agreement, "find_kernels", kernels_for)


def test_same_logits_and_caches(tmp_path: Path, taped: None) -> None:
    """Rounds with the MTP head of GLM-4.7-Flash are in ``test_captured_heads``."""
    same_as_eager(save_family(tmp_path, "DeepSeek-V3 in C"), max_model_len=100)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_left_to_the_host(family: str, tmp_path: Path, taped: None) -> None:
    """Experts and heads have tables, so that layers of transformers are not preferred on a GPU."""
    model = load_model(save_family(tmp_path, family), LoadOptions(native_kernels=False))
    assert model.way == "fused layers in Triton"
    assert not model.runs_lone_experts  # type: ignore[attr-defined]
    assert not model.needs_host  # type: ignore[attr-defined]
    layers = model.weights.layers  # type: ignore[attr-defined]
    assert isinstance(layers[-1].mlp, GroupedExperts)
    for layer in layers:
        assert isinstance(layer.mixer.qkv, LatentProjection)
        assert isinstance(layer.mixer.qkv.key_up, GroupedHeads)
        assert isinstance(layer.mixer.qkv.value_up, GroupedHeads)

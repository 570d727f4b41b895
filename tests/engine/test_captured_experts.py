"""Captured rounds of models with experts say what phases say, which run expert by expert.

Tapes stand in for CUDA graphs and ``torch_kernels`` for those in Triton, as in ``test_round_graphs``.
"""

from dataclasses import replace

import pytest
import torch

from tests.engine import torch_kernels
from tests.engine.graph_gates import PROMPTS, graphs_of
from tests.engine.test_experts import SIZE, VARIANTS, experts
from tests.engine.test_round_graphs import kernels_for
from tests.families import FAMILIES, SHAPE, save_random
from tests.models import make_engine, run_engine
from tests.tape import TapeCapture
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.cuda.expert_tables import _group, _is_right
from truedraft.engine.cuda.grouped_experts import GroupedExperts
from truedraft.engine.layers.linear import Linear, TorchLinear, TorchLinears
from truedraft.engine.memory.batch import ForwardBatch
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models import agreement
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.runtime.cuda import plan
from truedraft.engine.runtime.cuda.rows import DeviceRows
from truedraft.engine.runtime.phases import PhaseRunner

Patch = pytest.MonkeyPatch
CPU = torch.device("cpu")
PARAMS = [
    SamplingParams(max_tokens=8, temperature=0),
    SamplingParams(max_tokens=8, temperature=0.9, seed=1, verification="rejection"),
    SamplingParams(max_tokens=8, temperature=1.2, seed=3),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    model_type, values = FAMILIES["Qwen3-MoE in C, one layer without experts"]
    return save_random(tmp_path_factory.mktemp("experts"), model_type, {**SHAPE, **values})


def engine(target: str, draft: str | None, monkeypatch: Patch | None) -> EngineCore:
    """Captures its rounds, or runs them expert by expert if there is nothing to patch."""
    if monkeypatch is not None:
        monkeypatch.setattr(plan, "make_capture", TapeCapture)
        monkeypatch.setattr(agreement, "find_kernels", kernels_for)
    config = {"native_kernels": False, "max_num_sequences": 4, "num_speculative_tokens": 2}
    return make_engine(target, draft, **config)


def is_grouped(core: EngineCore) -> bool:
    assert isinstance(core.target.model, FusedDecoder)
    return any(isinstance(layer.mlp, GroupedExperts) for layer in core.target.model.weights.layers)


def test_same_tokens(target: str, monkeypatch: Patch) -> None:
    eager = engine(target, target, None)
    core = engine(target, target, monkeypatch)
    assert (is_grouped(core), is_grouped(eager)) == (True, False)
    assert isinstance(eager.runner, PhaseRunner)
    assert graphs_of(core).draft is not None
    expected = run_engine(eager, PROMPTS[:3], PARAMS, [0, 1, 2])
    assert run_engine(core, PROMPTS[:3], PARAMS, [0, 1, 2]) == expected
    assert graphs_of(core).num_misses == 0


@pytest.mark.parametrize("is_padding_seen", [False, True])
def test_what_is_touched_is_counted(is_padding_seen: bool, target: str, monkeypatch: Patch) -> None:
    """A pass that holds more rows than there are reads the experts of these."""
    if is_padding_seen:
        batch = DeviceRows.batch

        def without(self: DeviceRows, *given: torch.Tensor) -> ForwardBatch:
            made = batch(self, *given)  # type: ignore[arg-type]
            made.is_there = None
            return made

        monkeypatch.setattr(DeviceRows, "batch", without)
    counts = []
    for patch in (None, monkeypatch):
        core = engine(target, None, patch)
        counted = core.target.model.touched
        assert counted is not None
        before = counted()
        run_engine(core, [[1, 2, 3], [5, 6, 7, 8], [2, 2]], PARAMS[0])
        counts.append([now - then for now, then in zip(counted(), before, strict=True)])
    assert (counts[0] == counts[1]) != is_padding_seen


def test_experts_that_are_not_alike_have_no_table() -> None:
    assert _group(experts(TorchLinears(), VARIANTS["biases and a clamped gate"]), torch.float32) is None
    part = experts(TorchLinears(), {})
    assert _group(part, torch.bfloat16) is None
    found = _group(part, torch.float32)
    assert found is not None
    assert _is_right(torch_kernels, found, torch.float32, CPU, 1e-5)

    def other(linear: Linear, weight: slice, multiplier: float) -> Linear:
        assert isinstance(linear, TorchLinear)
        return TorchLinear(linear.weight[weight], None, multiplier)

    last = part.experts[-1]
    unlike = [
        replace(last, down=other(last.down, weight, multiplier))
        for weight, multiplier in ((slice(1, None), 1.0), (slice(None), 2.0), (slice(None, None, 2), 1.0))
    ]
    for wrong in (*unlike, replace(last, activation="relu2"), replace(last, scales=torch.ones(2 * SIZE))):
        assert _group(replace(part, experts=(*part.experts[:-1], wrong)), torch.float32) is None

"""Captured rounds of models with experts say what phases say, which run expert by expert.

Tapes stand in for CUDA graphs and ``torch_kernels`` for those in Triton, as in ``test_round_graphs``.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.engine import torch_kernels
from tests.engine.graph_gates import PROMPTS, graphs_of, same_as_eager
from tests.engine.test_experts import HIDDEN, SIZE, experts
from tests.engine.test_gguf import CONFIGS
from tests.engine.test_round_graphs import kernels_for
from tests.families import FAMILIES, SHAPE, save_family, save_random
from tests.gguf_models import save_gguf
from tests.hybrids import HYBRIDS
from tests.models import make_engine, run_engine
from tests.tape import TapeCapture
from truedraft.engine.checkpoints.stacks import CHOICE_BIASES
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.cuda.expert_tables import _group, _is_right
from truedraft.engine.cuda.grouped_experts import GroupedExperts
from truedraft.engine.layers.linear import Linear, TorchLinear, TorchLinears
from truedraft.engine.layers.mlp import Experts
from truedraft.engine.memory.batch import ForwardBatch
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models import agreement
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.hf.module import load_causal_model
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.rounds.capture import plan
from truedraft.engine.rounds.capture.rows import DeviceRows
from truedraft.engine.rounds.round import RoundRunner

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
    assert isinstance(eager.runner, RoundRunner)
    assert eager.runner.graphs is None
    assert graphs_of(core).draft is not None
    expected = run_engine(eager, PROMPTS[:3], PARAMS, [0, 1, 2])
    assert run_engine(core, PROMPTS[:3], PARAMS, [0, 1, 2]) == expected
    assert graphs_of(core).num_misses == 0


@pytest.mark.parametrize("name", ["GPT-OSS, attention sinks", "GPT-OSS in C"])
def test_gpt_oss_is_captured(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """Its layers have sinks and, every other one, windows, its experts biases and clamped gates."""
    folder = save_family(tmp_path, name)
    monkeypatch.setattr(plan, "make_capture", TapeCapture)
    monkeypatch.setattr(agreement, "find_kernels", kernels_for)
    same_as_eager(folder, max_model_len=100)
    assert is_grouped(engine(folder, None, monkeypatch))


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
    part = experts(TorchLinears(), {})
    assert _group(part, torch.bfloat16) is None
    found = _group(part, torch.float32)
    assert found is not None
    assert _is_right(torch_kernels, found, torch.float32, CPU, 1e-5)

    def other(linear: Linear, weight: slice, multiplier: float, bias: torch.Tensor | None = None) -> Linear:
        assert isinstance(linear, TorchLinear)
        return TorchLinear(linear.weight[weight], bias, multiplier)

    last = part.experts[-1]
    unlike = [
        replace(last, down=other(last.down, weight, multiplier))
        for weight, multiplier in ((slice(1, None), 1.0), (slice(None), 2.0), (slice(None, None, 2), 1.0))
    ]
    unlike.append(replace(last, down=other(last.down, slice(None), 1.0, torch.ones(HIDDEN))))
    for wrong in (*unlike, replace(last, activation="relu2"), replace(last, scales=torch.ones(2 * SIZE))):
        assert _group(replace(part, experts=(*part.experts[:-1], wrong)), torch.float32) is None


@pytest.mark.parametrize("name", ["GLM-4.5 in C", "LFM2 with experts"])
def test_experts_are_chosen_in_float32(name: str, tmp_path: Path) -> None:
    """Biases of published models exceed 7, where numbers of bfloat16 are 0.03 apart, scores stay below 1."""
    model_type, values = (FAMILIES | HYBRIDS)[name]
    folder = save_random(tmp_path, model_type, {**SHAPE, **values})
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    biases = {name: 7 + torch.rand(4) for name in stored if name.endswith(CHOICE_BIASES)}
    save_file(stored | biases, file, metadata={"format": "pt"})
    model = load_model(folder, LoadOptions(dtype=torch.bfloat16, native_kernels=False))
    assert isinstance(model, FusedDecoder)
    routers = [layer.mlp.router for layer in model.weights.layers if isinstance(layer.mlp, Experts)]
    found = [router.choice_bias for router in routers]
    assert all(map(torch.equal, found, biases.values()))  # type: ignore[arg-type]
    x, checkpoint = torch.randn(3, 32).bfloat16(), load_file(file)
    weights = [checkpoint[name] for name in sorted(checkpoint) if name.endswith("mlp.gate.weight")]
    # LFM2's routers multiply in bfloat16.
    for router, weight in zip(routers, weights, strict=False):
        assert torch.equal(router.linear(x), F.linear(x.float(), weight.bfloat16().float()))


def test_experts_of_a_gguf_file_are_chosen_in_float32(tmp_path: Path) -> None:
    module = save_gguf(tmp_path / "model.gguf", CONFIGS["glm4moe"], "F32")
    found = load_causal_model(str(tmp_path / "model.gguf"), LoadOptions(dtype=torch.bfloat16), "eager")
    kept = {name: tensor for name, tensor in found.named_buffers() if name.endswith(CHOICE_BIASES)}
    assert kept
    for name, tensor in kept.items():
        assert torch.equal(tensor, module.get_buffer(name))
        assert not torch.equal(tensor, tensor.bfloat16())

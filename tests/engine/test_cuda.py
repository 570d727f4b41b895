"""The gates of exactness on a GPU: ``pytest -m cuda``. Skipped where there is none.

The same gates as everywhere else, with engines on the device in float32, where greedy text must be identical;
what bfloat16 does to a real pair's text is measured by ``benchmarks.gpu``, not asserted.
"""

import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.messages import Generate, SamplingParams
from engine.models.in_place_attention import find_kernel
from engine.models.layer_parts import AttentionShape
from engine.models.llama import Llama
from engine.models.step_graphs import StepGraphs
from tests.engine import gates, graph_gates, test_distribution, triton_gates
from tests.engine.conftest import Models
from tests.engine.test_distribution import Pair, p_values, pair
from tests.engine.test_llama import save
from tests.engine.test_step_graphs import STATIC
from tests.models import make_engine, run_engine

__all__ = ["pair"]  # a fixture

DEVICE = "cuda"
pytestmark = [
    pytest.mark.cuda,
    # By torch, where it is turned on for the first time.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

# Most of these engines live for a second: few of their passes are worth a capture.
make_engine_here = partial(make_engine, device=DEVICE, cuda_graph_seconds=1)


@pytest.fixture(autouse=True)
def engines_on_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (gates, graph_gates, test_distribution):
        monkeypatch.setattr(module, "make_engine", make_engine_here)
    yield
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def test_engines_are_on_the_device(models: Models) -> None:
    assert gates.make_engine(models.target, None).target.device.type == DEVICE


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=40, temperature=0), gates.PENALTIES], ids=["greedy", "penalties"]
)
def test_greedy_text_is_the_same_with_drafts(models: Models, params: SamplingParams) -> None:
    gates.greedy_identity(models, params)


def test_greedy_text_is_the_cpus(models: Models) -> None:
    params = SamplingParams(max_tokens=40, temperature=0)
    on_cpu = run_engine(make_engine(models.target, None), gates.PROMPTS, params)
    drafted = make_engine_here(models.target, models.close_draft, num_speculative_tokens=4)
    assert run_engine(drafted, gates.PROMPTS, params) == on_cpu


def test_the_target_as_its_own_draft_is_always_accepted(models: Models) -> None:
    gates.self_draft_is_always_accepted(models)


def test_ends_at_the_first_stop(models: Models) -> None:
    gates.ends_at_the_first_stop(models)


def test_seeded_text_is_the_same_with_drafts(models: Models) -> None:
    gates.seeded_identity(models)


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_sampled_text_has_the_targets_distribution(pair: Pair, verification: str) -> None:
    assert min(p_values(pair, 4000, 256, verification)) > test_distribution.SIGNIFICANCE


@pytest.mark.parametrize("name", STATIC)
def test_graphs_compute_what_the_usual_passes_do(name: str, tmp_path: Path) -> None:
    folder = save(STATIC[name], tmp_path)
    graph_gates.same_as_eager(folder, tolerance=1e-3, max_model_len=100, cuda_graph_seconds=20)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_graphs_in_16_bits(dtype: str, models: Models) -> None:
    graph_gates.same_as_eager(models.target, tolerance=0.15, dtype=dtype, cuda_graph_seconds=20)


@pytest.mark.parametrize("draft", ["none", "close_draft"])
def test_graphs_say_what_the_usual_passes_say(draft: str, models: Models) -> None:
    path = getattr(models, draft, None)
    graphed = make_engine_here(models.target, path, cuda_graph_seconds=20)
    eager = make_engine_here(models.target, path, cuda_graphs=False)
    for params in (SamplingParams(max_tokens=40, temperature=0), SamplingParams(max_tokens=40, seed=1)):
        graph_gates.same_tokens(graphed, eager, [params] * len(graph_gates.PROMPTS))


WAITING_ROWS = {
    "greedy": SamplingParams(max_tokens=40, temperature=0),
    "coupled": SamplingParams(max_tokens=40, temperature=1.1, seed=1),
    "rejection": SamplingParams(max_tokens=40, temperature=0.8, top_k=5),
    "top-p": SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9),
    "penalties": gates.PENALTIES,
}


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("params", WAITING_ROWS.values(), ids=WAITING_ROWS.keys())
def test_the_host_waits_twice_a_round(
    params: SamplingParams, cuda_graphs: bool, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the drafts, when all of them are drawn, and for the verdict."""
    core = make_engine_here(models.target, models.close_draft, cuda_graphs=cuda_graphs)
    tolist, reads = torch.Tensor.tolist, []

    def read(self: torch.Tensor) -> Any:
        if self.device.type == "cpu":
            return tolist(self)
        reads.append(self.shape)
        torch.cuda.set_sync_debug_mode("default")
        try:
            return tolist(self)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    core.add(Generate("0", [1, 2, 3], params))
    core.step()  # the prompt
    monkeypatch.setattr(torch.Tensor, "tolist", read)
    num_rounds = 0
    try:
        while core.has_work:
            torch.cuda.set_sync_debug_mode("error")
            core.step()
            num_rounds += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert core.stats.num_draft_tokens > num_rounds > 3
    assert len(reads) == 2 * num_rounds


def test_graphs_stay_within_their_time(models: Models) -> None:
    started = time.monotonic()
    core = make_engine_here(models.target, models.close_draft, cuda_graph_seconds=3)
    assert isinstance(core.target.fast_pass, StepGraphs)
    assert time.monotonic() - started < 30  # everything else included


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
KERNEL_CASES: dict[str, dict[str, Any]] = {
    "usual": {"longest": 300},
    "bfloat16": {"dtype": torch.bfloat16, "heads": (32, 8), "size": 128, "longest": 1000, "block_size": 16},
    "float16": {"dtype": torch.float16, "heads": (8, 8), "size": 64, "longest": 1000},
    "heads of 96": {"dtype": torch.bfloat16, "heads": (6, 2), "size": 96},
    "heads of 256": {"dtype": torch.bfloat16, "heads": (8, 1), "size": 256, "longest": 500},
    "a window": {"dtype": torch.bfloat16, "window": 70, "longest": 300},
    "more splits than keys": {"num_splits": 32, "longest": 20},
    "splits": {"dtype": torch.bfloat16, "num_splits": 7, "longest": 2000, "size": 128},
}


@needs_triton
@pytest.mark.parametrize("seed", range(2))  # every size of program is compiled
@pytest.mark.parametrize("case", KERNEL_CASES.values(), ids=KERNEL_CASES.keys())
def test_the_kernel_attends_like_gathering(case: dict[str, Any], seed: int) -> None:
    shape = AttentionShape(0, 8, 2, 64, 0.125, None, None)
    kernel = find_kernel([shape], torch.bfloat16, torch.device(DEVICE))
    assert kernel is not None
    triton_gates.same_as_gathered(kernel, seed, device=DEVICE, **case)


@needs_triton
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_engines_read_keys_in_place(dtype: str, models: Models) -> None:
    model = make_engine_here(models.target, None, dtype=dtype).target
    assert isinstance(model.model, Llama)
    assert model.model.reads_in_place

"""The gates of exactness on a GPU: ``pytest -m cuda``. Skipped where there is none.

The same gates as everywhere else, with engines on the device in float32, where greedy text must be identical.
"""

import random
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import gates, graph_gates, test_distribution, triton_gates
from tests.engine.conftest import Models
from tests.engine.test_distribution import Pair, p_values, pair
from tests.engine.test_gguf import CONFIGS
from tests.engine.test_llama import save
from tests.engine.test_round_graphs import PARAMS, STATIC
from tests.families import FAMILIES, SHAPE, save_random
from tests.gguf_models import save_gguf
from tests.hybrids import HYBRIDS
from tests.models import make_engine, run_engine, save_perturbed, save_random_llama
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.cuda.triton_run import find_kernels, is_right
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.rounds.capture.capture import CudaCapture

__all__ = ["pair"]  # a fixture

DEVICE = "cuda"
pytestmark = [
    pytest.mark.cuda,
    # torch warns where it is turned on for the first time.
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
    if DEVICE == "cuda" and not CudaCapture.has_failed:
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


@pytest.mark.parametrize("block_size", [4, 16])
def test_long_texts_are_the_same_with_drafts_and_on_a_cpu(block_size: int, tmp_path: Path) -> None:
    """Thousands of tokens; the last prompt begins like the first, which is in the cache by then."""
    target = save_random_llama(tmp_path / "target", seed=1, hidden=256, context=8192, std=0.1)
    draft = save_perturbed(tmp_path / "draft", target, seed=2, noise=0.005)
    lengths = {"max_model_len": 8000, "cache_memory": "256MiB", "block_size": block_size}
    tokens = random.Random(1)
    prompts = [[tokens.randrange(16) for _ in range(length)] for length in (6000, 3100, 1025, 7)]
    prompts.append(prompts[0][:5000] + [3, 1, 2])
    params = [
        SamplingParams(max_tokens=200, temperature=temperature, seed=seed)
        for seed, temperature in enumerate((0, 1, 0, 1, 0))
    ]
    arrivals = [0, 0, 20, 20, 120]
    on_cpu = run_engine(make_engine(target, None, **lengths), prompts, params, arrivals)
    plain = make_engine_here(target, None, **lengths)
    assert run_engine(plain, prompts, params, arrivals) == on_cpu
    drafted = make_engine_here(target, draft, **lengths, cuda_graph_seconds=20)
    assert run_engine(drafted, prompts, params, arrivals) == on_cpu
    assert drafted.stats.num_accepted_tokens > 200
    assert graph_gates.graphs_of(drafted).num_replays


@pytest.mark.parametrize("kind", ["Q5_1", "Q8_0"])
def test_gguf_files_say_what_they_say_dequantised_on_a_cpu(kind: str, tmp_path: Path) -> None:
    target, draft = str(tmp_path / "target.gguf"), str(tmp_path / "draft.gguf")
    save_gguf(Path(target), CONFIGS["qwen3"], kind)
    save_gguf(Path(draft), CONFIGS["qwen3"], "Q4_0")
    params = SamplingParams(max_tokens=60, temperature=0)
    on_cpu = run_engine(make_engine(target, None), gates.PROMPTS, params)
    assert run_engine(make_engine_here(target, draft), gates.PROMPTS, params) == on_cpu


@pytest.mark.parametrize(
    "name", ["Qwen3-MoE in C, one layer without experts", "LFM2", "Qwen3-Next", "DeepSeek-V3 in C"]
)
def test_experts_and_states_say_what_they_say_on_a_cpu(name: str, tmp_path: Path) -> None:
    model_type, values = (FAMILIES | HYBRIDS)[name]
    folder = save_random(tmp_path, model_type, {**SHAPE, **values})
    params = SamplingParams(max_tokens=40, temperature=0)
    on_cpu = run_engine(make_engine(folder, None), gates.PROMPTS, params)
    drafted = make_engine_here(folder, folder, num_speculative_tokens=3, cuda_graph_seconds=10)
    assert run_engine(drafted, gates.PROMPTS, params) == on_cpu
    assert graph_gates.graphs_of(drafted).num_replays


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


def test_graphs_of_a_draft_model(models: Models) -> None:
    graph_gates.same_as_eager(models.target, tolerance=1e-3, is_draft=True, cuda_graph_seconds=20)


@pytest.fixture(scope="module")
def twins(models: Models) -> tuple[EngineCore, EngineCore]:
    """With graphs and without."""
    config = {"max_num_sequences": 6, "device": DEVICE, "cuda_graph_seconds": 60}
    return (
        make_engine(models.target, models.close_draft, **config),
        make_engine(models.target, models.close_draft, cuda_graphs=False, **config),
    )


@pytest.mark.parametrize("name", [name for name in PARAMS if name != "the default request"])
def test_graphs_say_what_the_usual_passes_say(name: str, twins: tuple[EngineCore, EngineCore]) -> None:
    graph_gates.same_tokens(*twins, PARAMS[name], graph_gates.LATE)


WAITING_ROWS = {
    "greedy": SamplingParams(max_tokens=40, temperature=0),
    "coupled": SamplingParams(max_tokens=40, temperature=1.1, seed=1),
    "rejection": SamplingParams(max_tokens=40, temperature=0.8, top_k=5),
    "top-p": SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9),
    "penalties": gates.PENALTIES,
}


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("name", WAITING_ROWS)
def test_how_often_the_host_waits(
    name: str,
    cuda_graphs: bool,
    twins: tuple[EngineCore, EngineCore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once a round, for the verdict; by phases for the drafts as well, when all of them are drawn."""
    core, params = twins[0 if cuda_graphs else 1], WAITING_ROWS[name]
    reads_a_round = 1 if cuda_graphs and name != "penalties" else 2
    drafted = core.stats.num_draft_tokens
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
    assert core.stats.num_draft_tokens - drafted > num_rounds > 3
    assert len(reads) == reads_a_round * num_rounds


def test_graphs_stay_within_their_time(models: Models) -> None:
    started = time.monotonic()
    core = make_engine_here(models.target, models.close_draft, cuda_graph_seconds=3)
    assert graph_gates.graphs_of(core).replays
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
    "latent vectors": {
        "heads": (20, 1),
        "size": 576,
        "value_start": 64,
        "dtype": torch.bfloat16,
        "longest": 1000,
    },
    "latent vectors in float32": {
        "heads": (16, 1),
        "size": 576,
        "value_start": 64,
        "num_splits": 7,
        "longest": 300,
    },
}


@needs_triton
@pytest.mark.parametrize("seed", range(2))  # every size of program is compiled
@pytest.mark.parametrize("case", KERNEL_CASES.values(), ids=KERNEL_CASES.keys())
def test_the_kernel_attends_like_gathering(case: dict[str, Any], seed: int) -> None:
    shape = AttentionShape(0, 8, 2, 64, 0.125, None, None)
    kernels = find_kernels([shape], torch.bfloat16, torch.device(DEVICE))
    assert kernels is not None
    attend = kernels.attend_latents if "value_start" in case else kernels.attend_rows
    triton_gates.same_as_gathered(attend, seed, device=DEVICE, **case)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(8, 2), (6, 6)])
@pytest.mark.parametrize("window", [None, 70])
def test_long_chunks_attend_like_float64(
    window: int | None, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    kernels = find_kernels([AttentionShape(0, 8, 2, 64, 0.125, None, None)], dtype, torch.device(DEVICE))
    assert kernels is not None
    for size in (64, 128):
        shape = AttentionShape(0, *heads, size, 0.125, window, None)
        for queries in (70, 500):
            assert is_right(kernels.attend_rows, shape, dtype, torch.device(DEVICE), queries)


def test_cudnn_prepares_nothing_for_a_prompt(models: Models) -> None:
    core = make_engine_here(models.target, models.close_draft, dtype="bfloat16", max_num_batched_tokens=100)
    params = SamplingParams(max_tokens=3, temperature=0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run_engine(core, [[1, 2, 3] * 50, [4, 5] * 60], params)
    called = {event.key for event in profiler.key_averages()}
    assert any("attention" in name for name in called)
    assert not any("cudnn" in name for name in called)


@needs_triton
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_engines_read_keys_in_place(dtype: str, models: Models) -> None:
    model = make_engine_here(models.target, None, dtype=dtype).target
    assert isinstance(model.model, FusedDecoder)
    assert model.model.reads_in_place


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [8, 96, 128, 256])
def test_small_kernels_compute_what_torch_does(size: int, dtype: torch.dtype) -> None:
    kernels = import_module("truedraft.engine.cuda.kernels")
    triton_gates.same_rotation_and_cache(kernels.rotate_and_store, dtype, size, device=DEVICE)
    triton_gates.same_gate(kernels.gated_silu, dtype, 3 * size + 5, device=DEVICE)
    triton_gates.same_norm(kernels.rms_norm, dtype, 3 * size + 5, device=DEVICE)

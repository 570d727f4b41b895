"""What the caches may take: a number of bytes, or a share of what there is."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from tests.engine.conftest import Models
from tests.engine.hybrid_models import hybrid, hybrid_engine
from tests.models import make_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.machine import limits as machine
from truedraft.engine.memory import cache_memory
from truedraft.engine.memory.cache_memory import cache_budget, cache_sizes, free_memory

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0"), torch.device("cuda:1")
MIB = 1 << 20


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, int]:
    memory = {CUDA[0]: 4000, CUDA[1]: 3000}
    monkeypatch.setattr(cache_memory, "free_memory", memory.__getitem__)
    return memory


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The machine's, and what this process has of it."""
    memory = {"total": 8000 * MIB, "own": 0}
    monkeypatch.setattr(machine, "total_memory", lambda: memory["total"])
    monkeypatch.setattr(machine, "own_memory", lambda: memory["own"])
    return memory


def test_bytes_are_bytes(free: dict[torch.device, int]) -> None:
    assert cache_budget(EngineConfig.model_validate({"cache_memory": "2KiB"}), {CPU}) == 2048


def test_shares_of_what_is_free_on_a_gpu(free: dict[torch.device, int]) -> None:
    assert cache_budget(EngineConfig(), {CUDA[0]}) == 3600
    assert cache_budget(EngineConfig(cache_memory_share=0.5), {CUDA[0]}) == 2000
    # The cache is spread like the layers: the fullest device is the limit.
    assert cache_budget(EngineConfig(cache_memory_share=0.5), set(CUDA)) == 3000


def test_shares_of_the_machine_on_a_cpu(memory: dict[str, int]) -> None:
    assert cache_budget(EngineConfig(), {CPU}) == 2000 * MIB
    memory["own"] = 640 * MIB
    assert cache_budget(EngineConfig(), {CPU}) == 1840 * MIB
    assert cache_budget(EngineConfig(cache_memory_share=0.5), {CPU}) == 3680 * MIB
    # The next start may find a page more or less.
    for bytes_less in (1, 4096, 60 * MIB):
        memory["own"] = 640 * MIB - bytes_less
        assert cache_budget(EngineConfig(), {CPU}) == 1840 * MIB


def test_a_model_that_leaves_little_memory_leaves_a_floor(memory: dict[str, int]) -> None:
    memory["own"] = 9000 * MIB
    assert cache_budget(EngineConfig(), {CPU}) == 256 * MIB
    assert cache_budget(EngineConfig(cache_memory_share=0.01), {CPU}) == 80 * MIB
    memory["total"] = 400 * MIB
    assert cache_budget(EngineConfig(), {CPU}) == 100 * MIB


def test_other_processes_do_not_change_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    (tmp_path / "proc").mkdir()
    for available in (7_900_000, 900_000):
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: 8000000 kB\nMemAvailable: {available} kB\n")
        with monkeypatch.context() as patch:
            total = machine.total_memory(tmp_path)
            patch.setattr(machine, "total_memory", lambda total=total: total)
            patch.setattr(machine, "own_memory", lambda: 0)
            sizes.append(cache_budget(EngineConfig(), {CPU}))
        assert machine.free_memory(tmp_path) == available << 10
    assert sizes == [2_000_000 << 10] * 2


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5])
def test_shares_are_between_nothing_and_everything(share: float) -> None:
    with pytest.raises(ValidationError, match="cache_memory_share"):
        EngineConfig(cache_memory_share=share)


def test_free_memory_of_this_machine() -> None:
    assert 1 << 20 < free_memory(CPU) < 1 << 50


def test_too_little_for_one_block_is_refused(models: Models, memory: dict[str, int]) -> None:
    with pytest.raises(ModelLoadError, match=r"cache_memory.*one block"):
        make_engine(models.target, None, cache_memory=None, cache_memory_share=1e-9)


def test_never_more_than_can_be_used(models: Models) -> None:
    core = make_engine(models.target, None, cache_memory=None, max_num_sequences=2, max_model_len=64)
    assert core.scheduler.target_pool.num_blocks * core.scheduler.target_pool.block_size == 2 * 64


def test_memory_is_divided_between_blocks_and_states() -> None:
    """Half of it is for what runs, at most; each snapshot goes with the tokens of a thousand."""
    sizes = cache_sizes(1000 * MIB, 1 * MIB, 0, 16, num_sequences=8, max_blocks=4000)
    assert sizes == (1000, 0)
    for state, num_sequences in ((1 * MIB, 8), (20 * MIB, 8), (100 * MIB, 8), (400 * MIB, 8), (1 * MIB, 500)):
        num_blocks, num_slots = cache_sizes(1000 * MIB, MIB // 8, state, 16, num_sequences, 4000)
        running = min(num_sequences, 500 * MIB // state)
        assert running <= num_slots <= running + 2 * num_sequences + num_blocks * 16 // 1024
        assert 900 * MIB < num_blocks * MIB // 8 + num_slots * state <= 1000 * MIB or num_blocks == 4000
    assert cache_sizes(10 * MIB, 1 * MIB, 20 * MIB, 16, 8, 4000) == (0, 0)
    # Layers that keep something of each token may be missing.
    assert cache_sizes(100 * MIB, 0, 1 * MIB, 16, num_sequences=8, max_blocks=50) == (50, 24)


def test_a_cache_without_room_for_states_is_refused() -> None:
    with pytest.raises(
        ModelLoadError, match=r"cache_memory\) do not hold one block .* states of one sequence"
    ):
        hybrid_engine(hybrid(), cache_memory="20KiB")

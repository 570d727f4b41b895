"""What the caches may take: a number of bytes, or a share of what is free."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from tests.engine.conftest import Models
from tests.models import make_engine
from truedraft.engine import cache_memory
from truedraft.engine.cache_memory import cache_budget, free_memory
from truedraft.engine.config import EngineConfig
from truedraft.engine.models.errors import ModelLoadError

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, int]:
    memory = {CPU: 1000, CUDA[0]: 4000, CUDA[1]: 3000}
    monkeypatch.setattr(cache_memory, "free_memory", memory.__getitem__)
    return memory


def test_bytes_are_bytes(free: dict[torch.device, int]) -> None:
    assert cache_budget(EngineConfig.model_validate({"cache_memory": "2KiB"}), {CPU}) == 2048


def test_shares_of_what_is_free(free: dict[torch.device, int]) -> None:
    assert cache_budget(EngineConfig(), {CPU}) == 250
    assert cache_budget(EngineConfig(), {CUDA[0]}) == 3600
    assert cache_budget(EngineConfig(cache_memory_share=0.5), {CUDA[0]}) == 2000
    # The cache is spread like the layers: the fullest device is the limit.
    assert cache_budget(EngineConfig(cache_memory_share=0.5), set(CUDA)) == 3000


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5])
def test_shares_are_between_nothing_and_everything(share: float) -> None:
    with pytest.raises(ValidationError, match="cache_memory_share"):
        EngineConfig(cache_memory_share=share)


def test_free_memory_of_this_machine() -> None:
    assert 1 << 20 < free_memory(CPU) < 1 << 50


def test_a_container_has_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "limit").write_text("1000000\n")
    (tmp_path / "used").write_text("400000\n")
    files = ((str(tmp_path / "limit"), str(tmp_path / "used")),)
    monkeypatch.setattr(cache_memory, "CONTAINER_FILES", files)
    assert free_memory(CPU) == 600_000
    (tmp_path / "limit").write_text("max\n")
    assert free_memory(CPU) > 1_000_000


def test_too_little_for_one_block_is_refused(models: Models, free: dict[torch.device, int]) -> None:
    free[CPU] = 1
    with pytest.raises(ModelLoadError, match=r"cache_memory.*one block"):
        make_engine(models.target, None, cache_memory=None)


def test_never_more_than_can_be_used(models: Models) -> None:
    core = make_engine(models.target, None, cache_memory=None, max_num_sequences=2, max_model_len=64)
    assert core.scheduler.target_pool.num_blocks * core.scheduler.target_pool.block_size == 2 * 64

"""Quantised weights on a GPU: ``pytest -m cuda``. Skipped where there is none."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import block_gates
from tests.engine.gates import PROMPTS
from tests.engine.test_blocks_on_a_device import SERVED, save_mixed
from tests.models import make_engine, run_engine
from truedraft.engine.cuda.scaled import is_right
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.decoder import FusedDecoder

DEVICE = "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]


@pytest.fixture
def kernels() -> Any:
    return import_module("truedraft.engine.cuda.quantised_kernels")


@pytest.mark.parametrize("name", SERVED)
def test_kernels_unpack_and_multiply(name: str, kernels: Any) -> None:
    block_gates.same_weights(kernels, name, DEVICE)
    for dtype, rows in ((torch.float32, 20), (torch.bfloat16, 1), (torch.bfloat16, 64), (torch.float16, 320)):
        block_gates.same_products(kernels, name, dtype, rows, DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SERVED)
def test_rows_do_not_depend_on_their_number(name: str, dtype: torch.dtype, kernels: Any) -> None:
    block_gates.rows_by_themselves(kernels, name, dtype, (1, 2, 16, 17, 33, 64, 65, 320), DEVICE)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="there is no FP8"
)
def test_fp8(kernels: Any) -> None:
    block_gates.rounds_rows(kernels, DEVICE)
    assert is_right(kernels.round_rows, torch.device(DEVICE))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_files_stay_quantised_in_captured_rounds(dtype: str, tmp_path: Path) -> None:
    path = str(tmp_path / "model.gguf")
    save_mixed(Path(path))
    settings: dict[str, Any] = {"device": DEVICE, "dtype": dtype, "num_speculative_tokens": 2}
    params = SamplingParams(max_tokens=40, temperature=0)
    core = make_engine(path, path, **settings)
    assert isinstance(core.target.model, FusedDecoder)
    assert core.target.model.is_quantised
    plain = make_engine(path, None, **settings)
    assert run_engine(core, PROMPTS, params) == run_engine(plain, PROMPTS, params)

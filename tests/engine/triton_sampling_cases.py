"""The kernels that draw and judge, in Triton's interpreter: bit for bit what torch's operations do.

``test_triton_attention`` runs it with ``triton_cases``, in a process of its own.
"""

import importlib.util
import logging
import os
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine import graph_gates, torch_kernels
from tests.engine.conftest import Models
from tests.models import make_engine
from tests.tape import TapeCapture
from truedraft.engine.cuda import sampling_kernels, torch_sampling, triton_run, triton_sampling
from truedraft.engine.cuda.triton_sampling import CHECKS, find_sampling, is_right
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models import agreement
from truedraft.engine.rounds.capture import graphs as graphs_module
from truedraft.engine.rounds.capture import plan as plan_module

assert os.environ["TRITON_INTERPRET"] == "1"

Patch = pytest.MonkeyPatch
CPU = torch.device("cpu")
SHOWING = (0, 6, 18, 1, 2, 3, 12, 13, 14, 15, 16, 17)
# numpy warns where a quotient is thrown away, and where integers wrap.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Each is planted in the kernels' text, and the comparison at load must see it.
BUGS = {
    "a NaN is overlooked": ("is_nan = is_nan | (x != x).to(tl.int32)", "is_nan = is_nan"),
    "the last of equals is the most likely": ("is_higher = x > top\n", "is_higher = x >= top\n"),
    "weights are not scaled": ("tl.div_rn(x - highest, temperature)", "x - highest"),
    "exponentials are rounded otherwise": ("(bounded * _LOG2_E + _ROUNDER) - _ROUNDER", "bounded * _LOG2_E"),
    "ties with the last one kept are cut": (
        "prob = tl.where(weight >= lowest",
        "prob = tl.where(weight > lowest",
    ),
    "one token more is kept": ("tops, top_k, lowest", "tops, top_k + 1, lowest"),
    "top-p is a share of all, where top-k has cut": (
        "total = mass_of_top(probs, lowest, top_k, VOCAB, TILE)",
        "total = mass_from(probs, lowest * 0, VOCAB, TILE)",
    ),
    "what is reached must be passed": ("tl.sum(mass, 0) >= goal", "tl.sum(mass, 0) > goal"),
    "what is reached must be passed, of few": ("middle, BY_COUNT) >= goal", "middle, BY_COUNT) > goal"),
    "the bound is above the cut": ("cut_of(highest, goal, lowest", "cut_of(highest, goal // 2, lowest"),
    "what does not fit is left out": ("if num_kept <= TILE:", "if num_kept >= 0:"),
    "tokens beyond the vocabulary are counted": ("tl.where(token < VOCAB, weight, -1.0)", "weight * 0 + 1"),
    "min-p cuts nothing": ("lowest = tl.maximum(lowest, min_p)", "lowest = lowest"),
    "what is cut stays in the sum": (
        "total += tl.where(weight >= lowest, weight * _WEIGHT_UNITS, 0.0)",
        "total += (weight * _WEIGHT_UNITS)",
    ),
    "logarithms are saved too often": ("prob * 1.0001 >=", "prob * 0.3 >="),
    "noise is another token's": ("key + (token + 1)", "key + token"),
    "drafts are drawn with the numbers of earlier rounds": (
        "seed = key_of(seed, first, _ROUND)\n",
        "seed = seed\n",
    ),
    "tokens have twice their share of a tile": (
        "before + tl.cumsum(units, 0) > goal",
        "before + 2 * tl.cumsum(units, 0) > goal",
    ),
    "a share is drawn from all of the target": ("- had\n", "- had * 0\n"),
    "certain drafts are drawn ones": ("had = tl.where(token == certain, 1.0, had)", "had = had"),
    "a weight is the last prefix's": ("scale = tl.where(stands, weight, scale)", "scale = weight"),
    "the longest prefix must be the first": (
        "accepted = tl.where(stands, length, accepted)",
        "accepted = tl.where(stands & (accepted == position), length, accepted)",
    ),
    "drafts after one that fell may stand": ("goes_on = goes_on & (uniform", "goes_on = (uniform"),
    "all failures count": ("in range(accepted + 1)", "in range(num_drafts + 1)"),
}


def planted(bug: str, folder: Path) -> ModuleType:
    """The kernels with ``bug``, as another module."""
    correct, wrong = BUGS[bug]
    assert sampling_kernels.__file__ is not None
    text = Path(sampling_kernels.__file__).read_text()
    assert text.count(correct) == 1
    file = folder / "planted_sampling_kernels.py"
    file.write_text(text.replace(correct, wrong))
    spec = importlib.util.spec_from_file_location("planted_sampling_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_tiles(kernels: ModuleType, tile: int) -> Any:
    return SimpleNamespace(
        draw_drafts=partial(kernels.draw_drafts, tile=tile), judge=partial(kernels.judge, tile=tile)
    )


def test_bit_for_bit_what_torch_does() -> None:
    """The vocabulary is several tiles, and not a whole number of them."""
    assert is_right(in_tiles(sampling_kernels, 32), 61, 3, CPU)


@pytest.mark.parametrize("bug", BUGS)
def test_the_check_at_load_catches(bug: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """Goes through its rows, those first that show most bugs, until one is wrong: it is an interpreter."""
    wrong = in_tiles(planted(bug, tmp_path), 16)

    def is_right_in(row: int) -> bool:
        monkeypatch.setattr(triton_sampling, "CHECKS", CHECKS[row : row + 1])
        return is_right(wrong, 29, 3, CPU)

    rows = [*SHOWING, *(row for row in range(len(CHECKS)) if row not in SHOWING)]
    assert not all(map(is_right_in, rows))


@pytest.fixture
def on_the_cpu(monkeypatch: Patch) -> None:
    """The CPU counts as a device for the kernels, in the interpreter."""
    monkeypatch.setattr(triton_run, "is_fit", lambda device: True)


def test_wrong_kernels_are_not_used(
    tmp_path: Path, on_the_cpu: None, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = planted("noise is another token's", tmp_path)
    monkeypatch.setattr(triton_sampling, "import_module", lambda name: in_tiles(wrong, 32))
    monkeypatch.setattr(triton_sampling, "CHECKS", CHECKS[3:4])  # which shows it
    with caplog.at_level(logging.WARNING):
        assert find_sampling(31, 3, CPU) is torch_sampling
    assert "sampling kernels differ" in caplog.text


def test_engines_say_what_they_say_by_phases(models: Models, on_the_cpu: None, monkeypatch: Patch) -> None:
    """Captured rounds with the kernels, under every rule, among rows that are cut, adjusted and greedy."""
    monkeypatch.setattr(plan_module, "make_capture", TapeCapture)
    monkeypatch.setattr(agreement, "find_kernels", lambda *_: torch_kernels)
    monkeypatch.setattr(triton_sampling, "is_right", lambda *_: True)  # other cases look
    kernels = in_tiles(sampling_kernels, 64)
    monkeypatch.setattr(plan_module, "find_sampling", lambda *_: kernels)
    config: dict[str, Any] = {"native_kernels": False, "max_num_sequences": 5, "num_speculative_tokens": 2}
    monkeypatch.setattr(graphs_module, "_is_right", lambda *_: True)
    core, eager = (
        make_engine(models.target, models.close_draft, cuda_graphs=graphs, **config)
        for graphs in (True, False)
    )
    params = [
        SamplingParams(max_tokens=5, seed=number, temperature=0.8, **more)
        for number, more in enumerate(
            (
                {"verification": "rejection", "top_p": 0.9},
                {"verification": "block", "top_k": 7},
                {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
                {"min_p": 0.1, "logprobs": 1},
            )
        )
    ]
    params.insert(0, SamplingParams(max_tokens=5, temperature=0))
    # Prompts come while rows decode, and share their pass.
    graph_gates.same_tokens(core, eager, params, [0, 0, 1, 1, 2])

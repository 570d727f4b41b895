"""Sampled output of the whole engine against exact enumeration.

Thousands of requests with fixed seeds, three tokens each; their joint histogram is compared with the
product of the target's conditionals, computed in float64 without cache or batch, by chi-square. That such
a test can fail is shown in ``test_mutants``.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.simulation import chi_square
from tests.models import make_engine, run_engine, save_random_llama
from tests.reference import joint_distribution, with_temperature
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.step import Round, StepPlan
from truedraft.engine.messages import SamplingParams
from truedraft.engine.rounds.native_loop import NativeLoop
from truedraft.engine.rows.table import Row

VOCAB_SIZE, NUM_TOKENS, PROMPT = 6, 3, [2]
TEMPERATURE = 0.8
SIGNIFICANCE = 1e-4


@dataclass(frozen=True)
class Pair:
    target: str
    draft: str
    joint: np.ndarray  # exact distribution of the three tokens after the prompt


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), hidden=16)


@pytest.fixture(scope="module")
def native_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Makes a pair of a shape that the kernels in C run."""
    return make_pair(tmp_path_factory.mktemp("native_pair"), hidden=64)


def make_pair(root: Path, hidden: int, layers: int = 1) -> Pair:
    """Two unrelated models, so that much is rejected and every residual is used."""
    target, draft = (
        save_random_llama(root / name, seed, vocab_size=VOCAB_SIZE, layers=layers, hidden=hidden)
        for name, seed in (("target", 11), ("draft", 12))
    )
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)

    def logits(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(model(torch.tensor([ids])).logits[0])

    joint = joint_distribution(with_temperature(logits, TEMPERATURE), PROMPT, NUM_TOKENS)
    return Pair(target, draft, joint)


def p_values(
    pair: Pair, num_samples: int, in_flight: int, verification: str, k: int = 2, step_seconds: float = 0.0
) -> list[float]:
    """Chi-square p-values of the first token's histogram and of all three tokens' jointly."""
    core = make_engine(
        pair.target,
        pair.draft,
        num_speculative_tokens=k,
        max_num_sequences=in_flight,
        verification=verification,
        step_seconds=step_seconds,
    )
    return p_values_of(core, pair, num_samples)


def p_values_of(core: EngineCore, pair: Pair, num_samples: int) -> list[float]:
    """Returns the same of any engine for the pair's target."""
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=TEMPERATURE, seed=seed)
        for seed in range(num_samples)
    ]
    outputs = run_engine(core, [PROMPT] * num_samples, params)
    counts = np.zeros_like(pair.joint)
    for tokens, count in Counter(map(tuple, outputs)).items():
        counts[tokens] = count
    return [
        chi_square(counts.sum(axis=(1, 2)), pair.joint.sum(axis=(1, 2))),
        chi_square(counts.ravel(), pair.joint.ravel()),
    ]


@pytest.mark.parametrize(("in_flight", "num_samples"), [(1, 600), (2, 1000), (8, 3000)])
@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_joint_distribution_is_the_targets(
    pair: Pair, verification: str, in_flight: int, num_samples: int
) -> None:
    assert min(p_values(pair, num_samples, in_flight, verification)) > SIGNIFICANCE


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_joint_distribution_of_rounds_that_share_a_step(
    native_pair: Pair, verification: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_samples, shared = 2000, []
    honest = NativeLoop.run

    def counted(self: NativeLoop, plan: StepPlan, rows: list[Row]) -> list[Round]:
        rounds = honest(self, plan, rows)
        shared.append(rounds)
        return rounds

    monkeypatch.setattr(NativeLoop, "run", counted)
    values = p_values(native_pair, num_samples, 1, verification, step_seconds=1000.0)
    assert min(values) > SIGNIFICANCE
    assert len(shared) > num_samples / 2
    assert all(shared)

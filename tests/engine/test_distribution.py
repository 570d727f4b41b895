"""Sampled output of the whole engine against exact enumeration; and proof that the test can fail.

Thousands of requests with fixed seeds, three tokens each; their joint histogram is compared with the
product of the target's conditionals, computed in float64 without cache or batch, by chi-square.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from engine.messages import SamplingParams
from engine.sampling import sampler as sampler_module
from engine.sampling import verify
from engine.sampling.draw import inverse_cdf
from engine.sampling.verify import Verdict
from tests.models import make_engine, run_engine, save_random_llama
from tests.reference import joint_distribution, with_temperature

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
    """Two unrelated models, so that much is rejected and every residual is used."""
    root: Path = tmp_path_factory.mktemp("pair")
    target = save_random_llama(root / "target", seed=11, vocab_size=VOCAB_SIZE, layers=1, hidden=16)
    draft = save_random_llama(root / "draft", seed=12, vocab_size=VOCAB_SIZE, layers=1, hidden=16)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)

    def logits(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(model(torch.tensor([ids])).logits[0])

    joint = joint_distribution(with_temperature(logits, TEMPERATURE), PROMPT, NUM_TOKENS)
    return Pair(target, draft, joint)


def p_values(pair: Pair, num_samples: int, in_flight: int, verification: str, k: int = 2) -> list[float]:
    """Chi-square p-values of the first token's histogram and of all three tokens' jointly."""
    core = make_engine(
        pair.target,
        pair.draft,
        num_speculative_tokens=k,
        max_num_sequences=in_flight,
        verification=verification,
    )
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


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """p-value; cells that expect fewer than five are taken together."""
    expected = probs * counts.sum()
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(counts, expected).pvalue)


@pytest.mark.parametrize(("in_flight", "num_samples"), [(1, 1000), (2, 2000), (8, 6000)])
@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_joint_distribution_is_the_targets(
    pair: Pair, verification: str, in_flight: int, num_samples: int
) -> None:
    assert min(p_values(pair, num_samples, in_flight, verification)) > SIGNIFICANCE


def recovered_from_target(target_probs, draft_ids, draft_probs, num_draft, accept, recover):  # type: ignore[no-untyped-def]
    """The residual forgets to subtract the draft."""
    good = verify.verify_rejection(target_probs, draft_ids, draft_probs, num_draft, accept, recover)
    rows = torch.arange(len(draft_ids))
    a = good.num_accepted
    return Verdict(a, inverse_cdf(target_probs[rows, a], recover[rows, a]))


def accepts_everything(target_probs, draft_ids, draft_probs, num_draft, accept, recover):  # type: ignore[no-untyped-def]
    """The draft is never refused."""
    return verify.verify_rejection(target_probs, draft_ids, draft_probs, num_draft, accept * 0, recover)


def rows_shifted_by_one(target_probs, draft_ids, draft_probs, num_draft, accept, recover):  # type: ignore[no-untyped-def]
    """Each draft is compared with the distribution after it."""
    shifted = torch.cat([target_probs[:, 1:], target_probs[:, -1:]], dim=1)
    return verify.verify_rejection(shifted, draft_ids, draft_probs, num_draft, accept, recover)


def bonus_from_draft(target_probs, draft_ids, draft_probs, num_draft, accept, recover):  # type: ignore[no-untyped-def]
    """After full acceptance the last draft row is used again."""
    good = verify.verify_rejection(target_probs, draft_ids, draft_probs, num_draft, accept, recover)
    if draft_ids.shape[1] == 0:
        return good
    rows = torch.arange(len(draft_ids))
    bonus = inverse_cdf(draft_probs[rows, (num_draft - 1).clamp(min=0)], recover[rows, num_draft])
    full = (good.num_accepted == num_draft) & (num_draft > 0)
    return Verdict(good.num_accepted, torch.where(full, bonus, good.next_token))


def noise_shared_with_recovery(target_probs, draft_ids, draft_probs, num_draft, accept, recover):  # type: ignore[no-untyped-def]
    """The number that refused the draft also draws the recovered token."""
    padded = torch.cat([accept, recover[:, -1:]], dim=1)
    return verify.verify_rejection(target_probs, draft_ids, draft_probs, num_draft, accept, padded)


@pytest.mark.parametrize(
    "mutant",
    [
        recovered_from_target,
        accepts_everything,
        rows_shifted_by_one,
        bonus_from_draft,
        noise_shared_with_recovery,
    ],
)
def test_planted_bugs_in_rejection_are_caught(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., Verdict]
) -> None:
    def positional(target_probs, draft_ids, draft_probs, num_draft, accept_uniforms, recover_uniforms):  # type: ignore[no-untyped-def]
        return mutant(target_probs, draft_ids, draft_probs, num_draft, accept_uniforms, recover_uniforms)

    monkeypatch.setattr(sampler_module, "verify_rejection", positional)
    assert min(p_values(pair, 3000, 8, "rejection")) < SIGNIFICANCE


def test_planted_greedy_draft_with_soft_probabilities_is_caught(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft takes its likeliest token but reports the distribution it did not draw from."""
    monkeypatch.setattr(sampler_module, "inverse_cdf", lambda weights, uniforms: weights.argmax(-1))
    assert min(p_values(pair, 3000, 8, "rejection")) < SIGNIFICANCE


def test_planted_bug_in_coupled_is_caught(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that forgets the position repeats itself along the sequence."""
    honest = sampler_module.exponential_noise

    def stuck(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
        return honest(seeds, torch.zeros_like(positions), vocab_size)

    monkeypatch.setattr(sampler_module, "exponential_noise", stuck)
    assert min(p_values(pair, 3000, 8, "coupled")) < SIGNIFICANCE

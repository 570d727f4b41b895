"""Measured acceptance equals theory: 1 - TV under rejection, the block bound, the coupling formula."""

import itertools

import numpy as np
import pytest
import torch

from tests import naive
from tests.engine.simulation import CPU, DRAFT, PROMPT, TARGET, VOCAB_SIZE, _propose
from truedraft.engine.messages import SamplingParams
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.rows.lone import LoneText
from truedraft.engine.rows.table import RowTable
from truedraft.engine.sampling.explain import explain_block, explain_rejection
from truedraft.engine.sampling.sampler import Sampler

NUM_SEEDS = 15_000


def accepted_lengths(params: SamplingParams, rule: Rule, k: int) -> np.ndarray:
    """Accepted tokens of one round for each of many seeds."""
    texts = [LoneText(params, rule, seed, PROMPT, len(PROMPT)) for seed in range(NUM_SEEDS)]
    sampler = Sampler(RowTable().rows_of(texts), VOCAB_SIZE, CPU)
    drafts: Drafts = _propose(sampler, [k] * NUM_SEEDS)
    rows = {
        ids: torch.stack([TARGET([*PROMPT, *ids[:j]]) for j in range(k + 1)])
        for ids in itertools.product(range(VOCAB_SIZE), repeat=k)
    }
    logits = torch.cat([rows[tuple(ids)] for ids in drafts.token_ids.tolist()])
    return np.array([verdict.num_accepted for verdict in sampler.verify(logits, drafts)])


def probs(model: object, params: SamplingParams, prefix: tuple[int, ...]) -> torch.Tensor:
    logits = model([*PROMPT, *prefix]).double().numpy()  # type: ignore[operator]
    return torch.from_numpy(naive.distribution(logits, params))


def expected_length(params: SamplingParams, rule: Rule, k: int) -> float:
    """Enumerates all drafts."""
    explain = explain_block if rule is Rule.BLOCK else explain_rejection
    total = 0.0
    for drafted in itertools.product(range(VOCAB_SIZE), repeat=k):
        target = torch.stack([probs(TARGET, params, drafted[:j]) for j in range(k + 1)])
        draft = torch.stack([probs(DRAFT, params, drafted[:j]) for j in range(k)])
        chance = float(np.prod([float(draft[j, t]) for j, t in enumerate(drafted)]))
        if chance > 0:
            lengths = explain(
                target[None], torch.tensor([drafted]), draft[None], torch.tensor([k])
            ).length_probs
            total += chance * float((lengths[0] * torch.arange(k + 1)).sum())
    return total


def coupled_acceptance(target: torch.Tensor, draft: torch.Tensor) -> float:
    """sum over x of 1 / sum over y of max(target_y / target_x, draft_y / draft_x)."""
    both = (target > 0) & (draft > 0)
    ratios = torch.maximum(target[None] / target[both][:, None], draft[None] / draft[both][:, None])
    return float((1 / ratios.sum(1)).sum())


@pytest.mark.parametrize(
    ("rule", "top_p", "temperature"),
    [
        (Rule.REJECTION, 1.0, 0.7),
        (Rule.REJECTION, 0.8, 1.0),
        (Rule.BLOCK, 1.0, 1.0),
        (Rule.BLOCK, 0.8, 0.7),
    ],
)
def test_accepted_lengths_are_as_enumerated(rule: Rule, top_p: float, temperature: float) -> None:
    params = SamplingParams(max_tokens=5, temperature=temperature, top_p=top_p)
    for k in (1, 3):
        lengths = accepted_lengths(params, rule, k)
        error = lengths.std() / np.sqrt(NUM_SEEDS)
        assert abs(lengths.mean() - expected_length(params, rule, k)) < 4 * error


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_first_acceptance_is_the_overlap_or_the_coupling_formula(temperature: float) -> None:
    params = SamplingParams(max_tokens=5, temperature=temperature)
    target, draft = probs(TARGET, params, ()), probs(DRAFT, params, ())
    overlap = float(torch.minimum(target, draft).sum())
    theory = {Rule.REJECTION: overlap, Rule.BLOCK: overlap, Rule.COUPLED: coupled_acceptance(target, draft)}
    for rule, want in theory.items():
        got = float((accepted_lengths(params, rule, 1) > 0).mean())
        assert abs(got - want) < 4 * np.sqrt(want * (1 - want) / NUM_SEEDS), rule
    assert theory[Rule.COUPLED] >= overlap / (2 - overlap)


def test_block_keeps_more_than_rejection_over_the_same_drafts() -> None:
    params = SamplingParams(max_tokens=5)
    assert expected_length(params, Rule.BLOCK, 3) > expected_length(params, Rule.REJECTION, 3) + 0.01

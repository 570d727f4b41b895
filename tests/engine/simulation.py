"""Simulates rounds of the production sampler without models: thousands of sequences at once over toy logits.

Everything that decides about tokens is the engine's own (``Sampler``: processing, draws, verification);
only the forward passes are table look-ups. That makes large histograms cheap.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats

from tests import naive
from truedraft.engine.messages import SamplingParams
from truedraft.engine.proposers.drawn import drawn_drafts
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.rows.lone import LoneText
from truedraft.engine.rows.table import RowTable
from truedraft.engine.sampling.sampler import Sampler

VOCAB_SIZE, NUM_TOKENS, NUM_DRAFT = 5, 3, 2
PROMPT = [1, 1, 3]
STOP_ID = 4
CPU = torch.device("cpu")


class Lengths(NamedTuple):
    """Says how many tokens a round drafts: ``longest``. ``heeding``: a round drafts only if the text's last
    one did not draft so many, as planners learn from rounds."""

    longest: int = NUM_DRAFT
    heeding: int = 0


UP_TO_TWO = Lengths()


class ToyLogits:
    """Random logits for every continuation of the prompt, float32 in the engine's eyes."""

    def __init__(self, seed: int, sharpness: float) -> None:
        self.seed, self.sharpness = seed, sharpness
        self.rows: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, tokens: list[int]) -> torch.Tensor:
        key = tuple(tokens)
        if key not in self.rows:
            generator = torch.Generator().manual_seed(hash((self.seed, *key)) % 2**31)
            self.rows[key] = self.sharpness * torch.randn(VOCAB_SIZE, generator=generator)
        return self.rows[key]


TARGET, DRAFT = ToyLogits(1, 1.2), ToyLogits(2, 1.2)


def simulate(
    params: SamplingParams,
    rule: Rule,
    num_samples: int,
    in_flight: int = 0,
    drafts_greedily: bool | None = None,
    lengths: Lengths = UP_TO_TWO,
) -> list[tuple[int, ...]]:
    """Three tokens for each of the seeds 0, 1, ...; ``in_flight`` > 0 limits how many share a sampler."""
    batch = in_flight or num_samples
    outputs: list[tuple[int, ...]] = []
    for first in range(0, num_samples, batch):
        seeds = range(first, min(first + batch, num_samples))
        outputs += _simulate_batch(params, rule, seeds, drafts_greedily, lengths)
    return outputs


def _simulate_batch(
    params: SamplingParams, rule: Rule, seeds: range, drafts_greedily: bool | None, planned: Lengths
) -> list[tuple[int, ...]]:
    texts = {seed: list(PROMPT) for seed in seeds}
    last = dict.fromkeys(seeds, 0)
    while unfinished := [s for s in seeds if len(texts[s]) < len(PROMPT) + NUM_TOKENS]:
        remaining = [len(PROMPT) + params.max_tokens - len(texts[s]) for s in unfinished]
        lengths = [
            0 if planned.heeding and last[seed] >= planned.heeding else min(planned.longest, room - 1)
            for seed, room in zip(unfinished, remaining, strict=True)
        ]
        each = [
            LoneText(
                params,
                rule,
                seed,
                token_ids=list(texts[seed]),
                num_prompt_tokens=len(PROMPT),
                stop_token_ids=frozenset([STOP_ID]),
                drafts_greedily=rule is Rule.EXACT_MATCH if drafts_greedily is None else drafts_greedily,
            )
            for seed in unfinished
        ]
        rows = RowTable().rows_of(each)
        sampler = Sampler(rows, VOCAB_SIZE, CPU)
        drafts = _propose(sampler, lengths)
        lengths = drafts.lengths
        last |= zip(unfinished, lengths, strict=True)
        logits = torch.stack(
            [
                TARGET([*row.token_ids, *ids[:j]])
                for row, ids, length in zip(rows, drafts.token_ids.tolist(), lengths, strict=True)
                for j in range(length + 1)
            ]
        )
        verdicts = sampler.verify(logits, drafts)
        for seed, drafted, verdict in zip(unfinished, drafts.ids, verdicts, strict=True):
            assert not verdict.failed
            texts[seed] += [*drafted[: verdict.num_accepted], verdict.next_token]
    return [tuple(texts[seed][len(PROMPT) :][:NUM_TOKENS]) for seed in seeds]


def _propose(sampler: Sampler, lengths: list[int]) -> Drafts:
    """Drafts like the draft-model proposer, with look-ups for forward passes."""
    texts = [list(row.token_ids) for row in sampler.rows]

    def next_logits(rows: list[int], last_ids: torch.Tensor | None) -> torch.Tensor:
        if last_ids is not None:
            for row, token_id in zip(rows, last_ids.tolist(), strict=True):
                texts[row].append(token_id)
        return torch.stack([DRAFT(texts[row]) for row in rows])

    return drawn_drafts(lengths, sampler, next_logits)


def p_value(
    params: SamplingParams,
    rule: Rule,
    num_samples: int,
    in_flight: int = 0,
    drafts_greedily: bool | None = None,
    lengths: Lengths = UP_TO_TWO,
) -> float:
    """Chi-square of the simulated joint histogram against exact enumeration; 0 if the impossible occurs."""
    expected = naive.joint(
        lambda ids: TARGET(ids).double().numpy(), params, PROMPT, NUM_TOKENS, VOCAB_SIZE, [STOP_ID]
    )
    counts = np.zeros_like(expected)
    outputs = simulate(params, rule, num_samples, in_flight, drafts_greedily, lengths)
    for tokens, count in Counter(outputs).items():
        counts[tokens] = count
    return chi_square(counts.ravel(), expected.ravel())


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """p-value; cells that expect fewer than five are taken together."""
    if counts[probs == 0].sum():
        return 0.0
    counts, probs = counts[probs > 0], probs[probs > 0]
    expected = probs / probs.sum() * counts.sum()
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    if len(counts) == 1:
        return 1.0
    return float(stats.chisquare(counts, expected).pvalue)

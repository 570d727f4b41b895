"""Temperature, top-k, top-p and min-p against a plain loop over sorted probabilities."""

import numpy as np
import pytest
import torch

from tests.naive import distribution
from truedraft.engine.messages import SamplingParams
from truedraft.engine.sampling import processors
from truedraft.engine.sampling.processors import SamplingTensors, to_probs

GRID = [
    SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature in (0.5, 1.0, 1.7)
    for top_k in (0, 1, 7)
    for top_p in (1.0, 0.9, 0.3)
    for min_p in (0.0, 0.2)
]


@pytest.mark.parametrize("vocab_size", [20, 3000])
def test_every_combination_equals_the_definition(vocab_size: int) -> None:
    """The whole grid is one batch, so that rows with and without each parameter are neighbours."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(len(GRID), 2, vocab_size, generator=generator)
    probs = to_probs(logits, SamplingTensors.build(GRID, torch.device("cpu")))
    for row, params in enumerate(GRID):
        for position in range(2):
            want = distribution(logits[row, position].double().numpy(), params)
            np.testing.assert_allclose(probs[row, position].numpy(), want, atol=1e-6, err_msg=str(params))


def test_top_p_of_a_flat_distribution_looks_beyond_the_first_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processors, "TOP_P_CANDIDATES", 8)
    params = SamplingParams(max_tokens=1, top_p=0.9)
    logits = torch.linspace(0, 0.1, 100)[None, None]
    probs = to_probs(logits, SamplingTensors.build([params], torch.device("cpu")))
    np.testing.assert_allclose(
        probs[0, 0].numpy(), distribution(logits[0, 0].double().numpy(), params), atol=1e-6
    )


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(3, 1, 50, generator=torch.Generator().manual_seed(2))
    alone = to_probs(logits[:1], SamplingTensors.build(GRID[:1], torch.device("cpu")))
    together = to_probs(logits, SamplingTensors.build([GRID[0], GRID[-1], GRID[9]], torch.device("cpu")))
    torch.testing.assert_close(alone[0], together[0], atol=1e-7, rtol=0)

"""Counter-based randomness: uniform, independent of the batch, of the vocabulary and between streams."""

import numpy as np
import torch
from scipy import stats

from truedraft.engine.core.sequence import sequence_seed
from truedraft.engine.sampling.random import Stream, exponential_noise, uniform

SEEDS = torch.arange(200)
POSITIONS = torch.arange(500)


def table(stream: Stream) -> np.ndarray:
    return uniform(SEEDS[:, None], POSITIONS[None, :], stream).numpy()


def test_uniforms_are_uniform_over_seeds_and_positions() -> None:
    for stream in Stream:
        values = table(stream)
        assert values.min() > 0
        assert values.max() < 1
        assert stats.kstest(values.ravel(), "uniform").pvalue > 1e-4
        # The first value of every seed, and every value of one seed, not only all together.
        assert stats.kstest(values[:, 0], "uniform").pvalue > 1e-4
        assert stats.kstest(values[0], "uniform").pvalue > 1e-4


def test_neighbours_and_streams_are_uncorrelated() -> None:
    values = table(Stream.ACCEPT)
    pairs = [
        (values[:, :-1], values[:, 1:]),
        (values[:-1], values[1:]),
        (values, table(Stream.RECOVER)),
        (values, table(Stream.DRAFT)),
    ]
    for left, right in pairs:
        # 100,000 independent pairs have a correlation of 0 +- 0.0032.
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 4 * 0.0032


def test_a_number_does_not_depend_on_its_companions() -> None:
    alone = uniform(torch.tensor([42]), torch.tensor([7]), Stream.ACCEPT)
    together = uniform(torch.tensor([1, 42, 3]), torch.tensor([7, 7, 9]), Stream.ACCEPT)
    assert alone[0] == together[1]


def test_noise_of_a_token_does_not_depend_on_the_vocabulary() -> None:
    seeds, positions = torch.tensor([5, 6]), torch.tensor([0, 11])
    small, large = exponential_noise(seeds, positions, 100), exponential_noise(seeds, positions, 128)
    assert torch.equal(small, large[:, :100])


def test_noise_is_exponential() -> None:
    noise = exponential_noise(torch.arange(100), torch.zeros(100, dtype=torch.int64), 1000)
    assert stats.kstest(noise.numpy().ravel(), "expon").pvalue > 1e-4
    assert stats.kstest(noise.numpy()[:, 3], "expon").pvalue > 1e-4


def test_choices_of_a_request_have_different_seeds() -> None:
    seeds = {sequence_seed(7, index) for index in range(100)}
    assert len(seeds) == 100
    assert sequence_seed(7, 0) == 7
    assert sequence_seed(-1, 0) == -1
    assert all(0 <= seed < 2**53 for seed in seeds)


def test_few_numbers_are_the_same_as_many() -> None:
    """Computed one by one or as an array, by the sizes asked for."""
    seeds, positions = torch.tensor([0, -1, 2**63 - 1, -(2**63), 12345])[:, None], torch.arange(500)
    many = uniform(seeds, positions, Stream.RECOVER)
    for first in range(0, 500, 3):
        few = uniform(seeds, positions[first : first + 3], Stream.RECOVER)
        assert torch.equal(few, many[:, first : first + 3])

"""Which fixed length is the best is not a matter of luck: ``best_by_other_cycles`` on made speeds."""

import random
from collections.abc import Sequence
from statistics import mean

from benchmarks.defaults import best_by_other_cycles

Speeds = Sequence[Sequence[float]]


def made_speeds(true_speeds: Sequence[float], *, num_cycles: int, noise: float, seed: int) -> Speeds:
    rng = random.Random(seed)
    return [[speed * rng.gauss(1.0, noise) for _ in range(num_cycles)] for speed in true_speeds]


def test_the_luckiest_of_equals_is_no_better_than_they_are() -> None:
    runs = [made_speeds([100.0] * 5, num_cycles=5, noise=0.05, seed=seed) for seed in range(400)]
    assert abs(mean(speed for run in runs for speed in best_by_other_cycles(run)) - 100.0) < 0.4
    # What this guards against: the highest of five means of five cycles.
    assert mean(max(map(mean, run)) for run in runs) > 102.0


def test_a_length_that_is_better_is_found_in_each_cycle() -> None:
    speeds = made_speeds([100.0, 120.0, 110.0], num_cycles=6, noise=0.02, seed=0)
    assert best_by_other_cycles(speeds) == speeds[1]


def test_a_single_cycle_has_only_itself() -> None:
    assert best_by_other_cycles([[100.0], [120.0]]) == [120.0]

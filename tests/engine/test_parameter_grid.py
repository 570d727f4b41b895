"""Every sampling parameter at every drafted position: joint histograms against exact enumeration."""

from collections.abc import Iterator
from itertools import combinations

import pytest

from tests.engine.simulation import STOP_ID, p_value, simulate
from truedraft.engine.messages import SamplingParams
from truedraft.engine.rows.columns import Rule

RULES = [Rule.REJECTION, Rule.BLOCK, Rule.COUPLED]
SIGNIFICANCE = 1e-5  # some 50 tests with fixed seeds: none should come near it

CUTS: dict[str, dict[str, float]] = {
    "all tokens": {},
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 3},
    "min-p": {"min_p": 0.15},
    "all cuts": {"top_p": 0.9, "top_k": 4, "min_p": 0.05},
}
ADJUSTMENTS: dict[str, dict[str, object]] = {
    "as is": {},
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.6, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {0: 1.5, 2: -2.0}},
    "minimum": {"min_tokens": 2},
    "all": {
        "presence_penalty": -0.3,
        "frequency_penalty": 0.5,
        "repetition_penalty": 0.8,
        "logit_bias": {3: -100.0},
        "min_tokens": 3,
    },
}


def each_two() -> Iterator[tuple[str, str, Rule, float]]:
    """Yields cuts, adjustments, rules and temperatures, of which each two meet somewhere: they are applied
    one after the other, and none knows of the others."""
    for i, cut in enumerate(CUTS):
        for j, adjustment in enumerate(ADJUSTMENTS):
            yield cut, adjustment, RULES[(i + j) % 3], (0.7, 1.0, 1.5)[(i + 2 * j) % 3]


@pytest.mark.parametrize(("cut", "adjustment", "rule", "temperature"), [*each_two()])
def test_joint_distribution(cut: str, adjustment: str, rule: Rule, temperature: float) -> None:
    params = SamplingParams(max_tokens=3, temperature=temperature, **CUTS[cut], **ADJUSTMENTS[adjustment])  # type: ignore[arg-type]
    assert p_value(params, rule, num_samples=2500) > SIGNIFICANCE, params


def test_each_two_meet() -> None:
    for one, other in combinations(range(4), 2):
        met = {(kinds[one], kinds[other]) for kinds in each_two()}
        assert len(met) == len({pair[0] for pair in met}) * len({pair[1] for pair in met})


@pytest.mark.parametrize("adjustment", ADJUSTMENTS)
def test_temperature_0_is_the_argmax(adjustment: str) -> None:
    params = SamplingParams(max_tokens=3, temperature=0, **ADJUSTMENTS[adjustment])  # type: ignore[arg-type]
    assert p_value(params, Rule.EXACT_MATCH, num_samples=3) == 1


@pytest.mark.parametrize("rule", RULES)
def test_joint_distribution_whatever_the_batch(rule: Rule) -> None:
    """Sequences that end early make room for others; seeds say the same in all batches, as below."""
    params = SamplingParams(
        max_tokens=3, temperature=0.9, top_p=0.95, frequency_penalty=0.5, logit_bias={STOP_ID: 0.7}
    )
    assert p_value(params, rule, num_samples=1000, in_flight=8) > SIGNIFICANCE
    eight = simulate(params, rule, num_samples=60, in_flight=8)
    for in_flight in (1, 2):
        assert simulate(params, rule, num_samples=60, in_flight=in_flight) == eight


@pytest.mark.parametrize(("cut", "adjustment", "rule", "temperature"), [*each_two()])
def test_a_seed_says_the_same_in_every_batch(
    cut: str, adjustment: str, rule: Rule, temperature: float
) -> None:
    """Token for token: what holds for all seeds at once, above, holds for 1, 2 and 8 in flight."""
    params = SamplingParams(max_tokens=3, temperature=temperature, **CUTS[cut], **ADJUSTMENTS[adjustment])  # type: ignore[arg-type]
    together = simulate(params, rule, num_samples=16)
    for in_flight in (1, 2, 8):
        assert simulate(params, rule, num_samples=16, in_flight=in_flight) == together

"""The oracle is right: by enumeration, without sampling noise, and it notices planted bugs."""

from collections import Counter
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from scipy.stats import chisquare

from tests import reference
from tests.reference import (
    Choose,
    Ids,
    Model,
    Probs,
    decode,
    joint_distribution,
    outcomes,
    residual,
    sampler,
    speculative_decode,
    speculative_joint_distribution,
    with_temperature,
)

PROMPT = [0, 1]


def random_model(seed: int, vocab_size: int, temperature: float = 1.0) -> Model:
    """A fixed random distribution after every prefix."""

    @cache
    def logits(prefix: tuple[int, ...]) -> Probs:
        return np.random.default_rng([seed, *prefix]).normal(scale=1.5, size=vocab_size)

    return with_temperature(
        lambda ids: np.stack([logits(tuple(ids[: end + 1])) for end in range(len(ids))]), temperature
    )


def distance(target: Model, draft: Model, num_speculative_tokens: int, num_tokens: int) -> float:
    """Largest error of the speculative decoder's joint distribution."""
    spoken = speculative_joint_distribution(target, draft, num_speculative_tokens, PROMPT, num_tokens)
    return float(np.abs(spoken - joint_distribution(target, PROMPT, num_tokens)).max())


# num_tokens is k + 1, so that one round can emit everything, or 3, so that rounds follow each other.
@pytest.mark.parametrize(
    ("vocab_size", "num_speculative_tokens", "num_tokens"),
    [(3, 0, 3), (3, 1, 2), (3, 1, 3), (3, 2, 3), (3, 3, 4), (4, 1, 3), (4, 2, 3), (4, 3, 3)],
)
@pytest.mark.parametrize("draft_temperature", [1.0, 0.0])
def test_joint_distribution_is_the_targets(
    vocab_size: int, num_speculative_tokens: int, num_tokens: int, draft_temperature: float
) -> None:
    target, draft = random_model(1, vocab_size), random_model(2, vocab_size, draft_temperature)
    assert distance(target, draft, num_speculative_tokens, num_tokens) < 1e-12


@pytest.mark.parametrize("draft_temperature", [1.0, 0.0])
@pytest.mark.parametrize(("num_speculative_tokens", "num_tokens"), [(1, 2), (2, 3), (2, 4), (3, 4)])
def test_block_verification_is_exact(
    monkeypatch: pytest.MonkeyPatch, num_speculative_tokens: int, num_tokens: int, draft_temperature: float
) -> None:
    monkeypatch.setattr(reference, "verify", reference.block_verify)
    target, draft = random_model(1, 3), random_model(2, 3, draft_temperature)
    assert distance(target, draft, num_speculative_tokens, num_tokens) < 1e-12


def test_three_tokens_drafted_over_four_words() -> None:
    target, draft = random_model(3, 4), random_model(4, 4)
    assert distance(target, draft, num_speculative_tokens=3, num_tokens=4) < 1e-12


def test_disjoint_supports_reject_every_draft() -> None:
    target: Model = lambda ids: np.tile([0.5, 0.5, 0.0, 0.0], (len(ids), 1))  # noqa: E731
    draft: Model = lambda ids: np.tile([0.0, 0.0, 0.3, 0.7], (len(ids), 1))  # noqa: E731
    assert distance(target, draft, num_speculative_tokens=2, num_tokens=3) < 1e-12


def test_plain_decoder_has_the_joint_distribution() -> None:
    target = random_model(1, 3)
    joint = joint_distribution(target, PROMPT, 3)
    assert joint.sum() == pytest.approx(1.0, abs=1e-12)
    for tokens, probability in outcomes(lambda choose: decode(target, PROMPT, 3, choose)):
        assert probability == pytest.approx(joint[tuple(tokens)], abs=1e-15)


# --- planted bugs: each replaces one function of the oracle, and each must be noticed -----------------


def softmax_residual(target_row: Probs, draft_row: Probs) -> Probs:
    weights: Probs = np.exp(np.maximum(target_row - draft_row, 0.0))
    weights /= weights.sum()
    return weights


def unnormalised_residual(target_row: Probs, draft_row: Probs) -> Probs:
    difference: Probs = np.maximum(target_row - draft_row, 0.0)
    return difference


def residual_is_target(target_row: Probs, draft_row: Probs) -> Probs:
    return target_row


def residual_is_absolute_difference(target_row: Probs, draft_row: Probs) -> Probs:
    difference: Probs = np.abs(target_row - draft_row)
    difference /= difference.sum()
    return difference


def accept_by_inverse_ratio(target_row: Probs, draft_row: Probs, token: int) -> float:
    return min(1.0, float(draft_row[token] / target_row[token]))


def accept_when_target_is_larger(target_row: Probs, draft_row: Probs, token: int) -> float:
    return float(target_row[token] >= draft_row[token])


def accept_by_target_alone(target_row: Probs, draft_row: Probs, token: int) -> float:
    return float(target_row[token])  # right for a deterministic draft only


def bonus_from_draft(target_probs: Probs, draft_probs: list[Probs], drafted: Ids, choose: Choose) -> Ids:
    rows = target_probs.copy()
    rows[-1] = draft_probs[-1] if drafted else target_probs[-1]
    return verify(rows, draft_probs, drafted, choose)


def rows_one_late(target_probs: Probs, draft_probs: list[Probs], drafted: Ids, choose: Choose) -> Ids:
    return verify(np.roll(target_probs, 1, axis=0), draft_probs, drafted, choose)


def tokens_after_a_rejection_kept(
    target_probs: Probs, draft_probs: list[Probs], drafted: Ids, choose: Choose
) -> Ids:
    emitted = verify(target_probs, draft_probs, drafted, choose)
    return emitted + drafted[len(emitted) :]


def greedy_draft_called_softmax(
    draft: Model, ids: Ids, num_draft_tokens: int, choose: Choose
) -> tuple[Ids, list[Probs]]:
    drafted, _ = propose(lambda i: np.eye(3)[draft(i).argmax(axis=-1)], ids, num_draft_tokens, choose)
    return drafted, list(draft(ids + drafted)[len(ids) - 1 :])[:num_draft_tokens]


def unlikely_drafts_dropped(
    draft: Model, ids: Ids, num_draft_tokens: int, choose: Choose
) -> tuple[Ids, list[Probs]]:
    """Dropping a drawn token because of its own probability skews what the target is asked to verify."""
    drafted, draft_probs = propose(draft, ids, num_draft_tokens, choose)
    kept = 0
    while kept < len(drafted) and draft_probs[kept][drafted[kept]] >= 0.3:
        kept += 1
    return drafted[:kept], draft_probs[:kept]


verify, propose = reference.verify, reference.propose


@pytest.mark.parametrize(
    ("replaced", "bug"),
    [
        ("residual", softmax_residual),
        ("residual", unnormalised_residual),
        ("residual", residual_is_target),
        ("residual", residual_is_absolute_difference),
        ("accept_probability", accept_by_inverse_ratio),
        ("accept_probability", accept_when_target_is_larger),
        ("accept_probability", accept_by_target_alone),
        ("verify", bonus_from_draft),
        ("verify", rows_one_late),
        ("verify", tokens_after_a_rejection_kept),
        ("propose", greedy_draft_called_softmax),
        ("propose", unlikely_drafts_dropped),
    ],
)
def test_planted_bug_is_noticed(
    monkeypatch: pytest.MonkeyPatch, replaced: str, bug: Callable[..., object]
) -> None:
    target, draft = random_model(1, 3), random_model(2, 3)
    monkeypatch.setattr(reference, replaced, bug)
    assert distance(target, draft, num_speculative_tokens=2, num_tokens=3) > 1e-3


# --- the same decoder, drawing ------------------------------------------------------------------------


@pytest.mark.parametrize("draft_temperature", [1.0, 0.0])
def test_sampled_tokens_pass_chi_square(draft_temperature: float) -> None:
    target, draft = random_model(1, 3), random_model(2, 3, draft_temperature)
    choose = sampler(np.random.default_rng(2026))
    counts = np.zeros((3, 3, 3))
    for _ in range(4000):
        counts[tuple(speculative_decode(target, draft, 2, PROMPT, 3, choose))] += 1
    expected = joint_distribution(target, PROMPT, 3) * counts.sum()
    likely = expected >= 5  # the test's own condition; what is rarer goes into one cell
    observed_cells = np.append(counts[likely], counts[~likely].sum())
    expected_cells = np.append(expected[likely], expected[~likely].sum())
    assert chisquare(observed_cells, expected_cells).pvalue > 1e-4


@pytest.mark.parametrize("num_speculative_tokens", range(6))
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 7])
def test_greedy_output_is_the_plain_decoders(num_speculative_tokens: int, max_tokens: int) -> None:
    target, draft = random_model(5, 8, temperature=0.0), random_model(6, 8)
    plain = decode(target, PROMPT, max_tokens, sampler(np.random.default_rng(0)))
    choose = sampler(np.random.default_rng(1))
    assert speculative_decode(target, draft, num_speculative_tokens, PROMPT, max_tokens, choose) == plain
    assert len(plain) == max_tokens


def test_equal_models_accept_everything() -> None:
    """20 tokens in rounds of 5 are 4 calls of the target."""
    model = random_model(7, 8)
    calls: Counter[str] = Counter()

    def target(ids: Ids) -> Probs:
        calls["target"] += 1
        return model(ids)

    speculative_decode(target, model, 4, PROMPT, 20, sampler(np.random.default_rng(3)))
    assert calls["target"] == 4


def test_end_of_sequence_inside_an_accepted_draft_ends_the_output() -> None:
    counting: Model = lambda ids: np.eye(8)[[(token + 1) % 8 for token in ids]]  # noqa: E731
    choose = sampler(np.random.default_rng(0))
    plain = decode(counting, [0], 20, choose, eos=3)
    assert plain == speculative_decode(counting, counting, 6, [0], 20, choose, eos=3) == [1, 2, 3]


def test_temperature_zero_takes_the_lowest_index_among_equals() -> None:
    model = with_temperature(lambda ids: np.array([[1.0, 2.0, 2.0, 0.0]] * len(ids)), 0.0)
    np.testing.assert_array_equal(model([0]), [[0.0, 1.0, 0.0, 0.0]])


def test_residual_of_equal_rows_is_the_target() -> None:
    row = np.array([0.25, 0.75])
    np.testing.assert_array_equal(residual(row, row), row)

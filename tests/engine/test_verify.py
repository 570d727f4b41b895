"""The verification rules: exact by enumeration, drawn as explained, pure, and never worse than promised.

Enumeration has no sampling noise: for every draft and every verdict the probabilities are added up and
compared with the target's own joint distribution.
"""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from tests.engine.gates import leaves_its_inputs_alone
from truedraft.engine.sampling.explain import Explanation, explain_block, explain_rejection
from truedraft.engine.sampling.ops import CHUNK, gumbel_argmax, inverse_cdf
from truedraft.engine.sampling.random import Stream, exponential_noise, uniform
from truedraft.engine.sampling.verify import (
    Verdict,
    accept_while_equal,
    verify_block,
    verify_greedy,
    verify_rejection,
)

Explain = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Explanation]
RULES = {"rejection": (explain_rejection, verify_rejection), "block": (explain_block, verify_block)}


@pytest.mark.parametrize("vocab_size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 7])
def test_inverse_cdf_draws_each_token_for_its_part_of_the_interval(vocab_size: int) -> None:
    """Weights are whole, so that sums are exact; most are zero, and so are some chunks."""
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.randint(-6, 4, (3, vocab_size), generator=generator).clamp(min=0)
    weights[1, : 2 * CHUNK] = 0
    weights[:, vocab_size // 2] = 1
    ends = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    for row in weights:
        owners = torch.arange(vocab_size).repeat_interleave(row)
        # Numbers are in the middle of every unit of weight, and next to both ends of the interval.
        numbers = torch.cat([(torch.arange(len(owners)).double() + 0.5) / len(owners), ends])
        # Divided by a power of two they stay exact.
        drawn = inverse_cdf((row / 2**11).expand(len(numbers), -1), numbers)
        assert drawn.tolist() == [*owners.tolist(), int(owners[0]), int(owners[-1])]


class ToyModel:
    """Has a random conditional distribution for every prefix; ``sharpness`` 0 is flat."""

    def __init__(self, seed: int, vocab_size: int, sharpness: float, zeros: bool = False) -> None:
        self.seed, self.vocab_size, self.sharpness, self.zeros = seed, vocab_size, sharpness, zeros

    def row(self, prefix: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, *prefix)) % 2**31)
        logits = self.sharpness * torch.randn(self.vocab_size, generator=generator, dtype=torch.float64)
        if self.zeros:
            logits[int(torch.randint(self.vocab_size, (1,), generator=generator))] = -torch.inf
        return logits.softmax(-1)

    def rows(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """Rows after each prefix of ``tokens``, the empty and the full one included."""
        return torch.stack([self.row(tokens[:i]) for i in range(len(tokens) + 1)])

    def joint(self, num_tokens: int) -> np.ndarray:
        joint = np.empty([self.vocab_size] * num_tokens)
        for tokens in np.ndindex(joint.shape):
            joint[tokens] = np.prod([float(self.row(tokens[:i])[t]) for i, t in enumerate(tokens)])
        return joint


class DeterministicToy(ToyModel):
    def row(self, prefix: tuple[int, ...]) -> torch.Tensor:
        return torch.nn.functional.one_hot(super().row(prefix).argmax(), self.vocab_size).double()


def emitted_joint(explain: Explain, target: ToyModel, draft: ToyModel, k: int) -> np.ndarray:
    """Joint distribution of the first k + 1 tokens when one round is followed by plain decoding."""
    joint = np.zeros([target.vocab_size] * (k + 1))
    for drafted in itertools.product(range(target.vocab_size), repeat=k):
        draft_rows = draft.rows(drafted)[:-1] if k else torch.zeros(0, target.vocab_size)
        chance = float(np.prod([float(draft_rows[i, t]) for i, t in enumerate(drafted)]))
        if chance == 0:
            continue
        explanation = explain(
            target.rows(drafted)[None],
            torch.tensor([drafted], dtype=torch.int64).reshape(1, k),
            draft_rows[None],
            torch.tensor([k]),
        )
        assert float(explanation.length_probs.sum()) == pytest.approx(1, abs=1e-12)
        for num_accepted in range(k + 1):
            for token in range(target.vocab_size):
                first = (*drafted[:num_accepted], token)
                probability = chance * float(
                    explanation.length_probs[0, num_accepted] * explanation.next_probs[0, num_accepted, token]
                )
                add_plain_continuation(joint, target, first, probability)
    return joint


def add_plain_continuation(
    joint: np.ndarray, target: ToyModel, tokens: tuple[int, ...], probability: float
) -> None:
    if probability == 0:
        return
    if len(tokens) == joint.ndim:
        joint[tokens] += probability
        return
    for token, share in enumerate(target.row(tokens).tolist()):
        add_plain_continuation(joint, target, (*tokens, token), probability * share)


DRAFTS = {
    "unrelated": ToyModel(2, 3, 1.5),
    "flat": ToyModel(3, 3, 0.0),
    "itself": ToyModel(1, 3, 1.0),
    "with zeros": ToyModel(4, 3, 1.0, zeros=True),
    "deterministic": DeterministicToy(5, 3, 1.0),
}
TARGETS = {"dense": ToyModel(1, 3, 1.0), "with zeros": ToyModel(6, 3, 1.0, zeros=True)}


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rule", RULES)
def test_the_joint_distribution_is_the_targets(rule: str, target: str, draft: str, k: int) -> None:
    joint = emitted_joint(RULES[rule][0], TARGETS[target], DRAFTS[draft], k)
    np.testing.assert_allclose(joint, TARGETS[target].joint(k + 1), atol=1e-12)


def test_disjoint_supports_reject_everything_and_stay_exact() -> None:
    target_probs = torch.tensor([[[0.5, 0.5, 0, 0], [0.25, 0.75, 0, 0]]])
    draft_probs = torch.tensor([[[0, 0, 0.5, 0.5]]])
    for explain, _ in RULES.values():
        explanation = explain(target_probs, torch.tensor([[2]]), draft_probs, torch.tensor([1]))
        assert explanation.length_probs.tolist() == [[1, 0]]
        assert explanation.next_probs[0, 0].tolist() == [0.5, 0.5, 0, 0]


def test_a_draft_probability_of_zero_is_no_division() -> None:
    """A token that underflowed in the draft is accepted if the target knows it, refused if not."""
    draft_probs = torch.tensor([[[0.0, 1.0]], [[0.0, 1.0]]])
    target_probs = torch.tensor([[[0.5, 0.5]] * 2, [[0.0, 1.0]] * 2])
    ids, num_draft = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([1, 1])
    numbers = torch.full((2, 2), 0.3, dtype=torch.float64)
    for explain, verify in RULES.values():
        verdict = verify(target_probs, ids, draft_probs, num_draft, numbers[:, :1], numbers)
        assert verdict.num_accepted.tolist() == [1, 0]
        assert verdict.next_token.tolist()[1] == 1
        assert explain(target_probs, ids, draft_probs, num_draft).accept_probs.tolist() == [[1], [0]]


def test_equal_distributions_are_always_accepted() -> None:
    rows = torch.randn(64, 5, 9, generator=torch.Generator().manual_seed(3)).softmax(-1)
    ids = rows[:, :-1].argmax(-1)
    numbers = torch.full((64, 5), 1 - 1e-12, dtype=torch.float64)
    for _, verify in RULES.values():
        verdict = verify(rows, ids, rows[:, :-1], torch.full((64,), 4), numbers[:, :-1], numbers)
        assert verdict.num_accepted.tolist() == [4] * 64


def test_block_never_keeps_fewer_tokens_than_rejection() -> None:
    for k in (1, 2, 3):
        means = {}
        for rule, (explain, _) in RULES.items():
            target, draft = TARGETS["dense"], DRAFTS["unrelated"]
            total = 0.0
            for drafted in itertools.product(range(3), repeat=k):
                rows = draft.rows(drafted)[:-1]
                chance = float(np.prod([float(rows[i, t]) for i, t in enumerate(drafted)]))
                explanation = explain(
                    target.rows(drafted)[None], torch.tensor([drafted]), rows[None], torch.tensor([k])
                )
                total += chance * float((explanation.length_probs[0] * torch.arange(k + 1)).sum())
            means[rule] = total
        if k == 1:
            assert means["block"] == pytest.approx(means["rejection"], abs=1e-12)
        else:
            assert means["block"] > means["rejection"]


@pytest.mark.parametrize("rule", RULES)
def test_verdicts_are_drawn_as_explained(rule: str) -> None:
    """The production random numbers, 50,000 seeds, rows with drafts of length 0 to 3 side by side."""
    explain, verify = RULES[rule]
    num_seeds, k, vocab_size = 50_000, 3, 5
    generator = torch.Generator().manual_seed(9)
    target_probs = (1.5 * torch.randn(4, k + 1, vocab_size, generator=generator)).softmax(-1)
    draft_probs = (1.5 * torch.randn(4, k, vocab_size, generator=generator)).softmax(-1)
    draft_ids = torch.randint(vocab_size, (4, k), generator=generator)
    num_draft = torch.tensor([0, 1, 2, 3])
    explanation = explain(target_probs, draft_ids, draft_probs, num_draft)

    seeds = torch.arange(num_seeds).repeat_interleave(4)[:, None]
    positions = torch.arange(k + 1)
    verdict = verify(
        target_probs.repeat(num_seeds, 1, 1),
        draft_ids.repeat(num_seeds, 1),
        draft_probs.repeat(num_seeds, 1, 1),
        num_draft.repeat(num_seeds),
        uniform(seeds, positions[:-1], Stream.ACCEPT),
        uniform(seeds, positions, Stream.RECOVER),
    )
    cells = (verdict.num_accepted * vocab_size + verdict.next_token).view(num_seeds, 4)
    for row in range(4):
        counts = torch.bincount(cells[:, row], minlength=(k + 1) * vocab_size).numpy()
        want = (explanation.length_probs[row][:, None] * explanation.next_probs[row]).flatten().numpy()
        assert counts[want == 0].sum() == 0
        possible = want > 0
        assert stats.chisquare(counts[possible], want[possible] * num_seeds).pvalue > 1e-4


def test_coupled_draws_are_the_targets_whatever_was_drafted() -> None:
    num_seeds, vocab_size = 50_000, 6
    probs = torch.randn(vocab_size, generator=torch.Generator().manual_seed(4)).softmax(-1)
    noise = exponential_noise(torch.arange(num_seeds)[:, None], torch.arange(2), vocab_size)
    target_probs = probs.expand(num_seeds, 2, vocab_size)
    for drafted in (0, 3):
        verdicts = [accept_while_equal(ids, [drafted]) for ids in gumbel_argmax(target_probs, noise).tolist()]
        first = [drafted if num_accepted else next_token for num_accepted, next_token in verdicts]
        counts = np.bincount(first, minlength=vocab_size)
        want = probs.double() / probs.double().sum() * num_seeds
        assert stats.chisquare(counts, want.numpy()).pvalue > 1e-4


def test_coupled_acceptance_is_the_formulas() -> None:
    """sum over x of 1 / sum over y of max(target_y / target_x, draft_y / draft_x), and at least the bound."""
    num_seeds = 50_000
    generator = torch.Generator().manual_seed(8)
    target, draft = torch.randn(2, 7, generator=generator, dtype=torch.float64).softmax(-1)
    noise = exponential_noise(torch.arange(num_seeds), torch.zeros(num_seeds, dtype=torch.int64), 7)
    agree = ((target / noise).argmax(-1) == (draft / noise).argmax(-1)).double().mean()
    ratios = torch.maximum(target[None] / target[:, None], draft[None] / draft[:, None])
    formula = (1 / ratios.sum(1)).sum()
    overlap = torch.minimum(target, draft).sum()
    assert abs(agree - formula) < 4 * (formula * (1 - formula) / num_seeds).sqrt()
    assert formula >= overlap / (2 - overlap)


def test_greedy_takes_the_lowest_index_on_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]])
    assert verify_greedy(logits, [[1]]) == [(1, 0, False)]
    assert verify_greedy(logits, [[2]]) == [(0, 1, False)]


def test_greedy_rows_are_packed() -> None:
    """Drafts of different lengths, one after the other: each row has its own logits."""
    most_likely = [4, 2, 1, 3, 0, 2]
    logits = F.one_hot(torch.tensor(most_likely), 5).float()
    assert verify_greedy(logits, [[4, 3], [], [0]]) == [(1, 2, False), (0, 3, False), (1, 2, False)]
    assert verify_greedy(logits, [[4, 2], [2], []]) == [(2, 1, False), (0, 3, False), (0, 2, False)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_greedy_rows_fail_where_they_meet_what_is_no_distribution(value: float) -> None:
    """Rows after the first rejection do not fail: nobody looks there."""
    logits = F.one_hot(torch.tensor([1, 2, 3, 1]), 5).float()
    logits[2, 4] = value
    if value < 0:
        logits[2] = value  # every token forbidden
    reached, rejected_before, others = [[1, 2], []], [[1, 3], []], [[], [2, 3]]
    assert [verdict.failed for verdict in verify_greedy(logits, reached)] == [True, False]
    assert [verdict.failed for verdict in verify_greedy(logits, rejected_before)] == [False, False]
    assert [verdict.failed for verdict in verify_greedy(logits, others)] == [False, True]


@pytest.mark.parametrize("verify", [verify for _, verify in RULES.values()])
def test_inputs_stay_as_they_are(verify: Callable[..., Verdict]) -> None:
    leaves_its_inputs_alone(verify)

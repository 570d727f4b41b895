"""Distributions and draws in C: torch's numbers, independent of the batch, exact through the sampler."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import gates, simulation
from tests.engine.conftest import Models
from tests.engine.native_draws import ByTorch, InC
from tests.engine.planners import phases_of
from tests.engine.test_native import plant as plant_in
from tests.engine.test_processors import GRID
from tests.models import make_engine
from tests.naive import distribution
from truedraft.engine.messages import SamplingParams
from truedraft.engine.native import compiler, library
from truedraft.engine.native.ops import NativeOps, native_ops
from truedraft.engine.native.ops_check import drawn_and_judged
from truedraft.engine.native.threads import set_num_threads
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.rows.lone import LoneText
from truedraft.engine.rows.table import RowTable
from truedraft.engine.sampling.ops import argmax
from truedraft.engine.sampling.random import Stream, exponential_noise, uniform
from truedraft.engine.sampling.sampler import Sampler
from truedraft.engine.sampling.torch_ops import TorchOps
from truedraft.engine.sampling.verify import Accepted

CPU = torch.device("cpu")
TORCH = ByTorch()
SEEDS = torch.tensor([0, 1, -1, 12345, 2**63 - 1, -(2**63)])
RULES = [Rule.COUPLED, Rule.REJECTION, Rule.BLOCK]


@pytest.fixture(scope="module")
def native() -> InC:
    ops = native_ops()
    if ops is None:
        assert library.load_library() is None, "compiled, but refused"
        pytest.skip("no C compiler")
    return InC(ops.library)


def params(**named: Any) -> SamplingParams:
    return SamplingParams(max_tokens=3, **named)


def both(native: InC, logits: torch.Tensor, rows: list[SamplingParams]) -> list[torch.Tensor]:
    return [draws.probs(logits, rows) for draws in (TORCH, native)]


def random_logits(*shape: int, seed: int = 1) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- numbers


def test_numbers_are_the_very_same(native: InC) -> None:
    positions = torch.tensor([0, 1, 17, 2**40])
    for stream in Stream:
        expected = uniform(SEEDS[:, None], positions, stream)
        everywhere = positions.expand(len(SEEDS), -1)
        assert torch.equal(native.uniform(SEEDS[:, None], everywhere, stream), expected)
    for seed in SEEDS.tolist():
        for position in positions.tolist():
            noise = exponential_noise(torch.tensor(seed), torch.tensor(position), 1003)
            assert torch.equal(-native.noise_uniforms(seed, position, 1003).log(), noise)


# --- distributions


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 20, 63, 64, 65, 1003, 3000])
def test_processors_are_torchs(native: InC, vocab_size: int) -> None:
    logits = random_logits(len(GRID), 2, vocab_size)
    expected, probs = both(native, logits, GRID)
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=0)
    assert torch.equal(probs > 0, expected > 0)
    for row in range(0, len(GRID), 5):
        want = distribution(logits[row, 0].double().numpy(), GRID[row])
        np.testing.assert_allclose(probs[row, 0].numpy(), want, atol=1e-6, err_msg=str(GRID[row]))


def test_ties_are_kept_together(native: InC) -> None:
    """Wherever they stand: in full vectors, in the rest after them."""
    flat = torch.zeros(1, 1, 1003)
    for cut in (params(top_k=1), params(top_k=7), params(top_p=0.5), params(top_k=7, top_p=0.5, min_p=1.0)):
        expected, probs = both(native, flat, [cut])
        torch.testing.assert_close(probs, expected, atol=1e-9, rtol=0)
        assert (probs == probs[0, 0, 0]).all()
    steps = (random_logits(1, 1, 1003).abs() * 2).round()  # few values, each many times
    for cut in (params(top_k=40), params(top_p=0.7), params(top_k=40, top_p=0.6)):
        expected, probs = both(native, steps, [cut])
        torch.testing.assert_close(probs, expected, atol=1e-6, rtol=0)
        for value in steps.unique():
            assert len(probs[steps == value].unique()) == 1


def test_extreme_logits_and_parameters(native: InC) -> None:
    logits = random_logits(6, 1, 100)
    logits[1, 0, 10:] = -torch.inf
    logits[2, 0, 1:] = -torch.inf
    logits[3, 0] = 3e38 * torch.linspace(-1, 1, 100)
    logits[4, 0, 50] = 90.0
    logits[5, 0] *= 30
    for cut in (
        params(),
        params(top_p=1e-6),
        params(top_p=0.99999),
        params(top_p=1 - 1e-7),
        params(top_k=1),
        params(top_k=100),
        params(top_k=1000),
        params(min_p=1.0),
        params(temperature=1e-40),
        params(temperature=100.0, top_p=0.9),
        params(top_k=20, top_p=0.999),
    ):
        expected, probs = both(native, logits, [cut] * len(logits))
        torch.testing.assert_close(probs, expected, atol=1e-6, rtol=0)
        assert not probs[logits == -torch.inf].any()


@pytest.mark.parametrize("vocab_size", [2, 15, 64, 65, 1003, 3000])
def test_argmax_takes_the_first_among_equals(native: InC, vocab_size: int) -> None:
    logits = random_logits(40, 1, vocab_size)[:, 0].contiguous()
    logits[10:20] = (logits[10:20] * 2).round()  # ties
    logits[20:30, 1:] = -torch.inf
    logits[30:40, -1] = 9.0
    ids = [native.library.argmax(row.data_ptr(), vocab_size) for row in logits]
    assert ids == argmax(logits).tolist()


# --- draws


def random_probs(rows: int, positions: int, vocab_size: int, seed: int = 3) -> torch.Tensor:
    """Flat and sharp, whole and cut."""
    logits = random_logits(rows, positions, vocab_size, seed=seed) * torch.linspace(0, 3, rows)[:, None, None]
    cuts = [params(), params(top_p=0.8), params(top_k=3)]
    return TORCH.probs(logits, [cuts[row % 3] for row in range(rows)])


@pytest.mark.parametrize("vocab_size", [1, 5, 16, 100, 2053])
def test_gumbel_argmax_is_torchs(native: InC, vocab_size: int) -> None:
    probs = random_probs(200, 5, vocab_size)
    seeds = torch.arange(200) * 7919 - 5
    for offset in (0, 3):
        expected = TORCH.gumbel_argmax(probs, seeds, seeds.abs(), offset)
        assert torch.equal(native.gumbel_argmax(probs, seeds, seeds.abs(), offset), expected)


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 100, 2053])
def test_shares_and_residuals_are_drawn_the_same(native: InC, vocab_size: int) -> None:
    rows, k = 300, 3
    target = random_probs(rows, k + 1, vocab_size)
    draft = torch.where(
        torch.rand(rows, k, 1, generator=torch.Generator().manual_seed(5)) < 0.2,
        target[:, :-1],  # nothing is left of these
        random_probs(rows, k, vocab_size, seed=6),
    )
    seeds = torch.arange(rows)
    uniforms = uniform(seeds[:, None], torch.arange(k + 1), Stream.RECOVER)
    num_draft, num_accepted = seeds % (k + 1), (seeds // 4) % (k + 1)
    num_accepted = torch.minimum(num_accepted, num_draft)
    for weights in (torch.ones(rows, dtype=torch.float64), uniforms[:, 0] ** 0.1):
        accepted = Accepted(target, draft, num_draft, num_accepted, weights, uniforms)
        assert torch.equal(native.draw_next(accepted), TORCH.draw_next(accepted))
    weights = target[:, 0]
    # The ends of the interval: a token of weight zero is never drawn, nor one that does not exist.
    ends = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64).repeat(rows // 2)
    inside, at_ends = (
        [backend.inverse_cdf(weights, numbers) for backend in (native, TORCH)]
        for numbers in (uniforms[:, 1], ends)
    )
    for drawn in (*inside, *at_ends):
        assert (weights.gather(1, drawn[:, None]) > 0).all()
    assert torch.equal(*inside)
    # At the ends, sums in another order may reach another token, within their rounding.
    sums = [weights.double().cumsum(-1).gather(1, drawn[:, None]) for drawn in at_ends]
    assert ((sums[0] - sums[1]).abs() <= 1e-15).all()


def test_without_drafts_there_is_no_residual(native: InC) -> None:
    target, none = random_probs(9, 1, 50), torch.zeros(9, dtype=torch.int64)
    uniforms = uniform(torch.arange(9)[:, None], torch.zeros(1, dtype=torch.int64), Stream.RECOVER)
    weights = torch.ones(9, dtype=torch.float64)
    drawn = native.draw_next(Accepted(target, target[:, :0], none, none, weights, uniforms))
    assert torch.equal(drawn, TORCH.inverse_cdf(target[:, 0], uniforms[:, 0]))


@pytest.mark.usefixtures("one_thread_afterwards")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_its_neighbours(native: InC, threads: int) -> None:
    """Bit for bit, whether alone or one of 40, and by however many threads."""
    rows = [GRID[i % len(GRID)] for i in range(40)]
    logits = random_logits(40, 3, 2053)
    seeds = torch.arange(40)
    set_num_threads(threads)
    probs = native.probs(logits, rows)
    ids = native.gumbel_argmax(probs, seeds, seeds, 2)
    set_num_threads(1)
    for i in range(40):
        for j in range(3):
            lone = native.probs(logits[i : i + 1, j : j + 1], [rows[i]])
            assert torch.equal(lone[0, 0], probs[i, j])
            assert native.gumbel_argmax(lone, seeds[i : i + 1], seeds[i : i + 1], 2 + j) == ids[i, j]


# --- through the sampler


def test_a_step_of_all_rules_is_torchs(native: InC) -> None:
    """Rows of every rule side by side, column by column: drafts of different lengths, one row cut, one
    broken, one that drafts greedily, and certain drafts."""
    k = 3
    given = [
        (Rule.EXACT_MATCH, params(temperature=0)),
        *((rule, p) for rule in RULES for p in (params(), params(top_p=0.7), params(min_tokens=9))),
    ]
    texts = [
        LoneText(
            p,
            rule,
            seed,
            [1, 2, 3],
            1,
            stop_token_ids=frozenset([5]),
            drafts_greedily=rule is Rule.EXACT_MATCH or seed == 6,
        )
        for seed, (rule, p) in enumerate(given)
    ]
    rows = RowTable().rows_of(texts)
    logits = random_logits(len(rows), k + 1, 100, seed=8)
    logits[4, 1, 7], logits[8, 0], logits[9, 0, 0] = torch.nan, -torch.inf, torch.inf
    found = [
        drawn_and_judged(Sampler(rows, 100, CPU, ops), logits, logits[:, :k] + 0.3)
        for ops in (TorchOps(), NativeOps(native.library))
    ]
    (drafts, adjusted, verdicts), (our_drafts, our_adjusted, our_verdicts) = found
    assert drafts.probs is not None
    assert our_drafts.probs is not None
    assert torch.equal(our_drafts.token_ids, drafts.token_ids)
    torch.testing.assert_close(our_drafts.probs, drafts.probs, atol=1e-6, rtol=0)
    torch.testing.assert_close(our_adjusted, adjusted, atol=0, rtol=0, equal_nan=True)
    failed = {i for i, verdict in enumerate(verdicts) if verdict.failed}
    assert failed == {4, 8, 9}
    sound = [i for i in range(len(rows)) if i not in failed]
    assert [our_verdicts[i] for i in sound] == [verdicts[i] for i in sound]
    assert all(our_verdicts[i].failed for i in failed)
    certain = Drafts(drafts.token_ids, None, drafts.lengths)
    by_torch, in_c = (
        Sampler(rows, 100, CPU, ops).judge(adjusted.clone(), certain)
        for ops in (TorchOps(), NativeOps(native.library))
    )
    assert [in_c[i] for i in sound] == [by_torch[i] for i in sound]


@pytest.mark.parametrize("rule", Rule)
def test_verdicts_are_torchs_over_many_rows(rule: Rule, native: InC) -> None:
    """With acceptances and rejections at every position."""
    texts = [
        LoneText(params(top_k=20 * (seed % 2)), rule, seed, drafts_greedily=rule is Rule.EXACT_MATCH)
        for seed in range(400)
    ]
    rows = RowTable().rows_of(texts)
    logits = random_logits(len(rows), 5, 61, seed=9)
    near = logits[:, :4] + 0.3 * random_logits(len(rows), 4, 61, seed=10)
    by_torch, in_c = (
        drawn_and_judged(Sampler(rows, 61, CPU, ops), logits, near)
        for ops in (TorchOps(), NativeOps(native.library))
    )
    assert torch.equal(in_c[0].token_ids, by_torch[0].token_ids)
    assert in_c[2] == by_torch[2]
    kept = [verdict.num_accepted for verdict in in_c[2]]
    assert {kept.count(number) > 5 for number in range(5)} == {True}


@pytest.fixture
def sample_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[InC], None]:
    """Lets the simulated rounds draw in C."""

    def use(draws: InC) -> None:
        monkeypatch.setattr(simulation, "Sampler", partial(Sampler, ops=NativeOps(draws.library)))

    return use


CUTS = {
    "plain": params(),
    "top-k": params(temperature=0.7, top_k=3),
    "top-p": params(temperature=1.5, top_p=0.6),
    "flat": params(temperature=1.5, min_p=0.05),
    "narrow": params(temperature=1.5, repetition_penalty=0.8, logit_bias={3: -100.0}, min_tokens=3),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rule", RULES)
def test_the_joint_distribution_is_the_targets(
    rule: Rule, cut: str, native: InC, sample_with: Callable[[InC], None]
) -> None:
    sample_with(native)
    joint_distribution(rule, cut)(native)


def wide_gumbel_argmax_is_fair(draws: InC) -> None:
    """The choice is among more tokens than are looked at together."""
    probs = random_logits(50, seed=12).mul(0.3).softmax(-1)
    seeds = torch.arange(30_000)
    won = draws.gumbel_argmax(probs.expand(len(seeds), 1, 50), seeds, seeds % 7, 2)
    counts = torch.bincount(won[:, 0], minlength=50).double().numpy()
    assert simulation.chi_square(counts, probs.double().numpy()) > gates.SIGNIFICANCE


def joint_distribution(rule: Rule, cut: str) -> Callable[[InC], None]:
    return lambda draws: gates.joint_distribution(CUTS[cut], rule, num_samples=8000)


def test_wide_gumbel_argmax_is_fair(native: InC) -> None:
    wide_gumbel_argmax_is_fair(native)


# Planted bugs: (what is right, what is wrong, the gate that sees it).
BUGS: dict[str, tuple[str, str, Callable[[InC], None]]] = {
    "noise is not exponential": (
        "p[i] / -log(to_unit_interval(n[i]))",
        "p[i] / to_unit_interval(n[i])",
        joint_distribution(Rule.COUPLED, "plain"),
    ),
    "gives up too early": ("(1.0 + 1e-12)", "0.7", wide_gumbel_argmax_is_fair),
    "misses the last of a vector": (
        "for (int i = 0; i < HASHED; i++) {",
        "for (int i = 0; i < HASHED - 1; i++) {",
        wide_gumbel_argmax_is_fair,
    ),
    "one noise for all positions": (
        "task->first_positions[sequence] + position, NOISE_STREAM",
        "0, NOISE_STREAM",
        joint_distribution(Rule.COUPLED, "plain"),
    ),
    "top-p keeps too few": (
        "top_p * total, 1)",
        "0.5 * top_p * total, 1)",
        joint_distribution(Rule.COUPLED, "top-p"),
    ),
    "top-p cuts what crosses its share": (
        "if (above + here >= goal) break;",
        "if (above + 2 * here >= goal) break;",
        joint_distribution(Rule.REJECTION, "top-p"),
    ),
    "recovers from the target": (
        "num_accepted < row->num_drafts ? draft_row(",
        "0 ? draft_row(",
        joint_distribution(Rule.REJECTION, "plain"),
    ),
    "recovers by the draft's number": (
        "mix(key_of(seeds[i], positions[i], stream))",
        "mix(key_of(seeds[i], positions[i], 1))",
        joint_distribution(Rule.REJECTION, "plain"),
    ),
    "drops the rarest": (
        "if (!(weight > 0.0))",
        "if (!(weight > 0.1))",
        joint_distribution(Rule.REJECTION, "flat"),
    ),
    "accepts too much": (
        "* of_draft < work->probs[draft]",
        "* of_draft < 2.0f * work->probs[draft]",
        joint_distribution(Rule.REJECTION, "plain"),
    ),
    "spends the numbers of later rounds": (
        "if (stream != RECOVER_STREAM)",
        "if (stream == DRAFT_STREAM)",
        joint_distribution(Rule.BLOCK, "narrow"),
    ),
    "lengths stand by their weights": (
        "stands = slack > 0.0 ? mass / slack : 1.0;",
        "stands = slack > 0.0 ? weight : 1.0;",
        joint_distribution(Rule.BLOCK, "plain"),
    ),
    "counts a draft for its neighbour": (
        "call->drafts + i * call->max_drafts",
        "call->drafts + (i ? i - 1 : i) * call->max_drafts",
        joint_distribution(Rule.REJECTION, "plain"),
    ),
}


@pytest.fixture
def plant(fresh_library: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], InC]:
    def planted(right: str, wrong: str) -> InC:
        fresh_library.setattr(compiler, "SOURCES", plant_in(compiler.SOURCES, right, wrong, tmp_path))
        loaded = library.load_library()
        assert loaded is not None
        return InC(loaded)

    return planted


@pytest.mark.parametrize(("right", "wrong", "gate"), BUGS.values(), ids=BUGS)
def test_wrong_draws_are_noticed_at_load_and_by_the_gate(
    right: str,
    wrong: str,
    gate: Callable[[InC], None],
    native: InC,
    plant: Callable[[str, str], InC],
    sample_with: Callable[[InC], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    draws = plant(right, wrong)
    sample_with(draws)
    with pytest.raises(AssertionError):
        gate(draws)
    assert native_ops() is None
    assert "differ from torch's" in caplog.text


def test_who_draws_in_the_engine(
    native: InC, models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert isinstance(phases_of(make_engine(models.target, None)).ops, NativeOps)
    assert isinstance(phases_of(make_engine(models.target, None, native_kernels=False)).ops, TorchOps)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    library.load_library.cache_clear()
    try:
        assert isinstance(phases_of(make_engine(models.target, None)).ops, TorchOps)
    finally:
        library.load_library.cache_clear()

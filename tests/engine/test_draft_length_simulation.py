"""``auto`` against every fixed length and against none, in a simulated engine with a clock of its own.

Times are noisy and the process is descheduled now and then; acceptance is drawn per token and falls with
the position. What is compared are expected tokens (given the lengths chosen) per noiseless second, so that
luck in the drawing does not decide.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import pytest

from engine.draft_length.costs import PADDING, CostModel
from engine.draft_length.policy import DraftLengthPolicy
from engine.draft_length.rounds import Candidate, LengthPolicy, Outcome, RoundSeconds
from tests.engine.fixed_length import FixedDraftLength
from tests.engine.patience import spend

MAX_DRAFT = 8
SEQUENCE_TOKENS = 300
CALIBRATED_SIZES = (1, 2, 3, 5, 9, 17, 33, 65, 144)
UNIT = 0.01

Shape = Callable[[float], float]


def interpolate(points: list[tuple[float, float]]) -> Shape:
    def shape(size: float) -> float:
        for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
            if size <= x1:
                return y0 + (size - x0) / (x1 - x0) * (y1 - y0)
        (x0, y0), (x1, y1) = points[-2:]
        return y1 + (size - x1) * (y1 - y0) / (x1 - x0)

    return shape


PACKED_CPU = interpolate([(1, 1), (2, 1.25), (5, 1.3), (9, 1.6), (16, 2.125)])
NAIVE_CPU = interpolate([(1, 1), (2, 2), (5, 3.2), (9, 3.3), (16, 4.1)])
PROPORTIONAL = interpolate([(1, 1), (2, 2)])
GPU = interpolate([(1, 1), (60, 1.02), (120, 2.0), (180, 3.0)])


@dataclass(frozen=True)
class Machine:
    name: str
    target: Shape
    draft: Shape
    draft_cost: float
    draft_start: float = 0.0
    padding: float = PADDING

    def score_seconds(self, size: int) -> float:
        return UNIT * self.target(size)

    def draft_seconds(self, size: int) -> float:
        return UNIT * self.draft_cost * self.draft(size)

    def host_seconds(self, num_rows: int) -> float:
        return UNIT * (0.02 + 0.003 * num_rows)

    def calibrated(self, rng: random.Random) -> CostModel:
        """As measured at start: a median, but not the truth."""
        noisy = {
            seconds: {size: seconds(size) * rng.uniform(0.92, 1.08) for size in CALIBRATED_SIZES}
            for seconds in (self.draft_seconds, self.score_seconds)
        }
        return CostModel(noisy[self.draft_seconds], noisy[self.score_seconds], self.padding)


MACHINES = [
    Machine("packed CPU", PACKED_CPU, PACKED_CPU, 0.1),
    Machine("packed CPU, costly draft", PACKED_CPU, PACKED_CPU, 0.5),
    Machine("naive CPU", NAIVE_CPU, NAIVE_CPU, 0.1),
    Machine("proportional", PROPORTIONAL, PROPORTIONAL, 0.1),
    Machine("GPU", GPU, GPU, 0.1),
    Machine("GPU, tiny draft", GPU, GPU, 0.02),
    Machine("packed CPU, drafts start slowly", PACKED_CPU, PACKED_CPU, 0.03, draft_start=0.15),
]


@dataclass
class Simulation:
    """``acceptance`` by round and row; ``num_rows`` by round."""

    machine: Machine
    policy: LengthPolicy
    acceptance: Callable[[int, int], float]
    num_rows: Callable[[int], int]
    seed: int = 1
    position_decay: float = 0.97
    method: str = "draft_model"
    history: list[tuple[float, float, float]] = field(default_factory=list)  # tokens, seconds, mean length

    def run(self, num_rounds: int) -> None:
        rng = random.Random(self.seed)
        lengths: dict[int, int] = {}
        lags: dict[int, int] = {}
        next_key = 0
        for step in range(num_rounds):
            while len(lengths) < self.num_rows(step):
                lengths[next_key] = lags[next_key] = 0
                next_key += 1
            for key in list(lengths)[self.num_rows(step) :]:
                self._drop(key, lengths, lags)
            rows = [Candidate(key, self.method, 1.0, MAX_DRAFT, lags[key]) for key in lengths]
            chosen = self.policy.choose(rows)
            passes = list(chosen)
            for i, key in enumerate(lengths):
                patient = self.policy.patient_draft(key)
                if patient is not None:
                    chosen[i], passes[i] = spend(patient, [0.9] * chosen[i])
            rates = [self._rates(step, row, length) for row, length in enumerate(chosen)]
            accepted = [_draw(row_rates, rng) for row_rates in rates]
            seconds = self._seconds(rows, chosen, passes)
            expected = sum(1 + sum(_survival(row_rates)) for row_rates in rates)
            self.history.append((expected, sum(seconds), sum(chosen) / len(chosen)))
            for key, length, num_accepted in zip(list(lengths), chosen, accepted, strict=True):
                lengths[key] += num_accepted + 1
                if length == 0:
                    lags[key] += 1
                else:
                    lags[key] = int(num_accepted == length)
            self.policy.observe(
                [
                    Outcome(key, length, num_accepted, ended=lengths[key] >= SEQUENCE_TOKENS)
                    for key, length, num_accepted in zip(list(lengths), chosen, accepted, strict=True)
                ],
                RoundSeconds(*(value * _noise(rng) for value in seconds)),
            )
            for key in [key for key, length in lengths.items() if length >= SEQUENCE_TOKENS]:
                self._drop(key, lengths, lags)

    def rate(self, first: int, last: int | None = None) -> float:
        part = self.history[first:last]
        return sum(tokens for tokens, _, _ in part) / sum(seconds for _, seconds, _ in part)

    def mean_length(self, first: int, last: int | None = None) -> float:
        part = self.history[first:last]
        return sum(length for _, _, length in part) / len(part)

    def _drop(self, key: int, lengths: dict[int, int], lags: dict[int, int]) -> None:
        del lengths[key], lags[key]
        self.policy.forget(key)

    def _rates(self, step: int, row: int, length: int) -> list[float]:
        alpha = self.acceptance(step, row)
        decay = 1.0 if alpha == 1.0 else self.position_decay
        return [alpha * decay**j for j in range(length)]

    def _seconds(
        self, rows: list[Candidate], chosen: list[int], passes: list[int]
    ) -> tuple[float, float, float]:
        machine = self.machine
        starts = any(passes) and self.method == "draft_model"
        drafting = UNIT * machine.draft_start if starts else 0.0
        for position in range(max(passes)):
            active = [row for row, length in zip(rows, passes, strict=True) if length > position]
            lag = sum(row.lag for row in active) if position == 0 else 0
            drafting += machine.draft_seconds(len(active) + lag) if self.method == "draft_model" else 0.0
        padded = len(rows) + sum(chosen) + machine.padding * (max(chosen) * len(rows) - sum(chosen))
        score = machine.score_seconds(padded)
        return drafting, score, machine.host_seconds(len(rows))


def _always(value: int, _: int) -> int:
    return value


def _survival(rates: list[float]) -> list[float]:
    return [math.prod(rates[: j + 1]) for j in range(len(rates))]


def _draw(rates: list[float], rng: random.Random) -> int:
    for count, rate in enumerate(rates):
        if rng.random() >= rate:
            return count
    return len(rates)


def _noise(rng: random.Random) -> float:
    return math.exp(rng.gauss(0, 0.05)) * (10 if rng.random() < 0.01 else 1)


def simulate(
    machine: Machine,
    policy: LengthPolicy | None,
    acceptance: Callable[[int, int], float],
    num_rows: Callable[[int], int],
    num_rounds: int,
    seed: int = 1,
    method: str = "draft_model",
) -> Simulation:
    """Without a policy: ``auto``."""
    policy = policy or DraftLengthPolicy(machine.calibrated(random.Random(seed)))
    simulation = Simulation(machine, policy, acceptance, num_rows, seed, method=method)
    simulation.run(num_rounds)
    return simulation


@dataclass(frozen=True)
class Comparison:
    """``auto`` relative to the best fixed length and to none, after its start."""

    to_best: float
    to_plain: float
    best_length: int
    best_to_plain: float
    mean_length: float


def usual(machine: Machine, alpha: float, num_rows: int) -> Comparison:
    """The median of five starts: how lucky the first rounds are makes a difference of some per cent."""
    results = [steady(machine, alpha, num_rows, seed) for seed in range(1, 6)]
    return sorted(results, key=lambda result: result.to_best)[2]


def steady(machine: Machine, alpha: float, num_rows: int, seed: int = 1) -> Comparison:
    def run(policy: LengthPolicy | None, num_rounds: int) -> Simulation:
        return simulate(machine, policy, lambda *_: alpha, lambda _: num_rows, num_rounds, seed)

    auto = run(None, 1300)
    fixed = [run(FixedDraftLength(length), 120).rate(20) for length in range(MAX_DRAFT + 1)]
    rate, best = auto.rate(300), max(fixed)
    return Comparison(rate / best, rate / fixed[0], fixed.index(best), best / fixed[0], auto.mean_length(300))


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.5, 0.8, 0.95, 1.0])
def test_auto_is_as_good_as_the_best_fixed_length(machine: Machine, alpha: float) -> None:
    for num_rows in (1, 2, 4, 8, 16):
        result = steady(machine, alpha, num_rows)
        assert result.to_plain >= 0.97, (num_rows, result)
        # Where the best length gains a few percent only, it takes long to be sure that it gains at all.
        floor = 0.97 if result.best_to_plain > 1.1 or result.best_length == 0 else 0.955
        # A lone row ends where its draft is unsure; the confidence simulated here tells nothing.
        floor -= 0.005 * (num_rows == 1)
        if result.to_best < floor:
            result = usual(machine, alpha, num_rows)
        assert result.to_best >= floor, (num_rows, result)


def test_load_jumps_are_followed_at_once() -> None:
    machine = MACHINES[1]

    def num_rows(step: int) -> int:
        return 16 if 500 <= step < 1000 else 1

    def alpha(*_: int) -> float:
        return 0.95

    auto = simulate(machine, None, alpha, num_rows, 1500)
    quiet, busy = (
        max(
            simulate(machine, FixedDraftLength(length), alpha, partial(_always, n), 120).rate(20)
            for length in range(MAX_DRAFT + 1)
        )
        for n in (1, 16)
    )
    assert auto.rate(520, 1000) >= 0.97 * busy
    assert auto.rate(1020, 1500) >= 0.97 * quiet


@pytest.mark.parametrize("machine", [MACHINES[0], MACHINES[4]], ids=lambda machine: machine.name)
@pytest.mark.parametrize("num_rows", [1, 8])
def test_acceptance_jumps_are_followed_within_200_rounds(machine: Machine, num_rows: int) -> None:
    def alpha(step: int, _: int) -> float:
        return 0.05 if 500 <= step < 1000 else 0.9

    runs = [simulate(machine, None, alpha, lambda _: num_rows, 1500, seed) for seed in range(1, 10)]
    easy, hard = (
        max(
            simulate(machine, FixedDraftLength(length), lambda *_, a=a: a, lambda _: num_rows, 120).rate(20)
            for length in range(MAX_DRAFT + 1)
        )
        for a in (0.9, 0.05)
    )
    assert median(auto.rate(700, 1000) for auto in runs) >= 0.96 * hard
    # Eight rows take longer to find how much further they may go.
    assert median(auto.rate(1200, 1500) for auto in runs) >= (0.96 if num_rows == 1 else 0.93) * easy


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("num_rows", [8, 16])
def test_drafting_comes_back_however_far_the_draft_has_fallen_behind(num_rows: int, seed: int) -> None:
    def alpha(step: int, _: int) -> float:
        return 0.05 if 500 <= step < 1000 else 0.9

    machine = replace(MACHINES[0], padding=0.0)
    auto = simulate(machine, None, alpha, lambda _: num_rows, 1500, seed)
    easy = max(
        simulate(machine, FixedDraftLength(length), lambda *_: 0.9, lambda _: num_rows, 120).rate(20)
        for length in range(MAX_DRAFT + 1)
    )
    assert auto.rate(1400) >= 0.96 * easy


def test_rows_of_one_step_get_their_own_lengths() -> None:
    machine, rng = MACHINES[0], random.Random(3)
    policy = DraftLengthPolicy(machine.calibrated(rng))
    rates = [0.97, 0.97, 0.97, 0.02, 0.02, 0.02]
    rows = [Candidate(key, "draft_model", 1.0, MAX_DRAFT) for key in range(len(rates))]
    easy = hard = 0
    for step in range(600):
        lengths = policy.choose(rows)
        if step >= 300:
            easy, hard = easy + min(lengths[:3]), hard + max(lengths[3:])
        outcomes = [
            Outcome(key, length, _draw([rate] * length, rng))
            for key, (length, rate) in enumerate(zip(lengths, rates, strict=True))
        ]
        drafting = sum(
            machine.draft_seconds(sum(length > position for length in lengths))
            for position in range(max(lengths))
        )
        score = machine.score_seconds(len(rows) + sum(lengths))
        policy.observe(outcomes, RoundSeconds(drafting, score, machine.host_seconds(len(rows))))
    assert easy / 300 > 2
    assert hard / 300 < 1


def test_lookups_draft_long_where_verification_is_cheap() -> None:
    gpu = MACHINES[4]
    auto = simulate(gpu, None, lambda *_: 0.95, lambda _: 1, 600, method="ngram")
    assert auto.mean_length(300) > 7


def test_a_slower_machine_changes_nothing_by_itself() -> None:
    """Ten times everything is still the same ratio."""
    machine = MACHINES[0]
    policy = DraftLengthPolicy(
        CostModel(
            {size: machine.draft_seconds(size) / 10 for size in CALIBRATED_SIZES},
            {size: machine.score_seconds(size) / 10 for size in CALIBRATED_SIZES},
        )
    )
    auto = simulate(machine, policy, lambda *_: 0.8, lambda _: 1, 900)
    best = simulate(machine, FixedDraftLength(4), lambda *_: 0.8, lambda _: 1, 120).rate(20)
    assert auto.rate(400) >= 0.97 * best


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_bad_moment_at_start_is_seen_through(num_rows: int) -> None:
    """A draft as dear as its target never pays. When costs were measured plain steps seemed slower than they
    are, and drafts faster."""
    machine = replace(MACHINES[0], draft_cost=1.0)
    policy = DraftLengthPolicy(
        CostModel(
            {size: 0.85 * machine.draft_seconds(size) for size in CALIBRATED_SIZES},
            {size: machine.score_seconds(size) * (1.25 if size < 8 else 1.0) for size in CALIBRATED_SIZES},
        )
    )
    auto = simulate(machine, policy, lambda *_: 1.0, lambda _: num_rows, 600)
    plain = simulate(machine, FixedDraftLength(0), lambda *_: 1.0, lambda _: num_rows, 120).rate(20)
    assert auto.mean_length(0, 100) > 0.1  # it was believed
    assert auto.rate(300) >= 0.96 * plain

"""A head's vocabulary follows the texts that are served, on simulated machines: it gains, and never flaps."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engine.speculation.simulation import DRAFT, PACKED_CPU, SMALL, Machine, Simulation, always
from truedraft.engine.core.step import StepPlan, StepResult
from truedraft.engine.models.heads import served_tokens
from truedraft.engine.models.heads.served_tokens import READ_TOKENS, Ids, ServedTokens
from truedraft.engine.rounds import vocabulary_changes
from truedraft.engine.rounds.draft_vocabulary import Chosen
from truedraft.engine.rounds.vocabulary_changes import VocabularyChanges
from truedraft.engine.speculation import vocabulary_choice
from truedraft.engine.speculation.costs import Costs, Curve, PassCosts
from truedraft.engine.speculation.planner import SpeculationPlanner
from truedraft.engine.speculation.vocabulary_choice import Layer

VOCAB_SIZE = 4096
REVIEW = 512
ENDS = (4000, 4001)
# A head's pass takes these in units: what is not its output layer, and that as the target has it.
LAYER, OUTPUT = 0.04, 0.4
# In four bits a layer takes this share of it.
IN_FOUR_BITS = 0.6
ACCEPTED = 0.8

Chances = np.ndarray[Any, np.dtype[np.float64]]


def skewed(seed: int, exponent: float = 1.6) -> Chances:
    """A few tokens, from all over the vocabulary, are most of a text."""
    chances = np.arange(1, VOCAB_SIZE + 1) ** -exponent
    return np.random.default_rng(seed).permutation(chances / chances.sum())


@dataclass
class Truth:
    """Knows what texts consist of at a time, and what the layer in use really takes and leaves."""

    chances: Callable[[float], Chances]
    slower: dict[Layer, float] = field(default_factory=dict)
    left: dict[bool, float] = field(default_factory=lambda: {True: 0.97, False: 1.0})
    layer: Layer = Layer(VOCAB_SIZE, in_four_bits=False)
    token_ids: Ids | None = None

    def cost(self, layer: Layer) -> float:
        bits = IN_FOUR_BITS if layer.in_four_bits else 1.0
        return OUTPUT * bits * layer.num_tokens / VOCAB_SIZE * self.slower.get(layer, 1.0)

    def text(self, uniforms: Chances, now: float) -> list[int]:
        sums = self.chances(now).cumsum()
        return np.minimum(sums.searchsorted(uniforms), VOCAB_SIZE - 1).tolist()

    def acceptance(self, now: float, row: int = 0) -> float:
        covered = 1.0 if self.token_ids is None else float(self.chances(now)[self.token_ids].sum())
        return ACCEPTED * covered * self.left[self.layer.in_four_bits]


@dataclass(frozen=True)
class Headed(Machine):
    """Drafts with a head."""

    truth: Truth = None  # type: ignore[assignment]

    def draft_seconds(self, size: float) -> float:
        return self.unit * (LAYER + self.truth.cost(self.truth.layer)) * self.draft(size)


class Proposer:
    """Stands in for a ``HeadProposer``: its layers are ``Layer``s."""

    name, vocab_size = DRAFT.name, VOCAB_SIZE

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.changes: list[Layer] = []

    @property
    def head(self) -> Any:
        weights = SimpleNamespace(head=self.truth.layer)
        return SimpleNamespace(token_ids=self.truth.token_ids, model=SimpleNamespace(weights=weights))

    def draft_with(self, token_ids: Any, output: Layer, in_four_bits: bool) -> None:
        self.truth.token_ids = None if token_ids is None else token_ids.numpy()
        self.truth.layer = output
        assert output == (VOCAB_SIZE if token_ids is None else len(token_ids), in_four_bits)
        self.changes.append(output)


class Planner(SpeculationPlanner):
    """Tells the changes of each step, as the engine does."""

    changes: VocabularyChanges

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        super().observe(plan, result)
        self.changes.observe(plan, result)


@dataclass
class Run:
    """Serves texts with a head whose vocabulary is open, on the machine of a ``truth``."""

    truth: Truth
    num_rows: int = 8
    fixed_length: int = 0
    made: list[Ids | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        machine = Headed("head", PACKED_CPU, PACKED_CPU, 0.0, truth=self.truth)
        self.planner = Planner(machine.costs(error=0.02), proposers=[DRAFT])
        self.proposer = Proposer(self.truth)
        unit = {size: machine.unit * OUTPUT * PACKED_CPU(size) for size in (1, 8)}
        curves = {
            bits: Curve({size: factor * seconds for size, seconds in unit.items()})
            for bits, factor in ((False, 1.0), (True, IN_FOUR_BITS))
        }
        chosen = Chosen(None, 1.0, False, curves)  # type: ignore[arg-type]
        own = Layer(VOCAB_SIZE, in_four_bits=False)
        self.planner.changes = self.changes = VocabularyChanges(
            self.proposer,  # type: ignore[arg-type]
            self.planner,
            own,  # type: ignore[arg-type]
            self.make,  # type: ignore[arg-type]
            chosen,
            ENDS,
        )
        generator = np.random.default_rng(7)
        self.simulation = Simulation(
            machine,
            self.planner,
            self.truth.acceptance,
            lambda now: self.num_rows,
            num_prompt_tokens=20,
            fixed_length=self.fixed_length,
            text=lambda *_: self.truth.text(generator.random(400), self.simulation.now),
        )

    def make(self, rows: Ids | None, in_four_bits: bool) -> Layer:
        self.made.append(rows)
        return Layer(VOCAB_SIZE if rows is None else len(rows), in_four_bits)

    def serve(self, outputs: int) -> float:
        """Returns the expected tokens per second."""
        start, end = self.simulation.now, self.changes.served.num_outputs + outputs
        while self.changes.served.num_outputs < end:
            self.simulation.step()
        return self.simulation.rate(start)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes layers at once, and reviews often."""

    def at_once(work: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work())
        except MemoryError as error:
            done.set_exception(error)
        return done

    monkeypatch.setattr(vocabulary_changes, "start_beside", at_once)
    monkeypatch.setattr(vocabulary_choice, "REVIEW_OUTPUTS", REVIEW)


def start(truth: Truth, patch: pytest.MonkeyPatch, **options: Any) -> Run:
    patch.setattr(vocabulary_changes, "output_seconds", lambda layer, *_: truth.cost(layer))
    return Run(truth, **options)


@pytest.mark.parametrize("length", [0, 3])
def test_a_few_frequent_tokens_are_drafted_alone(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    run = start(Truth(lambda now: skewed(1)), monkeypatch, fixed_length=length)
    before = run.serve(REVIEW)
    assert not run.proposer.changes
    run.serve(8 * REVIEW)
    assert run.serve(6 * REVIEW) > 1.2 * before
    *earlier, last = run.proposer.changes
    assert last == Layer(1024, in_four_bits=True)
    assert len(earlier) <= (length > 0)
    ids = run.made[-1]
    assert ids is not None
    assert set(ENDS) < set(ids)
    state = run.changes.state()
    assert (state["tokens"], state["of"], state["in_four_bits"], state["changes"]) == (
        *(1024, 4096, True),
        len(earlier) + 1,
    )
    assert 0.85 < state["share_of_outputs"] < 1  # type: ignore[operator]
    assert "1024 of 4096 tokens, with a copy of the output layer in 4 bits" in str(state["why"])


@pytest.mark.parametrize(("exponent", "length"), [(0.0, 0), (0.8, 0), (1.1, 0), (0.8, 2)])
def test_no_vocabulary_comes_and_goes(monkeypatch: pytest.MonkeyPatch, exponent: float, length: int) -> None:
    """Texts use all tokens, or so many that leaving some out gains nothing: no speed is lost either way."""
    truths = [Truth(lambda now: skewed(1, exponent)) for _ in range(2)]
    run, other = (start(truth, monkeypatch, fixed_length=length) for truth in truths)
    monkeypatch.setattr(other.changes, "observe", lambda plan, result: None)
    outputs = 12 * REVIEW
    assert run.serve(outputs) > 0.98 * other.simulation.run(run.simulation.now).rate()
    assert len(run.proposer.changes) <= (exponent > 1 or length > 0)


@pytest.mark.parametrize("lengths", [(1,), (3, 3, 3), (1, 10), (3, 0), (0, 0)], ids=str)
def test_layers_are_compared_by_the_speed_at_the_lengths_of_rows(lengths: tuple[int, ...]) -> None:
    """Drafts are accepted with 0.6 until others are known, and would be half as often. 0: the best length."""
    costs = Costs(PassCosts({1: 1.1, 101: 11.1}), {DRAFT.name: PassCosts({1: 9.0, 2: 9.1})})
    planner = SpeculationPlanner(costs, proposers=[DRAFT])
    simulations = [Simulation(SMALL, planner, always(0.6), lambda _: 1, fixed_length=n) for n in lengths]
    planner.choose([simulation._new_sequence() for simulation in simulations])
    passes = PassCosts({1: 0.25, 101: 5.25})

    def speed(drafted: list[int]) -> float:
        sizes = [sum(number > place for number in drafted) for place in range(max(drafted))]
        seconds = 1 + 0.1 * sum(1 + number for number in drafted)
        seconds += sum(0.2 + 0.05 * size for size in sizes) + costs.overhead(len(drafted))
        return sum(0.3**place for number in drafted for place in range(number + 1)) / seconds

    best = max(speed([length or number for length in lengths]) for number in range(9))
    assert planner.rate_with(DRAFT.name, passes, 0.5) == pytest.approx(best)


def test_other_texts_get_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_tokens, "HALF_LIFE", 2 * REVIEW)
    monkeypatch.setattr(served_tokens, "SHARE_HALF_LIFE", REVIEW)
    topics = [1]
    run = start(Truth(lambda now: skewed(topics[-1])), monkeypatch)
    run.serve(8 * REVIEW)
    first = run.truth.token_ids
    topics.append(2)
    run.serve(10 * REVIEW)
    assert first is not None
    assert run.truth.token_ids is not None
    assert skewed(2)[first].sum() < 0.5 < 0.9 < skewed(2)[run.truth.token_ids].sum()
    assert len(run.proposer.changes) <= 3


def test_a_layer_that_takes_longer_than_its_size_promises_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = {Layer(1024, bits): 10.0 for bits in (False, True)}
    run = start(Truth(lambda now: skewed(1), slower), monkeypatch)
    run.serve(12 * REVIEW)
    assert any(ids is not None and len(ids) == 1024 for ids in run.made)
    assert {layer.num_tokens for layer in run.proposer.changes} <= {2048, VOCAB_SIZE}


def test_what_four_bits_leave_of_the_acceptance_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(Truth(lambda now: skewed(1), left={True: 0.5, False: 1.0}), monkeypatch, num_rows=2)
    run.serve(16 * REVIEW)
    bits = [layer.in_four_bits for layer in run.proposer.changes]
    assert bits[0]
    assert not bits[-1]
    assert bits.count(True) == 1


def test_a_layer_that_cannot_be_made_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make(self: Run, rows: Ids | None, in_four_bits: bool) -> Layer:
        raise MemoryError("too large")

    monkeypatch.setattr(Run, "make", make)
    run = start(Truth(lambda now: skewed(1)), monkeypatch)
    run.serve(12 * REVIEW)
    assert not run.proposer.changes
    assert 1 <= caplog.text.count("too large") <= 3


def test_shares_are_of_outputs_that_no_ranking_has_seen() -> None:
    """A thousand tokens that are all different are no reason to draft them alone."""
    served = ServedTokens(VOCAB_SIZE, [1024], ENDS)
    served.read_output(range(2000, 2000 + READ_TOKENS))
    assert served.share(1024) < 0.01
    served.read_output([*range(2000, 2512)] * 2)
    assert 0.4 < served.share(1024) < 0.6
    assert set(served.most_frequent(514)) == {*range(2000, 2512), *ENDS}


def test_prompts_are_counted_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_tokens, "HALF_LIFE", READ_TOKENS)
    served = ServedTokens(VOCAB_SIZE, [1024], ())
    assert [*served.most_frequent(3)] == [0, 1, 2]
    served.read_prompt([9] * READ_TOKENS)
    assert [*served.most_frequent(2)] == [0, 9]
    served.read_output([7] * READ_TOKENS)
    assert [*served.most_frequent(1)] == [7]
    assert served.num_outputs == READ_TOKENS

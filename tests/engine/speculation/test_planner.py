"""What the planner must do on any machine: find a good length, and its way back; never cost much; stay exact.

Properties, with margins for noise; how well each choice is tuned is ``benchmarks.defaults``' question.
"""

import math
import random
import re
from collections.abc import Callable
from functools import cache

import pytest

from tests.engine.speculation.simulation import (
    DRAFT,
    MACHINES,
    SMALL,
    Machine,
    Simulation,
    always,
    auto,
    fixed_rates,
    interpolate,
)
from truedraft.engine.core.needs import Need
from truedraft.engine.core.planning import Found, StepChoice
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import (
    DraftChoice,
    PhaseSeconds,
    Round,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from truedraft.engine.messages import Source
from truedraft.engine.proposers.ngram import NgramProposer
from truedraft.engine.speculation import lookups
from truedraft.engine.speculation.acceptance import Acceptance, Group
from truedraft.engine.speculation.costs import MAX_LENGTH, MIXED, Costs, PassCosts, Shape
from truedraft.engine.speculation.lookups import Offer, RowLookup, Terms
from truedraft.engine.speculation.planner import Option, SpeculationPlanner
from truedraft.engine.speculation.policy import FEW_ROUNDS, Batch, Best, Choice, Plan, Policy, Timing, why

PACKED, GPU = MACHINES[0], MACHINES[4]
ACCEPTANCES = (0.1, 0.5, 0.8, 0.95)
ROWS = (1, 4, 16)


@cache
def found(machine: Machine, acceptance: float, num_rows: int, seed: int) -> tuple[float, float]:
    """The planner's rate to the best fixed length's, and to plain decoding's, once it has settled."""
    rates = fixed_rates(machine, always(acceptance), num_rows)
    simulation = Simulation(
        machine, auto(machine, seed), always(acceptance), lambda _: num_rows, seed=seed
    ).run(num_rounds=700)
    settled = simulation.steps[len(simulation.steps) // 4].now
    rate = simulation.rate(start=settled)
    return rate / max(rates), rate / rates[0]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_it_finds_a_good_length(machine: Machine) -> None:
    ratios = [found(machine, acceptance, num_rows, 1)[0] for acceptance in ACCEPTANCES for num_rows in ROWS]
    assert sum(ratios) / len(ratios) > 0.96
    assert min(ratios) > 0.88


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_it_is_never_much_slower_than_plain_decoding(machine: Machine) -> None:
    for acceptance in ACCEPTANCES:
        for num_rows in ROWS:
            assert found(machine, acceptance, num_rows, 1)[1] > 0.96, (acceptance, num_rows)


def test_the_same_past_gives_the_same_choices() -> None:
    first, second = (
        Simulation(PACKED, auto(PACKED), always(0.7), lambda _: 4).run(num_rounds=300) for _ in range(2)
    )
    assert first.steps == second.steps


class NeverIdle(SpeculationPlanner):
    """Takes the long way in every step."""

    def _stays(self) -> bool:
        return False


@pytest.mark.parametrize("acceptance", [0.1, 0.8])
def test_the_short_way_while_drafting_is_off_finds_the_same(acceptance: float) -> None:
    first, second = (
        Simulation(SMALL, planner, always(acceptance), rows_that_come_and_go).run(6.0)
        for planner in (
            SpeculationPlanner(SMALL.costs(), proposers=[DRAFT]),
            NeverIdle(SMALL.costs(), proposers=[DRAFT]),
        )
    )
    assert first.steps == second.steps
    assert (first.mean_length() < 0.5) is (acceptance < 0.5)


@pytest.mark.parametrize("num_rows", [1, 8])
def test_it_finds_the_way_back_after_hard_text(num_rows: int) -> None:
    """While drafts are hopeless drafting is off; it is on again some time after they are good again."""
    hard_until = 15.0
    simulation = Simulation(
        PACKED, auto(PACKED), lambda now, _: 0.02 if now < hard_until else 0.9, lambda _: num_rows
    ).run(hard_until + 25.0)
    assert simulation.mean_length(hard_until / 2, hard_until) < 0.5
    assert simulation.mean_length(hard_until + 15.0) > 2


@pytest.mark.parametrize("error", [2.0, 4.0])
def test_a_calibration_at_a_busy_moment_is_corrected(error: float) -> None:
    """Passes of several tokens were measured too slow: drafting seems not to pay, and does."""
    costs = PACKED.costs()
    costs.score = PassCosts({1: PACKED.score_seconds(1), 5: error * PACKED.score_seconds(5)})
    planner = SpeculationPlanner(costs, proposers=[DRAFT])
    simulation = Simulation(PACKED, planner, always(0.9), lambda _: 1).run(12.0)
    assert simulation.mean_length(6.0) > 2


def test_a_slower_machine_changes_nothing() -> None:
    """Whatever slows all passes alike says nothing about lengths."""
    simulation = Simulation(
        PACKED, auto(PACKED), always(0.8), lambda _: 4, speed=lambda now: 1.0 if now < 8 else 5.0
    ).run(40.0)
    best = max(fixed_rates(PACKED, always(0.8), 4))
    assert simulation.rate(20.0) > 0.95 * best / 5


def rows_that_come_and_go(now: float) -> int:
    return 1 + int(now * 3) % 12


def test_rows_come_and_go() -> None:
    rates = [
        Simulation(SMALL, planner, always(0.8), rows_that_come_and_go).run(6.0).rate(1.0)
        for planner in (auto(SMALL), NoDrafts(SMALL.costs()))
    ]
    assert rates[0] > 0.97 * rates[1]


def test_what_the_first_round_of_a_step_takes_is_not_counted_twice() -> None:
    """Two plain rounds share a step, and its slow beginning; a round with drafts bears one alone. It pays."""
    score = interpolate([(1, 0.5), (16, 7.0), (32, 11.6), (48, 15.6), (64, 20.0)])
    machine = Machine("busy", score, interpolate([(1, 1), (16, 1)]), 0.2, unit=0.001, host=0.2,
                      host_per_row=0.025, step_seconds=0.02, busy=1.7)  # fmt: skip
    rates = fixed_rates(machine, always(0.8), 16)
    assert 1.05 * rates[0] < max(rates) < 1.15 * rates[0]
    for seed in range(3):
        planner = auto(machine, seed, error=0.0)
        simulation = Simulation(machine, planner, always(0.8), lambda _: 16, seed=seed).run(20.0)
        assert simulation.rate(5.0) > 0.96 * max(rates)  # 0.93 if it is


class EverySecondFixed(Simulation):
    """Every second sequence drafts one token, whatever the planner thinks."""

    def _new_sequence(self) -> Sequence:
        sequence = super()._new_sequence()
        if self.num_started % 2:
            sequence.fixed_draft_length, sequence.num_speculative_tokens = True, 1
        return sequence


def test_sequences_that_decide_for_themselves_do_not_stop_drafting() -> None:
    simulation = EverySecondFixed(PACKED, auto(PACKED), always(0.9), lambda _: 1, num_tokens=40).run(20.0)
    own = [step for step in simulation.steps if step.now > 5 and step.length != 1]
    assert sum(step.length == 0 for step in own) < 0.2 * len(own)


class NoDrafts(SpeculationPlanner):
    """Drafting is always off."""

    def choose(self, decoding: list[Sequence]) -> StepChoice:
        super().choose([])
        return StepChoice({sequence: self.choose_for_prompt(sequence) for sequence in decoding}, 16)


def test_a_choice_does_not_outlive_its_exploration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that share a step end with the exploration, whose plan is not the active one; it has a step."""
    planner = auto(SMALL)
    honest, explored = planner.choose, []

    def choose(decoding: list[Sequence]) -> StepChoice:
        choice = honest(decoding)
        if planner.policy.exploration is not None:
            explored.append((choice.max_rounds, planner.policy.exploration.rounds_left))
        return choice

    monkeypatch.setattr(planner, "choose", choose)
    Simulation(SMALL, planner, always(0.8), lambda _: 2).run(8.0)
    assert len(explored) > 5
    assert all(max_rounds <= rounds_left for max_rounds, rounds_left in explored)
    assert max(rounds_left for _, rounds_left in explored) == 16


def test_rows_may_come_and_go_while_the_same_ones_scout(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has brought their caches up to date is lost if the exploration ends with the number of rows, or
    if others, whose caches are not, draft in their place."""
    planner = auto(SMALL)
    honest, explored = planner.choose, dict[int, list[tuple[int, set[Sequence]]]]()

    def choose(decoding: list[Sequence]) -> StepChoice:
        choice = honest(decoding)
        if planner.policy.exploration is not None:
            scouts = {sequence for sequence, draft in choice.drafts.items() if draft.num_tokens}
            explored.setdefault(planner.policy.explorer.num_explored, []).append((len(decoding), scouts))
        return choice

    monkeypatch.setattr(planner, "choose", choose)
    Simulation(SMALL, planner, always(0.4), lambda now: 15 + int(50 * now) % 2).run(20.0)
    assert sum(len({num_rows for num_rows, _ in steps}) > 1 for steps in explored.values()) > 3
    for steps in explored.values():
        for (_, before), (_, now) in zip(steps, steps[1:], strict=False):
            assert now <= before


REPEATED = list(range(40))


def repeating(rng: random.Random, number: int) -> list[int]:
    return REPEATED * 40


def random_text(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(1 << 30) for _ in range(900)]


def with_ngrams(machine: Machine) -> SpeculationPlanner:
    return auto(machine, lookups=[NgramProposer(2)])


def test_ngrams_draft_where_texts_repeat_themselves() -> None:
    both, alone = (
        Simulation(
            PACKED,
            with_ngrams(PACKED),
            always(0.3),
            lambda _: 1,
            sources=sources,
            text=repeating,
            num_prompt_tokens=8,
        ).run(60.0)
        for sources in (("ngram", "draft_model"), ("draft_model",))
    )
    assert both.rate(30.0) > 1.5 * alone.rate(30.0)


def test_ngrams_are_hardly_read_where_texts_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes Python time for every token of every row."""
    num_read = 0
    honest = NgramProposer.read

    def read(self: NgramProposer, sequence, max_tokens):  # type: ignore[no-untyped-def]
        nonlocal num_read
        tokens = honest(self, sequence, max_tokens)
        num_read += tokens
        return tokens

    monkeypatch.setattr(NgramProposer, "read", read)
    options = {"sources": ("ngram", "draft_model"), "text": random_text, "num_prompt_tokens": 8}
    simulation = Simulation(SMALL, with_ngrams(SMALL), always(0.3), lambda _: 8, **options).run(4.0)  # type: ignore[arg-type]
    assert num_read * lookups.READ_SECONDS < 0.01 * simulation.now


def late_repeats(rng: random.Random, number: int) -> list[int]:
    """Ordinary texts, and then one that begins to repeat a sentence of 20 tokens after 100 others."""
    ordinary = random_text(rng, number)
    return ordinary if number < 6 else ordinary[:100] + ordinary[100:120] * 20


@pytest.mark.parametrize("machine", [PACKED, SMALL], ids=lambda machine: machine.name)
def test_ngrams_draft_from_texts_that_begin_to_repeat_themselves_late(machine: Machine) -> None:
    """What came before has taught that nothing repeats itself, and 100 rounds of looking up brought nothing:
    but that takes less than a hundredth of the rounds."""
    planner = with_ngrams(machine)
    simulation = Simulation(
        machine, planner, always(0.0), lambda _: 1, sources=("ngram",), text=late_repeats, num_prompt_tokens=8
    )
    while simulation.num_started < 6 or len(simulation.running[0]) < 130:
        simulation.step()
    num_steps = len(simulation.steps)
    while simulation.num_started == 6 and simulation.running:
        simulation.step()
    # 178 tokens, of which the first ones are still to be found.
    assert sum(step.num_rounds for step in simulation.steps[num_steps:]) < 40


def test_looking_up_for_many_rows_of_a_small_model_must_pay() -> None:
    """There it takes more than a hundredth of a row's part of a step."""
    planner = with_ngrams(SMALL)
    options = {"sources": ("ngram",), "text": random_text, "num_prompt_tokens": 8}
    Simulation(SMALL, planner, always(0.0), lambda _: 16, **options).run(2.0)  # type: ignore[arg-type]
    assert planner.state()["on"] is False
    assert "looking up n-grams takes 0.05 ms, more than the" in str(planner.state()["why"])


@pytest.mark.parametrize(
    ("num_rows", "length", "said"),
    [
        (3, 1, "drafting 1 token for each of 3 sequences is expected to give 1.70 times"),
        (1, 2, "drafting 2 tokens for one sequence is expected to give 1.70 times"),
    ],
)
def test_the_reason_counts_what_each_sequence_drafts(num_rows: int, length: int, said: str) -> None:
    """The round's shape has the sum over all rows."""
    plain = Plan(Shape(num_rows, 0), 0, 1.0, 1.0)
    drafting = Plan(Shape(num_rows, length, num_rows * length), length, 1.7, 1.52)
    assert said in why(Best(drafting, drafting, plain))
    assert why(Best(drafting, drafting, plain)).endswith("in 1.52 times its time, so 1.12 times the speed")
    assert why(Best(plain, drafting, plain)).startswith("off, since it would not pay: drafting ")


def test_the_report_says_why_ngrams_draft_or_not() -> None:
    words = {}
    for text in (random_text, repeating):
        planner = with_ngrams(PACKED)
        options = {"sources": ("ngram",), "text": text, "num_prompt_tokens": 8}
        Simulation(PACKED, planner, always(0.0), lambda _: 1, **options).run(3.0)  # type: ignore[arg-type]
        words[text] = planner.state()["on"], str(planner.state()["why"])
    assert words[random_text] == (
        False,
        "off: no row drafts with a draft model, and n-grams find nothing: the texts do not repeat themselves",
    )
    is_on, why = words[repeating]
    assert is_on
    assert re.fullmatch(
        r"on: n-grams draft \d.* tokens for each row of a step, of which .*% are accepted", why
    )


def test_ngrams_still_draft_after_many_tokens() -> None:
    """The bound on what a step reads is of each step anew: it cannot be used up."""
    planner = with_ngrams(SMALL)
    options = {"sources": ("ngram",), "text": repeating, "num_prompt_tokens": 8, "num_tokens": 1000}
    simulation = Simulation(SMALL, planner, always(0.0), lambda _: 4, **options)  # type: ignore[arg-type]
    while sum(step.tokens for step in simulation.steps) < 4 * lookups.MAX_READ:
        simulation.step()
    assert any(step.source == "ngram" for step in simulation.steps[-40:])


def test_a_bound_on_reading_that_is_used_up_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: no step gives back what earlier ones have read."""
    left = lookups.MAX_READ

    def read_all(asked: list[lookups.RowLookup]) -> None:
        nonlocal left
        for lookup in asked:
            assert lookup.reader is not None
            left -= lookup.reader.read(lookup.sequence, left)

    monkeypatch.setattr("truedraft.engine.speculation.planner.read_all", read_all)
    with pytest.raises(AssertionError):
        test_ngrams_still_draft_after_many_tokens()


def check_that_options_are_learned_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a step has drafted is what its seconds are learned for, explorations and look-ups included."""
    planner = auto(SMALL, lookups=[NgramProposer(2)])
    learned: list[tuple[int, set[int], bool]] = []
    honest = planner.policy.learn

    def learn(choice: Choice, plan: StepPlan, result: StepResult, timing: Timing) -> None:
        honest(choice, plan, result, timing)
        roomy = [part for part in plan.rows if part.sequence.max_num_tokens - len(part.sequence) > MAX_LENGTH]
        lengths = {part.draft.num_tokens for part in roomy} - {0}
        learned.append((timing.shape.option, lengths, any(part.draft.known for part in plan.rows)))

    monkeypatch.setattr(planner.policy, "learn", learn)
    Simulation(
        SMALL,
        planner,
        always(0.7),
        rows_that_come_and_go,
        sources=("ngram", "draft_model"),
        text=lambda rng, number: repeating(rng, number) if number % 3 == 0 else random_text(rng, number),
        num_prompt_tokens=8,
    ).run(6.0)
    for option, lengths, is_known in learned:
        assert (option == MIXED) is is_known
        assert is_known or lengths <= {option}
    assert len({option for option, _, _ in learned}) > 4


def test_options_are_learned_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    check_that_options_are_learned_by_their_names(monkeypatch)


@pytest.mark.parametrize(
    "name",
    [
        lambda option: option.choice.best.active.shape.option,  # the name of what was not explored
        lambda option: MAX_LENGTH,
    ],
)
def test_an_option_that_is_learned_under_the_name_of_another_is_caught(
    monkeypatch: pytest.MonkeyPatch, name: Callable[[Option], int]
) -> None:
    """Planted bugs."""
    monkeypatch.setattr(Option, "costs_as", property(name))
    with pytest.raises(AssertionError):
        check_that_options_are_learned_by_their_names(monkeypatch)


def test_an_option_that_is_learned_as_the_last_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: the planner remembers what it chose last, and learns from earlier steps as from that."""
    honest = Policy.choose
    last: list[Choice] = []

    def choose(self: Policy, batch: Batch) -> Choice:
        last.append(honest(self, batch))
        return last[-1]

    monkeypatch.setattr(Policy, "choose", choose)
    monkeypatch.setattr(
        Option, "costs_as", property(lambda self: MIXED if self.is_mixed else last[-1].plan.shape.option)
    )
    with pytest.raises(AssertionError):
        check_that_options_are_learned_by_their_names(monkeypatch)


@pytest.mark.parametrize("machine", [PACKED, SMALL], ids=lambda machine: machine.name)
def test_costs_measured_at_a_busy_moment_are_tried_again(machine: Machine) -> None:
    """Plain rounds seem five times as slow as they are, so a useless draft seems to pay."""
    planner = auto(machine)
    simulation = Simulation(machine, planner, always(0.05), lambda _: 4).run(5.0)
    shape = Shape(4, 0)
    while planner.costs.model_seconds(shape) < 5 * machine.score_seconds(4):
        planner.costs.observe(shape, 100.0)
    simulation.run(40.0)
    assert simulation.rate(30.0) > 0.95 * fixed_rates(machine, always(0.05), 4)[0]


def test_a_row_that_only_catches_up_teaches_nothing() -> None:
    """Its plan asked for no draft; none was rejected."""
    planner = auto(PACKED)
    simulation = Simulation(PACKED, planner, always(1.0), lambda _: 1).run(num_rounds=20)
    (sequence,) = simulation.running
    (group,) = planner._groups.values()
    before = list(group.acceptance(DRAFT.name).reached)
    DRAFT.cache.table(sequence).num_computed_tokens = 0
    option = planner.choose([sequence]).option
    part = ScheduledSequence(sequence, 1, DraftChoice("draft_model"), num_catch_up_tokens=1024)
    plan = StepPlan([part], [part], {Need.CATCH_UP}, 1, 0.0, option)
    one = Round([0], [0], [[7]], PhaseSeconds(0.1, 0.01, 0.0))
    planner.observe(plan, StepResult([one], host_seconds=0.001))
    assert group.acceptance(DRAFT.name).reached == before


def test_a_pass_measured_at_a_busy_moment_makes_no_larger_one_free() -> None:
    """One token took longer than five: the last slope must not go on below nothing."""
    costs = Costs(PassCosts({1: 0.002, 5: 0.001}))
    seconds = [costs.model_seconds(Shape(rows, 0)) for rows in (1, 5, 30, 500)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    costs.observe(Shape(500, 0), 0.01)


@pytest.mark.parametrize("machine", [PACKED, SMALL], ids=lambda machine: machine.name)
@pytest.mark.parametrize("acceptance", [0.05, 0.9])
def test_the_reported_speed_up_is_possible(machine: Machine, acceptance: float) -> None:
    """Achieved and plain are rates of the same rounds, host included in both."""
    planner = auto(machine)
    simulation = Simulation(machine, planner, always(acceptance), lambda _: 2).run(12.0)
    rates = planner.state()["tokens_per_second"]
    assert isinstance(rates, dict)
    true = simulation.rate(6.0) / fixed_rates(machine, always(acceptance), 2)[0]
    assert rates["achieved"] / rates["plain"] == pytest.approx(true, rel=0.12)


def test_acceptance_by_position() -> None:
    acceptance = Acceptance()
    for _ in range(300):
        acceptance.learn(3, 3)
        acceptance.learn(3, 1)
    rates = acceptance.rates()
    assert rates[0] > 0.95
    assert rates[1] == pytest.approx(0.5, abs=0.1)
    assert rates[2] > 0.9
    expected = [acceptance.expected(length) for length in range(MAX_LENGTH + 1)]
    assert expected == sorted(expected)
    assert expected[3] == pytest.approx(1 + 0.5 + 0.5, abs=0.2)


def test_a_sequence_starts_from_its_group() -> None:
    group = Acceptance()
    for _ in range(100):
        group.learn(4, 4)
    assert Acceptance(group).expected(4) == pytest.approx(group.expected(4), rel=0.02)


def test_what_slows_every_option_is_the_level() -> None:
    costs = Costs(PassCosts({1: 1.0, 8: 2.0}), {"": PassCosts({1: 0.1, 8: 0.2})})
    plain, drafting = Shape(1, 0, 0, ()), Shape(1, 3, 3, (1, 1, 1))
    before = costs.model_seconds(drafting) / costs.model_seconds(plain)
    for _ in range(50):
        costs.observe(plain, 3.0)
    assert costs.model_seconds(plain) == pytest.approx(3.0, rel=0.05)
    assert costs.model_seconds(drafting) / costs.model_seconds(plain) == pytest.approx(before, rel=0.1)
    for _ in range(50):
        costs.observe(drafting, 9.0)
    assert costs.model_seconds(drafting) == pytest.approx(9.0, rel=0.05)
    assert costs.model_seconds(plain) == pytest.approx(3.0, rel=0.2)  # the factor was 1.7


def test_estimates_of_what_does_not_run_do_not_drift() -> None:
    """Rounds get slower within a text by more than is known; two options take turns, a third stays right."""
    costs = Costs(PassCosts({1: 1.0, 64: 2.0}), {"": PassCosts({1: 0.1, 64: 0.2})})
    shapes = [Shape(4, length, 4 * length, (4,) * length) for length in range(3)]
    true = [1.0, 1.3, 1.7]
    for _ in range(20):
        for shape, seconds in zip(shapes, true, strict=True):
            costs.observe(shape, seconds)
    for _ in range(300):
        for shape, seconds in zip(shapes[:2], true, strict=False):
            for growth in range(10):
                costs.observe(shape, seconds * (0.92 + 0.016 * growth))
    assert costs.model_seconds(shapes[2]) == pytest.approx(true[2], rel=0.12)


def test_few_explorations_mend_what_many_rounds_taught() -> None:
    """Plain rounds seemed a tenth slower for a while; since then all rows draft, but for explorations."""
    costs = Costs(PassCosts({1: 1.0, 64: 2.0}), {"": PassCosts({1: 0.1, 64: 0.2})})
    plain, drafting = Shape(16, 0), Shape(16, 1, 16, (16,))
    rng = random.Random(1)

    def observe(shape: Shape, seconds: float) -> None:
        costs.observe(shape, seconds * math.exp(rng.gauss(0, 0.03)))

    for _ in range(100):
        observe(plain, 1.43)
        observe(drafting, 2.2)
    for _ in range(12):
        for _ in range(50):
            observe(drafting, 2.2)
        for _ in range(FEW_ROUNDS):
            observe(plain, 1.3)
    ratio = costs.model_seconds(drafting) / costs.model_seconds(plain)
    assert ratio == pytest.approx(2.2 / 1.3, rel=0.02)


def test_steps_of_few_rounds_seem_no_slower_than_those_of_many() -> None:
    """Now and then another process takes the processor for a while, from rounds of all kinds alike."""
    costs = Costs(PassCosts({1: 1e-3, 64: 1e-2}), {"": PassCosts({1: 1e-4, 64: 1e-3})})
    plain, drafting = Shape(16, 0), Shape(16, 1, 16, (16,))
    rng = random.Random(1)

    def seconds(usual: float) -> float:
        return usual * math.exp(rng.gauss(0, 0.03)) + (5e-3 if rng.random() < 40 * usual else 0.0)

    ratios = []
    for number in range(3000):
        costs.observe_step(plain, None, [seconds(3.5e-3) for _ in range(4)], 1e-4)
        costs.observe_step(drafting, None, [seconds(6e-3)], 1e-4)
        if number > 1000:
            ratios.append(costs.model_seconds(drafting) / costs.model_seconds(plain))
    assert sum(ratios) / len(ratios) == pytest.approx(6 / 3.5, rel=0.04)  # the median: 1.06 of it


def test_rounds_that_a_coarse_clock_does_not_see_are_learned_from() -> None:
    costs = Costs(PassCosts({1: 1e-3, 64: 1e-2}))
    before = costs.model_seconds(Shape(4, 0))
    costs.observe_step(Shape(4, 0), 0.0, [0.0, 1e-6], 0.0)
    assert 0 < costs.model_seconds(Shape(4, 0)) < before


def test_mixed_rounds_do_not_spoil_what_is_known_of_the_others() -> None:
    """Phases of plain and of mixed rounds, whose drafts come from elsewhere than they did at first."""
    costs = Costs(PassCosts({1: 1.0, 64: 2.0}), {"": PassCosts({1: 0.1, 64: 0.2})})
    plain, drafting, mixed = Shape(16, 0), Shape(16, 1, 16, (16,)), Shape(16, MIXED, 16, (16,))
    for phase in range(40):
        for number in range(100):
            costs.observe(plain, 1.3)
            if number % 20 == 0 and phase < 10:
                costs.observe(drafting, 1.7)
        for _ in range(100):
            costs.observe(mixed, 2.0 if phase < 10 else 1.2)
    ratio = costs.model_seconds(drafting) / costs.model_seconds(plain)
    assert ratio == pytest.approx(1.7 / 1.3, rel=0.05)


def test_sources_without_a_model_of_theirs_cost_nothing() -> None:
    planner = auto(PACKED)
    simulation = Simulation(PACKED, planner, always(0.5), lambda _: 3, sources=(), num_tokens=10)
    simulation.run(num_rounds=50)
    assert simulation.mean_length() == 0
    assert planner.state()["on"] is None
    assert not planner._rows
    assert not planner._ended


def test_sequences_that_have_ended_are_forgotten() -> None:
    planner = auto(SMALL)
    simulation = Simulation(SMALL, planner, always(0.5), lambda _: 2, num_tokens=10).run(num_rounds=2000)
    assert simulation.num_started > 100
    assert len(planner._rows) < 50
    assert len(planner._observed) < 100


def half_repeat_themselves(rng: random.Random, number: int) -> list[int]:
    """Every second text repeats itself; the others only seem to: two tokens recur, and others follow them."""
    if number % 2:
        return repeating(rng, number)
    return [token for _ in range(200) for token in (7, 8, *(rng.randrange(1 << 30) for _ in range(3)))]


def test_each_row_drafts_as_far_as_pays_for_it() -> None:
    """No length for all rows is as good."""

    def rate(planner: SpeculationPlanner, fixed_length: int = 0, *sources: Source) -> float:
        simulation = Simulation(
            PACKED,
            planner,
            always(0.0),
            lambda _: 8,
            sources=sources,
            text=half_repeat_themselves,
            num_prompt_tokens=60,
            fixed_length=fixed_length,
        )
        return simulation.run(30.0).rate(5.0)

    none = rate(auto(PACKED))
    best = max(rate(with_ngrams(PACKED), length, "ngram") for length in (1, 2, 4, 8, 16))
    assert rate(with_ngrams(PACKED), 0, "ngram") > 1.02 * max(best, none)


class Guess:
    """Offers the same eight tokens to every row."""

    name: Source = "ngram"

    def offers(self, sequence: Sequence, limit: int) -> Found:
        return Found(4, list(range(8)))


def check_lengths_of_rows() -> None:
    """What one row is offered is always right, and what the other one is offered never is."""
    group = Group("greedy")
    lucky, unlucky = (RowLookup(one_sequence(), group, Guess(), always=True, is_asked=True) for _ in range(2))
    terms = Terms(
        rate=100.0, usual=0.01, seconds=[0.006 * length for length in range(9)], alone=0.0, free=1.0
    )
    for _ in range(40):
        for lookup, emitted in ((lucky, list(range(9))), (unlucky, [99])):
            offer = lookup.ask(8, terms, 0.0, is_fixed=False)
            assert offer is not None
            offer.judge(emitted)
    lengths = [lookup.ask(8, terms, 0.0, is_fixed=False).num_worth for lookup in (lucky, unlucky)]  # type: ignore[union-attr]
    assert lengths == [8, 0]


def one_sequence() -> Sequence:
    return Simulation(PACKED, with_ngrams(PACKED), always(0.0), lambda _: 1)._new_sequence()


def test_a_row_s_length_follows_its_own_verdicts() -> None:
    check_lengths_of_rows()


def neighbours_length(patch: pytest.MonkeyPatch) -> None:
    """Each row drafts as far as the one before it."""
    honest = RowLookup.ask
    last: list[Offer] = []

    def ask(self: RowLookup, limit: int, terms: Terms, model_tokens: float, is_fixed: bool) -> Offer | None:
        offer = honest(self, limit, terms, model_tokens, is_fixed)
        assert offer is not None
        last.append(offer)
        return offer._replace(num_worth=last[max(0, len(last) - 2)].num_worth)

    patch.setattr(RowLookup, "ask", ask)


def groups_table(patch: pytest.MonkeyPatch) -> None:
    """All rows have the acceptance of their group."""
    patch.setattr(RowLookup, "_table", lambda self, where, strength: self.group.acceptance("ngram"))


@pytest.mark.parametrize("plant", [neighbours_length, groups_table])
def test_a_length_of_other_rows_is_caught(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Planted bugs."""
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_lengths_of_rows()

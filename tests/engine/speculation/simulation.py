"""An engine without models: real sequences, plans and results, a clock of its own, and dice for verdicts.

Times are noisy and the process is descheduled now and then. What is compared are expected tokens, given what
was drafted, per noiseless second, so that luck in the drawing does not decide.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.engine.planners import CachedProposer
from truedraft.engine.core.needs import Need
from truedraft.engine.core.planning import Planner, StepChoice
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import (
    DraftChoice,
    Kind,
    PhaseSeconds,
    Round,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from truedraft.engine.messages import SamplingParams, Source
from truedraft.engine.speculation.costs import MAX_LENGTH, Costs, PassCosts
from truedraft.engine.speculation.planner import SpeculationPlanner

UNIT = 0.01
CALIBRATED_SIZES = (1, 2, 3, 5, 9, 17, 33, 65, 144)
MAX_BATCHED_TOKENS = 1024
FEW_MISSING = 32

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
    """``unit`` seconds of a target pass over one token. ``step_seconds`` > 0: short rounds share steps, whose
    first round takes ``cold`` times as long as the others. ``busy``: units by which the first round of every
    step takes longer."""

    name: str
    target: Shape
    draft: Shape
    draft_cost: float
    draft_start: float = 0.0
    unit: float = UNIT
    host: float = 0.02
    host_per_row: float = 0.003
    step_seconds: float = 0.0
    cold: float = 1.0
    busy: float = 0.0

    def score_seconds(self, size: float) -> float:
        return self.unit * self.target(size)

    def draft_seconds(self, size: float) -> float:
        return self.unit * self.draft_cost * self.draft(size)

    def host_seconds(self, num_rows: int) -> float:
        return self.unit * (self.host + self.host_per_row * num_rows)

    def costs(self, rng: random.Random | None = None, error: float = 0.08) -> Costs:
        """Returns costs as measured at start: not quite the truth."""
        rng = rng or random.Random(1)
        score, draft = (
            PassCosts({size: seconds(size) * rng.uniform(1 - error, 1 + error) for size in CALIBRATED_SIZES})
            for seconds in (self.score_seconds, self.draft_seconds)
        )
        return Costs(score, {DRAFT.name: draft}, self.step_seconds)


MACHINES = [
    Machine("packed CPU", PACKED_CPU, PACKED_CPU, 0.1),
    Machine("packed CPU, costly draft", PACKED_CPU, PACKED_CPU, 0.5),
    Machine("naive CPU", NAIVE_CPU, NAIVE_CPU, 0.1),
    Machine("proportional", PROPORTIONAL, PROPORTIONAL, 0.1),
    Machine("GPU", GPU, GPU, 0.1),
    Machine("GPU, tiny draft", GPU, GPU, 0.02),
    Machine("packed CPU, drafts start slowly", PACKED_CPU, PACKED_CPU, 0.03, draft_start=0.15),
]
# A small model on a CPU has rounds of a millisecond, which share steps.
SMALL = Machine("small", PACKED_CPU, PACKED_CPU, 0.12, unit=0.0008, host=0.25, host_per_row=0.03,
                step_seconds=0.02, cold=1.4)  # fmt: skip


# Whose cache the rows of all simulations have.
DRAFT = CachedProposer()


class FixedPlanner:
    """Every row drafts ``length`` tokens."""

    def __init__(self, length: int, machine: Machine) -> None:
        self.length = length
        self.max_rounds = 16 if machine.step_seconds else 1
        self.num_speculative_tokens = float(length)

    def choose(self, decoding: list[Sequence]) -> StepChoice:
        drafts = {
            sequence: DraftChoice(
                "draft_model",
                min(self.length, sequence.max_num_tokens - len(sequence) - 1),
                DRAFT.num_missing(sequence),
            )
            for sequence in decoding
        }
        return StepChoice(drafts, self.max_rounds)

    def choose_for_prompt(self, sequence: Sequence) -> DraftChoice:
        return DraftChoice()

    def lagging(self, sequence: Sequence) -> list[str]:
        return [] if self.length > 0 else [DRAFT.name]

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass

    def forget_texts(self) -> None:
        pass

    def state(self) -> dict[str, object]:
        return {}


def always(value: float) -> Callable[[float, int], float]:
    return lambda *_: value


@dataclass
class Step:
    """What a step came to: expected tokens, noiseless seconds, mean draft length, rounds."""

    now: float
    tokens: float
    seconds: float
    length: float
    num_rounds: int
    num_rows: int
    source: str


@dataclass
class Simulation:
    """``acceptance`` of a draft's tokens by seconds and row; ``num_rows`` by seconds. ``text`` is what a
    sequence's target says after a prompt. ``fixed_length`` of drafts, 0: it is open."""

    machine: Machine
    planner: Planner
    acceptance: Callable[[float, int], float]
    num_rows: Callable[[float], int]
    seed: int = 1
    position_decay: float = 0.97
    num_tokens: int = 300
    num_prompt_tokens: int = 1
    sources: tuple[Source, ...] = ("draft_model",)
    fixed_length: int = 0
    text: Callable[[random.Random, int], list[int]] | None = None
    speed: Callable[[float], float] = lambda _: 1.0
    noise: float = 0.05
    temperature: Callable[[int], float] = lambda _: 1.0
    steps: list[Step] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.running: list[Sequence] = []
        self.texts: dict[Sequence, list[int]] = {}
        self.num_started = 0

    def run(self, seconds: float = math.inf, num_rounds: float = math.inf) -> "Simulation":
        end, rounds = self.now + seconds, 0
        while self.now < end and rounds < num_rounds:
            self.step()
            rounds += self.steps[-1].num_rounds
        return self

    def step(self) -> None:
        wanted = self.num_rows(self.now)
        for sequence in self.running[wanted:]:
            self._finish(sequence)
        while len(self.running) < wanted:
            self.running.append(self._new_sequence())
        plan = self._plan()
        rounds, true_seconds, expected = self._rounds(plan)
        num_rows = len(plan.rows)
        host = self.machine.host_seconds(num_rows) * self.speed(self.now)
        result = StepResult(rounds, host_seconds=host * self._noise())
        length = sum(sum(one.num_drafted) for one in rounds) / num_rows / len(rounds)
        drafts = [part.draft for part in plan.rows]
        source = max((draft.first_source for draft in drafts if draft.num_first_drafts), default="none")
        self.steps.append(
            Step(self.now, expected, true_seconds + host, length, len(rounds), num_rows, source)
        )
        self.now += true_seconds + host
        for sequence in list(self.running):
            if len(sequence) >= sequence.max_num_tokens:
                self._finish(sequence)
        self.planner.observe(plan, result)

    def rate(self, start: float = 0.0, end: float = math.inf) -> float:
        """Expected tokens per noiseless second."""
        part = [step for step in self.steps if start <= step.now < end]
        return sum(step.tokens for step in part) / sum(step.seconds for step in part)

    def mean_length(self, start: float = 0.0, end: float = math.inf) -> float:
        part = [step for step in self.steps if start <= step.now < end]
        return sum(s.length * s.num_rounds for s in part) / sum(s.num_rounds for s in part)

    def _new_sequence(self) -> Sequence:
        self.num_started += 1
        prompt = [-self.num_started * 10000 - i for i in range(self.num_prompt_tokens)]
        text = self.text(self.rng, self.num_started) if self.text else []
        if self.text:
            prompt, text = text[: self.num_prompt_tokens], text[self.num_prompt_tokens :]
        sequence = Sequence(
            request_id=str(self.num_started),
            index=0,
            params=SamplingParams(max_tokens=self.num_tokens, temperature=self.temperature(self.num_started)),
            seed=1,
            verification="rejection",
            sources=self.sources,
            num_speculative_tokens=self.fixed_length or 32,
            fixed_draft_length=self.fixed_length > 0,
            stop_token_ids=frozenset(),
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            max_num_tokens=len(prompt) + self.num_tokens,
        )
        self.texts[sequence] = text
        return sequence

    def _finish(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        del self.texts[sequence]
        self.planner.forget(sequence)

    def _plan(self) -> StepPlan:
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        choices = self.planner.choose(decoding)
        needs, budget = set[Need](), MAX_BATCHED_TOKENS
        rows = []
        for sequence in self.running:
            choice = choices.drafts.get(sequence)
            if choice is None:
                needs.add(Need.PROMPT)
                lagging = self.planner.lagging(sequence)
                num_tokens = sequence.num_uncomputed_tokens
                rows.append(ScheduledSequence(sequence, num_tokens, lagging=lagging))
                continue
            part = ScheduledSequence(sequence, 1, choice)
            if choice.num_tokens and choice.num_missing:
                part.num_catch_up_tokens = min(choice.num_missing, budget)
                budget -= part.num_catch_up_tokens
                if part.num_catch_up_tokens < choice.num_missing:
                    part.draft = replace(choice, num_tokens=0)
                if choice.num_missing > FEW_MISSING:
                    needs.add(Need.CATCH_UP)
            rows.append(part)
        max_rounds = 1 if Need.PROMPT in needs else choices.max_rounds
        return StepPlan(rows, rows, needs, max_rounds, self.now, choices.option)

    def _rounds(self, plan: StepPlan) -> tuple[list[Round], float, float]:
        rounds: list[Round] = []
        total, longest, expected = 0.0, 0.0, 0.0
        while len(rounds) < plan.max_rounds:
            if rounds and total + longest > self.machine.step_seconds:
                break
            one, seconds, tokens = self._round(plan, is_first=not rounds)
            total, longest, expected = total + seconds, max(longest, seconds), expected + tokens
            rounds.append(one)
            if any(len(part.sequence) >= part.sequence.max_num_tokens for part in plan.rows):
                break
        return rounds, total, expected

    def _round(self, plan: StepPlan, is_first: bool) -> tuple[Round, float, float]:
        machine = self.machine
        one = Round([], [], [], PhaseSeconds(0.0, 0.0, 0.0))
        passes: list[int] = []
        expected, num_scored, num_caught_up = 0.0, 0, 0
        for place, part in enumerate(plan.rows):
            sequence = part.sequence
            kept, num_passes, rates = self._draft(part, place)
            passes.append(num_passes)
            is_model = part.draft.first_source == "draft_model"
            if is_model and (part.num_catch_up_tokens or kept):
                behind = len(sequence) - 1 - DRAFT.cache.table(sequence).num_computed_tokens
                num_caught_up += min(behind, part.num_catch_up_tokens) if is_first else behind
            accepted = next((i for i, rate in enumerate(rates) if self.rng.random() >= rate), kept)
            survival = 1.0
            for rate in rates:
                survival *= rate
                expected += survival
            expected += 1
            num_new = part.num_tokens if is_first else 1
            num_scored += num_new + kept
            emitted = self._emit(part, accepted)
            if is_first and part.kind is Kind.PROMPT and part.is_prefilled_by(DRAFT.name):
                DRAFT.cache.table(sequence).num_computed_tokens = len(sequence)
                num_caught_up += part.num_tokens
            one.num_drafted.append(kept)
            one.num_accepted.append(accepted)
            one.emitted.append(emitted)
            before = len(sequence)
            sequence.token_ids += emitted[: sequence.max_num_tokens - before]
            sequence.target_blocks.num_computed_tokens = len(sequence) - 1
            if is_model and kept:
                DRAFT.cache.table(sequence).num_computed_tokens = before + min(accepted, kept - 1)
            elif is_model and is_first and part.num_catch_up_tokens:
                DRAFT.cache.table(sequence).num_computed_tokens += part.num_catch_up_tokens
        drafting = machine.unit * machine.draft_start if any(passes) else 0.0
        for position in range(max(passes)):
            active = sum(count > position for count in passes)
            drafting += machine.draft_seconds(active + (num_caught_up if position == 0 else 0))
        if num_caught_up and not any(passes):
            drafting += machine.draft_seconds(num_caught_up)
        factor = self.speed(self.now)
        if is_first and plan.max_rounds > 1:
            factor *= machine.cold
        drafting, scoring = drafting * factor, machine.score_seconds(num_scored) * factor
        scoring += machine.unit * machine.busy if is_first else 0.0
        one.seconds = PhaseSeconds(drafting * self._noise(), scoring * self._noise(), 0.0)
        return one, drafting + scoring, expected

    def _draft(self, part: ScheduledSequence, place: int) -> tuple[int, int, list[float]]:
        """Returns tokens kept, draft passes, acceptance rates of the kept ones."""
        sequence = part.sequence
        length = min(part.draft.num_first_drafts, sequence.max_num_tokens - len(sequence) - 1)
        if part.draft.known:
            text = self._upcoming(sequence)
            rates = [float(a == b) for a, b in zip(part.draft.known_ids[:length], text, strict=False)]
            return length, 0, rates
        alpha = self.acceptance(self.now, place)
        decay = 1.0 if alpha == 1.0 else self.position_decay
        return length, length, [alpha * decay**i for i in range(length)]

    def _upcoming(self, sequence: Sequence) -> list[int]:
        text = self.texts[sequence]
        start = len(sequence) - sequence.num_prompt_tokens
        while len(text) < start + 64:
            text.append(self.rng.randrange(1 << 40))
        return text[start:]

    def _emit(self, part: ScheduledSequence, num_accepted: int) -> list[int]:
        return self._upcoming(part.sequence)[: num_accepted + 1]

    def _noise(self) -> float:
        if not self.noise:
            return 1.0
        return math.exp(self.rng.gauss(0, self.noise)) * (10 if self.rng.random() < 0.01 else 1)


def auto(machine: Machine, seed: int = 1, error: float = 0.08, **arguments: object) -> SpeculationPlanner:
    return SpeculationPlanner(
        machine.costs(random.Random(seed), error),
        proposers=[DRAFT],
        **arguments,  # type: ignore[arg-type]
    )


def fixed_rates(
    machine: Machine, acceptance: Callable[[float, int], float], num_rows: int, **arguments: object
) -> list[float]:
    """Expected tokens per second of every fixed length, none first."""
    rates = []
    for length in range(MAX_LENGTH + 1):
        simulation = Simulation(
            machine, FixedPlanner(length, machine), acceptance, lambda _: num_rows, noise=0.0,
            **arguments,  # type: ignore[arg-type]
        )  # fmt: skip
        rates.append(simulation.run(num_rounds=100).rate())
    return rates

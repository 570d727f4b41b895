"""No tenant's sequences shut out those of another, and long prompts do not hold up short ones.

The scheduler runs under random loads with made-up tokens: who has something waiting soon has something
running, whatever the others have, and no step leaves undone what its budget had room for.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.engine.planners import FixedPlanner
from tests.engine.test_cache_bookkeeping import assert_partition
from truedraft.engine.core import scheduler as scheduling
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.fairness import FEWEST_TOKENS, FIRST_TOKENS, PromptPace
from truedraft.engine.core.scheduler import Scheduler
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import PhaseSeconds, Round, StepPlan, StepResult
from truedraft.engine.messages import SamplingParams

BLOCK_SIZE = 4
LONG, SHORT = 400, 4
SEEDS = range(40)


def make_sequence(name: str, prompt: int, max_tokens: int, tenant: str = "", place: int = 0) -> Sequence:
    return Sequence(
        request_id=name,
        index=0,
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        verification="rejection",
        sources=(),
        num_speculative_tokens=0,
        fixed_draft_length=True,
        stop_token_ids=frozenset(),
        token_ids=[hash(name) % 1000 + 1] * prompt,
        num_prompt_tokens=prompt,
        max_num_tokens=prompt + max_tokens,
        tenant=tenant,
        place=place,
    )


@dataclass
class Load:
    """A scheduler, and when each of its sequences got its first token."""

    scheduler: Scheduler
    num_steps: int = 0
    added: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0

    @classmethod
    def of(cls, num_blocks: int = 10_000, places: int = 4, budget: int = 64) -> "Load":
        return cls(Scheduler(BlockPool(num_blocks, BLOCK_SIZE), places, budget, FixedPlanner()))

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.added[sequence.request_id] = self.num_steps
            self.scheduler.add(sequence)

    def step(self) -> StepPlan:
        self.num_steps += 1
        plan = self.scheduler.schedule()
        for part in plan.scheduled:
            sequence = part.sequence
            sequence.target_blocks.num_computed_tokens += part.num_tokens
            self.num_tokens += part.num_tokens
            if part.completes:
                self.first.setdefault(sequence.request_id, self.num_steps)
                sequence.append([0])
                self.scheduler.settle(sequence)
            else:
                self.scheduler.publish(sequence)
        return plan

    def wait_of(self, name: str) -> int:
        """Returns the number of steps from its arrival to its first token."""
        return self.first[name] - self.added[name]

    def run_until(self, name: str, most: int = 1000) -> None:
        while name not in self.first:
            assert self.num_steps < most
            self.step()


def test_a_place_is_given_to_a_tenant_that_has_none() -> None:
    load = Load.of()
    load.add(*(make_sequence(f"a{i}", 5, 100, "a", i) for i in range(9)))
    load.step()
    load.add(make_sequence("b", 5, 10, "b", 100))
    load.run_until("b")
    assert load.wait_of("b") == 1
    assert Counter(one.tenant for one in load.scheduler.running) == {"a": 3, "b": 1}
    assert (load.scheduler.num_yields, load.scheduler.num_preemptions) == (1, 0)
    assert [one.request_id for one in load.scheduler.waiting][0] == "a3"  # it goes on first
    for _ in range(12):
        load.step()
    assert Counter(one.tenant for one in load.scheduler.running) == {"a": 4}


def test_blocks_are_given_to_a_tenant_that_has_none() -> None:
    load = Load.of(num_blocks=30, places=8)
    load.add(*(make_sequence(f"a{i}", 36, 4, "a") for i in range(4)))
    load.step()
    load.step()
    load.add(make_sequence("b", 30, 4, "b", 100))
    load.run_until("b")
    assert load.wait_of("b") <= 2
    assert load.scheduler.num_yields > 0


def test_nobody_gives_way_in_vain_or_all_that_a_tenant_has() -> None:
    load = Load.of(num_blocks=30, places=2)
    load.add(make_sequence("a0", 40, 60, "a"), make_sequence("a1", 2, 60, "a"))
    load.step()
    load.add(make_sequence("b", 100, 4, "b"))  # too much for what a1 could give
    for _ in range(5):
        load.step()
    assert load.scheduler.num_yields == 0
    alone = Load.of(places=1)
    alone.add(make_sequence("a0", 4, 60, "a"))
    alone.step()
    alone.add(make_sequence("b", 4, 60, "b"))
    for _ in range(5):
        alone.step()
    assert [one.request_id for one in alone.scheduler.running] == ["a0"]


def test_a_better_priority_gives_way_to_nobody() -> None:
    load = Load.of(places=2)
    urgent = [make_sequence(f"a{i}", 4, 60, "a") for i in range(3)]
    for one in urgent:
        one.priority = -1
    load.add(*urgent)
    load.step()
    load.add(make_sequence("b", 4, 60, "b"))
    for _ in range(5):
        load.step()
    assert {one.tenant for one in load.scheduler.running} == {"a"}


@pytest.mark.parametrize("tenants", ["aa", "ab"])
def test_a_short_prompt_does_not_wait_for_a_long_one(tenants: str) -> None:
    load = Load.of()
    load.add(make_sequence("long", LONG, 2, tenants[0]))
    load.step()
    load.add(make_sequence("next", LONG, 2, tenants[0]), make_sequence("short", SHORT, 2, tenants[1]))
    load.run_until("next")
    assert load.wait_of("short") == 1
    # What the short one did not take was not lost to the long ones.
    assert load.num_steps == -(-(2 * LONG + SHORT + 2) // 64)


def test_long_prompts_of_two_tenants_share_the_budget() -> None:
    load = Load.of(places=8)
    load.add(*(make_sequence(f"a{i}", LONG, 2, "a") for i in range(4)))
    load.step()
    load.add(make_sequence("b", LONG, 2, "b", 100))
    load.run_until("b")
    alone = -(-LONG // 64)
    assert load.wait_of("b") <= 2 * alone + 2
    assert "a2" not in load.first


def test_choices_that_wait_for_a_prompt_hold_up_nobody() -> None:
    load = Load.of()
    first, second = make_sequence("n", LONG, 2), make_sequence("n", LONG, 2)
    second.index = 1
    load.add(first, second)
    load.step()
    load.add(make_sequence("short", SHORT, 2))
    load.run_until("short")
    assert load.wait_of("short") == 1


Arrival = tuple[str, int, int, int]  # tenant, length of the prompt, of the output, step


def random_load(drawn: random.Random) -> list[Arrival]:
    return [
        (
            drawn.choice("aaabc"),
            drawn.choice((1, 3, 10, 40, 150)),
            drawn.randint(1, 30),
            drawn.randrange(41),
        )
        for _ in range(drawn.randint(1, 30))
    ]


def waits_with_nothing_running(load: Load) -> set[str]:
    waiting = {one.tenant for one in load.scheduler.waiting}
    return waiting - {one.tenant for one in load.scheduler.running}


def check_load(seed: int) -> None:
    """Requires that no tenant waits long with nothing running, and that no step is wasted."""
    drawn = random.Random(seed)
    arrivals, is_tight = random_load(drawn), seed % 2 == 0
    places, budget = drawn.randint(3, 6), drawn.randint(8, 70)
    # Tight: places are there, blocks are not.
    load = Load.of(num_blocks=140 if is_tight else 10_000, places=places, budget=budget)
    shut_out: Counter[str] = Counter()
    sequences = []
    for step in range(20_000):
        for number, (tenant, prompt, output, arrives) in enumerate(arrivals):
            if arrives == step:
                sequences.append(make_sequence(f"{number}", prompt, output, tenant, place=number))
                load.add(sequences[-1])
        if not (load.scheduler.running or load.scheduler.waiting):
            if step > 40:
                break
            continue
        plan = load.step()
        assert plan, "a step with work must do some"
        used = sum(part.num_tokens for part in plan.scheduled)
        assert used <= budget
        planned = {part.sequence for part in plan.scheduled}
        if used < budget:
            assert planned.issuperset(one for one in load.scheduler.running)
        without = waits_with_nothing_running(load)
        shut_out = Counter({tenant: shut_out[tenant] + 1 for tenant in without})
        assert is_tight or max(shut_out.values(), default=0) <= 3, "a tenant is shut out"
        assert_partition(load.scheduler.target_pool, [one.target_blocks for one in sequences])
    assert all(one.finish_reason == "length" for one in sequences)
    # What was computed twice is what gave way, and no more.
    needed = sum(prompt + output - 1 for _, prompt, output, _ in arrivals)
    num_back = load.scheduler.num_yields + load.scheduler.num_preemptions
    assert load.num_tokens <= needed + num_back * max(prompt + output for _, prompt, output, _ in arrivals)


def check_all() -> None:
    for seed in SEEDS:
        check_load(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_tenant_waits_long_and_no_step_is_wasted(seed: int) -> None:
    check_load(seed)


def nobody_gives_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_make_way", lambda self: [])


def whoever_came_first_goes_first(patch: pytest.MonkeyPatch) -> None:
    """A place that was given is taken back by what had to leave it."""
    patch.setattr(scheduling, "shut_out", lambda waiting, running: [])


def places_are_given_but_not_taken(patch: pytest.MonkeyPatch) -> None:
    honest = Scheduler._make_way

    def make_way(self: Scheduler) -> list[Sequence]:
        honest(self)
        return []

    patch.setattr(Scheduler, "_make_way", make_way)


@pytest.mark.parametrize(
    "plant", [nobody_gives_way, whoever_came_first_goes_first, places_are_given_but_not_taken]
)
def test_planted_bugs_are_caught(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_all()


def test_long_prompts_that_leave_nothing_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "LONG_PART", 1 << 20)
    with pytest.raises(AssertionError):
        test_a_short_prompt_does_not_wait_for_a_long_one("aa")


def taken(pace: PromptPace, num_tokens: int, seconds: float, *, decoding: bool = False) -> None:
    """Tells of a step with a prompt, or of one without."""
    load = Load.of(budget=num_tokens)
    load.add(make_sequence("x", num_tokens if not decoding else 1, 9))
    plan = load.scheduler.schedule()
    one = Round([0], [0], [[1]], PhaseSeconds(0.0, seconds, 0.0))
    pace.observe(plan, StepResult([one]))


def test_prompts_take_no_longer_than_they_may() -> None:
    pace = PromptPace(0.2)
    for _ in range(6):
        taken(pace, pace.within(1024), pace.within(1024) * 0.001)  # a thousand tokens a second
    assert 100 <= pace.within(1024) <= 200
    for _ in range(6):
        taken(pace, pace.within(1024), 5.0)
    assert pace.within(1024) == FEWEST_TOKENS
    for _ in range(9):
        taken(pace, pace.within(1024), 0.001)
    assert pace.within(1024) == 1024


def test_prompts_may_take_as_long_as_decoding_takes() -> None:
    pace = PromptPace(0.2)
    taken(pace, 1, 1.5, decoding=True)
    load = Load.of(budget=1024)
    load.add(make_sequence("row", 1, 9))
    load.step()
    load.add(make_sequence("x", FIRST_TOKENS, 9))
    plan = load.scheduler.schedule()
    pace.observe(plan, StepResult([Round([0], [0], [[1]], PhaseSeconds(0.0, 2.9, 0.0))]))
    assert pace.within(1024) == FIRST_TOKENS
    pace.observe(plan, StepResult([Round([0], [0], [[1]], PhaseSeconds(0.0, 9.0, 0.0))]))
    assert pace.within(1024) < FIRST_TOKENS


def test_without_a_limit_the_budget_alone_counts() -> None:
    pace = PromptPace(0.0)
    taken(pace, 512, 60.0)
    assert pace.within(1024) == 1024

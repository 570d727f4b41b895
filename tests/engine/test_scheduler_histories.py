"""Scheduler and both block pools under random lives of requests, with what every slot holds tracked by hand.

Requests of several choices share beginnings, arrive at any time with any priority, are aborted, preempted
and finished; drafts are accepted at random. After every step: no block lost, doubled or freed twice, and
every table's slots hold its own sequence's tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.planners import CachedProposer, FixedPlanner
from tests.engine.test_cache_bookkeeping import assert_partition
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.scheduler import Scheduler
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import Kind, ScheduledSequence
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import SamplingParams

BLOCK_SIZE = 4


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int
    num_draft_tokens: int
    num_choices: int
    priority: int
    arrives: int  # step
    aborted: int  # step; often after its end
    cache_prompt: bool
    tenant: str


# Two tokens only, so that beginnings are often alike.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
REQUESTS = st.lists(
    st.builds(
        Request,
        PROMPTS,
        max_tokens=st.integers(1, 12),
        num_draft_tokens=st.integers(0, 4),
        num_choices=st.integers(1, 3),
        priority=st.integers(-1, 1),
        arrives=st.integers(0, 12),
        aborted=st.integers(0, 60),
        cache_prompt=st.booleans(),
        tenant=st.sampled_from("ab"),
    ),
    min_size=1,
    max_size=6,
)


@dataclass
class World:
    """The scheduler, and what is written into the slots of either pool."""

    scheduler: Scheduler
    draft: CachedProposer
    live: list[Sequence] = field(default_factory=list)
    target_slots: dict[int, int] = field(default_factory=dict)
    draft_slots: dict[int, int] = field(default_factory=dict)

    def add(self, name: int, request: Request) -> None:
        for index in range(request.num_choices):
            sequence = Sequence(
                request_id=str(name),
                index=index,
                params=SamplingParams(max_tokens=request.max_tokens),
                seed=0,
                verification="rejection",
                sources=("draft_model",) if request.num_draft_tokens else (),
                num_speculative_tokens=request.num_draft_tokens,
                fixed_draft_length=True,
                stop_token_ids=frozenset(),
                token_ids=list(request.prompt),
                num_prompt_tokens=len(request.prompt),
                max_num_tokens=len(request.prompt) + request.max_tokens,
                priority=request.priority,
                cache_prompt=request.cache_prompt,
                tenant=request.tenant,
            )
            self.scheduler.add(sequence)
            self.live.append(sequence)

    def abort(self, name: int) -> None:
        for sequence in [s for s in self.live if s.request_id == str(name)]:
            self.scheduler.finish(sequence)
            self.live.remove(sequence)

    def step(self, data: st.DataObject) -> None:
        """Steps like the engine core, with made-up tokens and verdicts."""
        plan = self.scheduler.schedule()
        assert plan or not self.live, "a step with work must do some"
        for part in plan.scheduled:
            self._compute(part, data)
        self.check()

    def _compute(self, part: ScheduledSequence, data: st.DataObject) -> None:
        sequence, target = part.sequence, part.sequence.target_blocks
        drafted = [data.draw(st.integers(0, 1)) for _ in range(part.draft.num_first_drafts)]
        first = target.num_computed_tokens
        known = sequence.token_ids[first : first + part.num_tokens] + drafted
        if self.draft.name in sequence.sources:
            self._follow_with_draft(part, drafted)
        _write(self.target_slots, target, known)
        if not part.completes:
            self.scheduler.publish(sequence)
            return
        accepted = drafted[: data.draw(st.integers(0, len(drafted)))]
        sequence.append([*accepted, data.draw(st.integers(0, 1))])
        self.scheduler.truncate(sequence, len(sequence) - 1)
        self.scheduler.publish(sequence)
        if sequence.finish_reason:
            self.scheduler.finish(sequence)
            self.live.remove(sequence)
        else:
            assert sequence.is_decoding

    def _follow_with_draft(self, part: ScheduledSequence, drafted: list[int]) -> None:
        """The draft stores what it missed and all of its own tokens but the last."""
        sequence, table = part.sequence, self.draft.cache.table(part.sequence)
        end = sequence.target_blocks.num_computed_tokens + part.num_tokens
        if drafted or part.kind is not Kind.DECODE:
            known = sequence.token_ids[table.num_computed_tokens : end]
            _write(self.draft_slots, table, known + drafted[:-1])

    def check(self) -> None:
        scheduler = self.scheduler
        draft = self.draft.cache
        assert_partition(scheduler.target_pool, [s.target_blocks for s in self.live])
        assert_partition(draft.pool, [draft.table(s) for s in self.live])
        assert {*scheduler.running, *scheduler.waiting} == set(self.live)
        for sequence in self.live:
            assert _read(self.target_slots, sequence.target_blocks) == _stored(
                sequence, sequence.target_blocks
            )
            table = draft.table(sequence)
            assert _read(self.draft_slots, table) == _stored(sequence, table)


def _slots(table: BlockTable, first: int, last: int) -> list[int]:
    return [table.block_ids[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(first, last)]


def _write(slots: dict[int, int], table: BlockTable, token_ids: list[int]) -> None:
    first = table.num_computed_tokens
    table.num_computed_tokens += len(token_ids)
    slots.update(zip(_slots(table, first, table.num_computed_tokens), token_ids, strict=True))


def _read(slots: dict[int, int], table: BlockTable) -> list[int]:
    return [slots[slot] for slot in _slots(table, 0, table.num_computed_tokens)]


def _stored(sequence: Sequence, table: BlockTable) -> list[int]:
    return sequence.token_ids[: table.num_computed_tokens]


@settings(deadline=None, max_examples=150)
@given(REQUESTS, st.integers(8, 16), st.integers(3, 30), st.integers(1, 5), st.data())
def test_any_history(
    requests: list[Request], num_blocks: int, budget: int, max_num_sequences: int, data: st.DataObject
) -> None:
    draft = CachedProposer(BlockPool(num_blocks, BLOCK_SIZE))
    world = World(
        Scheduler(
            target_pool=BlockPool(num_blocks, BLOCK_SIZE),
            max_num_sequences=max_num_sequences,
            max_num_batched_tokens=budget,
            planner=FixedPlanner(max_draft_len=1000, proposers=[draft]),
            proposers=[draft],
        ),
        draft,
    )
    for step in range(3000):
        for name, request in enumerate(requests):
            if request.arrives == step:
                world.add(name, request)
            if request.aborted == step:
                world.abort(name)
        if not world.live and step > 12:
            break
        world.step(data)
    assert not world.live
    assert world.scheduler.target_pool.num_free == num_blocks
    assert draft.cache.pool.num_free == num_blocks


def draft_keeps_what_was_rejected(patch: pytest.MonkeyPatch) -> None:
    def truncate(self: Scheduler, sequence: Sequence, num_tokens: int) -> None:
        self.target_pool.truncate(sequence.target_blocks, num_tokens)

    patch.setattr(Scheduler, "truncate", truncate)


def aborts_forget_the_draft(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_release", lambda self, s: self.target_pool.release(s.target_blocks))


@pytest.mark.parametrize(
    "plant",
    [draft_keeps_what_was_rejected, aborts_forget_the_draft],
)
def test_planted_bugs_are_caught(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        test_any_history()

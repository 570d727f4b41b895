"""Block pool and scheduler under random histories: no block lost, doubled or leaked. No tensors."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.planners import CachedProposer, FixedPlanner
from truedraft.engine.core.block_pool import RUN, BlockPool
from truedraft.engine.core.scheduler import Scheduler
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.state_slots import StateSlots
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import SamplingParams


def assert_partition(pool: BlockPool, tables: list[BlockTable]) -> None:
    users = Counter(block for table in tables for block in table.block_ids)
    assert [users[block] for block in range(pool.num_blocks)] == pool._num_users
    assert set(pool._free) == {block for block in range(pool.num_blocks) if users[block] == 0}
    assert {pool._block_of[h]: h for h in pool._block_of} == pool._hash_of
    for table in tables:
        assert len(set(table.block_ids)) == len(table.block_ids)
        assert len(table.block_ids) >= pool.blocks_for(table.num_computed_tokens)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.booleans()), max_size=60))
def test_blocks_are_always_either_free_or_owned_once(history: list[tuple[int, int, bool]]) -> None:
    pool = BlockPool(num_blocks=12, block_size=4)
    tables = [BlockTable() for _ in range(4)]
    for which, num_tokens, grow in history:
        table = tables[which]
        if not grow:
            pool.truncate(table, num_tokens)
            assert table.num_computed_tokens <= num_tokens
        elif pool.can_reserve(table, num_tokens):
            pool.reserve(table, num_tokens)
            table.num_computed_tokens = max(table.num_computed_tokens, num_tokens)
        assert_partition(pool, tables)


@pytest.mark.parametrize("others", [0, 3])
def test_tables_that_grow_by_turns_lie_in_one_piece_each(others: int) -> None:
    """This holds while there is space; after that every block is used all the same."""
    pool = BlockPool(num_blocks=4 * RUN, block_size=4)
    tables = [BlockTable() for _ in range(1 + others)]
    for num_blocks in range(1, RUN + 1):
        for table in tables:
            pool.reserve(table, 4 * num_blocks)
            assert table.block_ids == list(range(table.block_ids[0], table.block_ids[0] + num_blocks))
    pool.reserve(tables[0], 4 * (pool.num_free + RUN))
    assert pool.num_free == 0
    assert_partition(pool, tables)


def make_sequence(name: int, prompt: int, max_tokens: int, k: int, draft: bool = True) -> Sequence:
    return Sequence(
        request_id=str(name),
        index=0,
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        verification="rejection",
        sources=("draft_model",) if draft and k else (),
        num_speculative_tokens=k,
        fixed_draft_length=True,
        stop_token_ids=frozenset(),
        token_ids=[0] * prompt,
        num_prompt_tokens=prompt,
        max_num_tokens=prompt + max_tokens,
    )


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 20), st.integers(1, 12), st.integers(0, 4), st.integers(0, 4), st.integers(0, 10)
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(REQUESTS, st.integers(8, 20), st.integers(3, 40), st.data())
def test_every_sequence_finishes_and_every_block_comes_back(
    requests: list[tuple[int, int, int, int, int]], num_blocks: int, budget: int, data: st.DataObject
) -> None:
    """Drafts accepted at random; few blocks, so that sequences are preempted; small budgets."""
    draft = CachedProposer(BlockPool(num_blocks, 4))
    scheduler = Scheduler(
        target_pool=BlockPool(num_blocks, 4),
        max_num_sequences=4,
        max_num_batched_tokens=budget,
        planner=FixedPlanner(max_draft_len=1000, proposers=[draft]),
        proposers=[draft],
    )
    sequences = [
        make_sequence(i, prompt, max_tokens, k) for i, (prompt, max_tokens, k, *_) in enumerate(requests)
    ]
    assert all(scheduler.can_ever_fit(sequence.max_num_tokens) for sequence in sequences)
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(4000):
        if not (scheduler.running or scheduler.waiting):
            break
        parts = scheduler.schedule().scheduled
        assert parts, "a step with work must do some"
        assert sum(part.num_tokens + part.draft.num_first_drafts for part in parts) <= budget
        for part in parts:
            simulate(scheduler, part.sequence, part.num_tokens, part.draft.num_first_drafts, data)
        assert_partition(scheduler.target_pool, [s.target_blocks for s in sequences])
        assert_partition(draft.cache.pool, [draft.cache.table(s) for s in sequences])
    assert all(sequence.finish_reason == "length" for sequence in sequences)
    assert [len(s) for s in sequences] == [s.max_num_tokens for s in sequences]
    assert scheduler.target_pool.num_free == draft.cache.pool.num_free == num_blocks


def simulate(
    scheduler: Scheduler, sequence: Sequence, num_tokens: int, num_draft: int, data: st.DataObject
) -> None:
    """What the engine core does to the bookkeeping, with a made-up verdict."""
    completes = num_tokens == sequence.num_uncomputed_tokens
    table = sequence.target_blocks
    table.num_computed_tokens += num_tokens + num_draft
    assert scheduler.target_pool.blocks_for(table.num_computed_tokens) <= len(table.block_ids)
    if not completes:
        return
    num_accepted = data.draw(st.integers(0, num_draft))
    sequence.append([0] * (num_accepted + 1))
    if sequence.finish_reason:
        scheduler.finish(sequence)
    else:
        scheduler.truncate(sequence, len(sequence) - 1)
        assert sequence.num_uncomputed_tokens == 1


def test_a_long_prompt_does_not_stall_running_sequences() -> None:
    scheduler = Scheduler(BlockPool(100, 4), 4, max_num_batched_tokens=10, planner=FixedPlanner())
    short, long = make_sequence(0, 1, 50, 0), make_sequence(1, 100, 1, 0)
    scheduler.add(short)
    scheduler.schedule()
    short.target_blocks.num_computed_tokens = 1
    short.append([0])
    scheduler.add(long)
    parts = {part.sequence.request_id: part for part in scheduler.schedule().scheduled}
    assert parts["0"].completes
    assert parts["1"].num_tokens == 9
    assert not parts["1"].completes


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    scheduler = Scheduler(BlockPool(4, 4), 4, max_num_batched_tokens=100, planner=FixedPlanner())
    old, young, late = (make_sequence(i, 7, 9, 0) for i in range(3))
    for sequence in (old, young, late):
        scheduler.add(sequence)
    for part in scheduler.schedule().scheduled:
        part.sequence.target_blocks.num_computed_tokens = 7
        part.sequence.append([0, 0])
        part.sequence.target_blocks.num_computed_tokens = 8
    assert [part.sequence for part in scheduler.schedule().scheduled] == [old]
    assert list(scheduler.waiting) == [young, late]
    assert scheduler.num_preemptions == 1
    assert young.target_blocks.num_computed_tokens == 0


def publish_text(pool: BlockPool, text: list[int], salt: str = "") -> BlockTable:
    """A sequence that computed ``text``, published it and went."""
    table = BlockTable()
    pool.reserve(table, len(text))
    table.num_computed_tokens = len(text)
    pool.publish(table, text, salt)
    pool.release(table)
    return table


def test_a_published_beginning_is_found_in_whole_blocks() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    publish_text(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(pool.find([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "")) == 2
    assert len(pool.find([1, 2, 3, 4, 5, 6, 7, 0], "")) == 1
    assert pool.find([0, 2, 3, 4, 5, 6, 7, 8], "") == []
    # The second block's tokens alone are nothing: its hash covers what comes before it.
    assert pool.find([5, 6, 7, 8], "") == []
    assert pool.find([1, 2, 3, 4], "another client") == []


def test_the_least_recently_used_is_lost_first_and_from_its_end() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    publish_text(pool, [1] * 8)
    publish_text(pool, [2] * 8)
    pool.reserve(BlockTable(), 4)
    assert len(pool.find([1] * 8, "")) == 1
    assert len(pool.find([2] * 8, "")) == 2


def test_unpublished_blocks_are_used_before_published_ones() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    publish_text(pool, [1] * 8)
    pool.reserve(BlockTable(), 8)
    assert len(pool.find([1] * 8, "")) == 2


TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


@settings(deadline=None)
@given(st.lists(st.tuples(TEXTS, st.integers(0, 30), st.booleans()), max_size=40))
def test_sharing_never_mixes_texts(history: list[tuple[list[int], int, bool]]) -> None:
    """Random admissions of similar texts, truncations and ends; what a slot holds is tracked by hand."""
    pool = BlockPool(num_blocks=10, block_size=4)
    content: dict[int, list[int]] = {}
    live: list[tuple[BlockTable, list[int]]] = []
    for text, number, leave in history:
        if leave and live:
            pool.release(live.pop(number % len(live))[0])
        hashes = pool.find(text[:-1], "")
        if not pool.can_begin(hashes, len(text)):
            continue
        table = BlockTable()
        pool.take_over(table, hashes)
        pool.reserve(table, len(text))
        for i in range(table.num_computed_tokens, len(text)):
            block = table.block_ids[i // 4]
            content[block] = [*content.get(block, [])[: i % 4], text[i]]
        table.num_computed_tokens = len(text)
        pool.publish(table, text, "")
        live.append((table, text))
        assert_partition(pool, [table for table, _ in live])
        for other, its_text in live:
            stored = [token for block in other.block_ids for token in content[block]]
            assert stored == its_text
    for table, _ in live:
        pool.release(table)
    assert pool.num_free == 10


def test_priority_goes_before_arrival() -> None:
    scheduler = Scheduler(BlockPool(100, 4), 2, max_num_batched_tokens=100, planner=FixedPlanner())
    late, early, urgent = make_sequence(0, 5, 9, 0), make_sequence(1, 5, 9, 0), make_sequence(2, 5, 9, 0)
    late.priority, urgent.priority = 1, -1
    for sequence in (late, early, urgent):
        scheduler.add(sequence)
    assert [part.sequence for part in scheduler.schedule().scheduled] == [urgent, early]
    assert scheduler.waiting == [late]


def test_choices_of_a_request_share_the_prompt() -> None:
    scheduler = Scheduler(BlockPool(100, 4), 8, max_num_batched_tokens=100, planner=FixedPlanner())
    choices = [make_sequence(0, 41, 9, 0) for _ in range(3)]
    for choice in choices:
        scheduler.add(choice)
    (first,) = scheduler.schedule().scheduled
    first.sequence.target_blocks.num_computed_tokens = 41
    first.sequence.append([1])
    scheduler.publish(first.sequence)
    second, third, fourth = scheduler.schedule().scheduled
    assert (third.num_tokens, fourth.num_tokens) == (1, 1)
    assert choices[1].target_blocks.block_ids[:10] == choices[0].target_blocks.block_ids[:10]


def pool_with_states(num_slots: int) -> tuple[BlockPool, list[tuple[int, int]]]:
    """Returns a pool, and which slots have been copied to which."""
    copies: list[tuple[int, int]] = []
    slots = StateSlots(num_slots, lambda source, target: copies.append((source, target)))
    return BlockPool(400, 16, slots), copies


def computed(pool: BlockPool, text: range, num_folded: int) -> BlockTable:
    """Returns the table of a text, all of which is computed and published."""
    table = BlockTable()
    pool.reserve(table, len(text))
    table.num_computed_tokens, table.num_folded_tokens = len(text), num_folded
    pool.publish(table, text, "")
    return table


def test_a_state_is_kept_where_a_prompt_ends_and_in_long_texts() -> None:
    pool, copies = pool_with_states(9)
    table = computed(pool, range(1000), num_folded=976)
    for length, num_copies in ((1000, 0), (2000, 1), (2500, 1), (2900, 2), (4100, 3)):
        pool.reserve(table, length)
        table.num_computed_tokens, table.num_folded_tokens = length, length // 16 * 16 - 16
        pool.publish(table, range(length), "")
        pool.keep_beginning(table, num_prompt_tokens=2900)
        assert len(copies) == num_copies
    found = pool.find(range(4000), "")
    assert len(found) == 250
    assert len(pool.usable(found)) == 2900 // 16  # at the end of the prompt
    assert len(pool.usable(found[:179])) == 2000 // 16
    # It is good for what it has records of: down to where its states are folded.
    assert [len(pool.usable(found[:length])) for length in (125, 124, 123)] == [125, 124, 0]


def test_states_that_are_too_new_are_not_kept() -> None:
    """They are folded over more than what is published, which is whole blocks."""
    pool, copies = pool_with_states(2)
    table = computed(pool, range(70), num_folded=80)
    pool.keep_beginning(table, num_prompt_tokens=70)
    table.num_computed_tokens = 90
    pool.release(table)
    assert copies == []
    assert pool.usable(pool.find(range(70), "")) == []


def test_an_ended_text_leaves_its_slot_as_a_snapshot() -> None:
    pool, copies = pool_with_states(2)
    table = computed(pool, range(70), num_folded=48)
    pool.release(table)
    hashes = pool.usable(pool.find(range(99), ""))
    assert (len(hashes), copies) == (4, [])
    other = BlockTable()
    pool.take_over(other, hashes)
    assert copies == [(0, 1)]
    assert (other.state_slot, other.num_computed_tokens, other.num_folded_tokens) == (1, 64, 48)
    # The snapshot is the only slot left: it is used up by the next text that begins with it.
    third = BlockTable()
    pool.take_over(third, hashes)
    assert (third.state_slot, third.num_folded_tokens, copies) == (0, 48, [(0, 1)])
    assert pool.usable(hashes) == []
    assert not pool.can_reserve(BlockTable(), 1)


def test_the_least_recently_used_snapshot_goes_first() -> None:
    pool, _ = pool_with_states(3)
    texts = [range(start, start + 40) for start in (0, 1000, 2000)]
    for table in [computed(pool, text, num_folded=32) for text in texts]:
        pool.release(table)
    first = pool.usable(pool.find(texts[0], ""))
    pool.take_over(BlockTable(), first)  # the second one's slot is needed for it
    kept = [len(pool.usable(pool.find(text, ""))) for text in texts]
    assert kept == [2, 0, 2]


def test_states_do_not_go_back_to_before_they_were_folded() -> None:
    pool, _ = pool_with_states(1)
    table = computed(pool, range(70), num_folded=64)
    pool.truncate(table, 64)
    with pytest.raises(AssertionError):
        pool.truncate(table, 63)

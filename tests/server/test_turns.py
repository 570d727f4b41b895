"""Who goes next: nobody waits for ever, small work not for large work, and no key for another's line."""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest

from truedraft.server.errors import QueueFullError
from truedraft.server.turns import Turn, Turns


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def in_line(turns: Turns, *asked: tuple[str, int, str]) -> list[tuple[str, asyncio.Task[Turn]]]:
    """Lines up what is asked for, each by name, weight and key, in this order."""
    tasks = []
    for name, weight, key in asked:
        tasks.append((name, asyncio.create_task(turns.begin(weight, key))))
        await asyncio.sleep(0)
    return tasks


async def order(turns: Turns, tasks: list[tuple[str, asyncio.Task[Turn]]]) -> list[str]:
    """Runs one after the other, each to its end; returns their names."""
    gone: list[str] = []
    while len(gone) < len(tasks):
        await asyncio.sleep(0)
        for name, task in tasks:
            if task.done() and name not in gone:
                gone.append(name)
                task.result().end()
                await asyncio.sleep(0)
    return gone


def test_small_work_goes_before_large_work() -> None:
    async def work() -> None:
        turns = Turns("x", 100, 1, 10)
        blocking = await turns.begin(1)
        tasks = await in_line(turns, ("a", 90, ""), ("b", 90, ""), ("c", 1, ""), ("d", 2, ""))
        blocking.end()
        assert await order(turns, tasks) == ["c", "d", "a", "b"]
        assert (turns.num_at_work, turns.weight_at_work, turns.num_waiting) == (0, 0, 0)

    run(work())


def test_small_work_finds_room_beside_the_largest() -> None:
    async def work() -> None:
        turns = Turns("x", 100, 2, 10)
        with await turns.begin(1_000_000), await turns.begin(25):
            assert turns.weight_at_work == 100

    run(work())


def test_large_work_does_not_wait_for_ever() -> None:
    async def work() -> None:
        turns = Turns("x", 100, 1, 1000)
        blocking = await turns.begin(1)
        (large,) = await in_line(turns, ("large", 50, ""))
        num_small = 0
        while not large[1].done():
            small = asyncio.create_task(turns.begin(1))
            await asyncio.sleep(0)
            blocking.end()
            await asyncio.sleep(0)
            if not large[1].done():
                blocking = await small
                num_small += 1
            else:
                large[1].result().end()
                (await small).end()
        assert num_small <= 50

    run(work())


def test_keys_take_turns() -> None:
    async def work() -> None:
        turns = Turns("x", 100, 1, 100)
        blocking = await turns.begin(1, "a")
        many = [(f"a{number}", 10, "a") for number in range(5)]
        tasks = await in_line(turns, *many, ("b0", 10, "b"), ("b1", 10, "b"))
        blocking.end()
        gone = await order(turns, tasks)
        assert gone.index("b0") <= 1
        assert gone.index("b1") <= 3

    run(work())


def test_what_is_at_work_is_bounded() -> None:
    """Weights and keys are any, and waiters may leave; in the end nothing is left."""

    async def work(seed: int) -> None:
        rng = random.Random(seed)
        turns = Turns("x", 100, 3, 10_000)
        ended: Counter[str] = Counter()

        async def one(weight: int, key: str) -> None:
            with await turns.begin(weight, key):
                assert turns.num_at_work <= 3
                assert turns.weight_at_work <= 100
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                ended[key] += 1

        tasks = [
            asyncio.create_task(one(rng.choice([1, 5, 60, 100, 500]), rng.choice("abc"))) for _ in range(100)
        ]
        for task in rng.sample(tasks, 20):
            await asyncio.sleep(0)
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(each is None or isinstance(each, asyncio.CancelledError) for each in done)
        assert sum(ended.values()) >= 80
        assert (turns.num_at_work, turns.weight_at_work, turns.num_waiting) == (0, 0, 0)

    for seed in range(20):
        run(work(seed))


def test_the_line_is_bounded_and_each_key_has_its_share() -> None:
    async def work() -> None:
        turns = Turns("x", 100, 1, 4)
        blocking = await turns.begin(1, "a")
        tasks = await in_line(turns, *[(f"a{number}", 1, "a") for number in range(4)])
        with pytest.raises(QueueFullError, match="4 requests wait for x"):
            await turns.begin(1, "a")
        tasks += await in_line(turns, ("b0", 1, "b"), ("b1", 1, "b"))
        with pytest.raises(QueueFullError):
            await turns.begin(1, "b")
        blocking.end()
        assert len(await order(turns, tasks)) == 6

    run(work())


def test_the_last_thread_is_for_keys_that_have_none() -> None:
    async def work() -> None:
        turns = Turns("x", 1000, 3, 100)
        at_work = [await turns.begin(1, "a") for _ in range(2)]
        (more,) = await in_line(turns, ("more", 1, "a"))
        assert not more[1].done()
        (other,) = await in_line(turns, ("other", 1, "b"))
        assert other[1].done()  # while the first key's third one waits
        at_work[0].end()
        await asyncio.sleep(0)
        assert not more[1].done()  # one is at work of each, and the last thread is kept
        other[1].result().end()
        await asyncio.sleep(0)
        assert more[1].done()

    run(work())


def test_a_part_of_the_memory_is_for_keys_that_have_none() -> None:
    async def work() -> None:
        turns = Turns("x", 100, 9, 100)
        await turns.begin(50, "a")
        (more,) = await in_line(turns, ("more", 40, "a"))
        assert not more[1].done()
        (other,) = await in_line(turns, ("other", 40, "b"))
        assert other[1].done()

    run(work())


def test_without_keys_nothing_is_kept() -> None:
    async def work() -> None:
        turns = Turns("x", 100, 2, 100)
        await turns.begin(50)
        await turns.begin(50)
        assert (turns.num_at_work, turns.weight_at_work) == (2, 100)

    run(work())


def test_what_a_key_without_work_waits_for_goes_to_nobody_else() -> None:
    async def work() -> None:
        turns = Turns("x", 100, 9, 100)
        first = await turns.begin(60, "a")
        (large, small) = await in_line(turns, ("large", 70, "b"), ("small", 5, "a"))
        assert not large[1].done()
        assert not small[1].done()
        first.end()
        await asyncio.sleep(0)
        assert large[1].done()

    run(work())


def test_what_goes_on_is_not_charged_or_refused() -> None:
    async def work() -> None:
        turns = Turns("x", 100, 1, 1)
        blocking = await turns.begin(1, "c")
        tasks = await in_line(turns, ("b", 10, "b"))
        again = asyncio.create_task(turns.begin(50, "a", goes_on=True))
        third = asyncio.create_task(turns.begin(50, "a", goes_on=True))
        await asyncio.sleep(0)
        blocking.end()
        assert await order(turns, [*tasks, ("a", again), ("a2", third)]) == ["b", "a", "a2"]

    run(work())

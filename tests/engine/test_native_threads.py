"""The pool of threads that the kernels share their work by."""

import ctypes
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from tests.engine.test_native import plant
from truedraft.engine.native import compiler, library

Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
MUCH_WORK = 1 << 40

pytestmark = pytest.mark.usefixtures("needs_compiler", "one_thread_afterwards")


def done_items(num_threads: int, count: int, work: int = MUCH_WORK) -> Counter[tuple[int, int]]:
    """Counts how often each (item, thread) was done."""
    loaded = library.load_library()
    assert loaded is not None
    done: Counter[tuple[int, int]] = Counter()
    loaded.set_num_threads(num_threads)

    def note(arguments: int | None, item: int) -> None:
        assert arguments is None
        done[item, loaded.this_thread()] += 1

    loaded.run_task(Task(note), None, count, work)
    return done


def each_item_is_done_once(rounds: int = 20) -> None:
    for num_threads, count, _ in product((1, 2, 3, 5), (0, 1, 2, 3, 16, 17, 100), range(rounds)):
        done = done_items(num_threads, count)
        assert sorted(item for item, _ in done.elements()) == list(range(count))
        assert all(0 <= thread < num_threads for _, thread in done)


def test_each_item_is_done_once() -> None:
    each_item_is_done_once()


def test_little_work_stays_with_the_caller() -> None:
    assert {thread for _, thread in done_items(4, 1000, work=1000)} == {0}


def test_threads_that_sleep_are_woken() -> None:
    """Threads look for work for a while, then sleep; a task of many items reaches all of them either way."""
    reached: set[int] = set()
    for _ in range(1000):
        reached |= {thread for _, thread in done_items(3, 200)}
        if reached == {0, 1, 2}:
            break
    assert reached == {0, 1, 2}


def test_a_task_within_a_task() -> None:
    """Its items are done by the thread that asks for it, under that thread's number."""
    loaded = library.load_library()
    assert loaded is not None
    loaded.set_num_threads(3)
    done: Counter[tuple[int, int]] = Counter()

    def outer(_: int | None, item: int) -> None:
        thread = loaded.this_thread()

        def inner(_: int | None, part: int) -> None:
            assert loaded.this_thread() == thread
            done[item, part] += 1

        loaded.run_task(Task(inner), None, 5, MUCH_WORK)

    loaded.run_task(Task(outer), None, 20, MUCH_WORK)
    assert done == Counter(product(range(20), range(5)))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("return first_chunk(owner + 1) - left;", "return first_chunk(owner + 1) - 1;"),
        ("const int64_t end = (chunk + 1) * now.count", "const int64_t end = chunk + now.count"),
    ],
    ids=["takes one chunk again and again", "leaves items out"],
)
def test_planted_bugs_are_caught(
    fresh_library: pytest.MonkeyPatch, tmp_path: Path, right: str, wrong: str
) -> None:
    fresh_library.setattr(compiler, "SOURCES", plant(compiler.SOURCES, right, wrong, tmp_path))
    with pytest.raises(AssertionError):
        each_item_is_done_once()

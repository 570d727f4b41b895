"""Runs functions that recurse as deep as their input is nested, on a stack that is large enough for that.

llguidance's compiler does so in machine code: on an ordinary stack, 2,000 rules that refer to each other in a
row end the process.
"""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread, stack_size
from typing import TypeVar

T = TypeVar("T")

# Only touched pages take memory. Grammars need less than 1 KiB per character; they are limited to 256 Ki.
STACK_BYTES = 512 << 20

_starting = Lock()  # The stack's size is a setting of the whole process.


def on_deep_stack(work: Callable[[], T]) -> T:
    """Returns what ``work`` returns or raises, called in a thread of its own."""
    return start_on_deep_stack(work).result()


def start_on_deep_stack(work: Callable[[], T]) -> Future[T]:
    """Starts ``work`` without waiting for it. The thread ends with the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    with _starting:
        before = stack_size(STACK_BYTES)
        try:
            Thread(target=run, name="deep stack", daemon=True).start()
        finally:
            stack_size(before)
    return future

"""Starts work that goes on while the caller does, in a thread of its own."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def start_beside(work: Callable[[], T]) -> Future[T]:
    """Calls ``work`` in a thread that ends with the process, and returns what that returns or raises."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="beside", daemon=True).start()
    return future

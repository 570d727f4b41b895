"""Lets long work in a thread find out that nobody waits for its result any more.

A thread cannot be stopped from outside. Its starter sets by ``abandonable`` how it is told; work that may
take long calls ``stop_if_abandoned`` between its pieces.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_SHOULD_STOP: ContextVar[Callable[[], bool] | None] = ContextVar("should_stop", default=None)


class AbandonedError(Exception):
    """Nobody waits for this work any more, so it ends; nobody sees the error."""


@contextmanager
def abandonable(should_stop: Callable[[], bool]) -> Iterator[None]:
    """Makes ``should_stop`` decide for work in this context, and in threads that are given a copy."""
    token = _SHOULD_STOP.set(should_stop)
    try:
        yield
    finally:
        _SHOULD_STOP.reset(token)


def stop_if_abandoned() -> None:
    """Raises ``AbandonedError`` once nobody waits for the work of this context."""
    should_stop = _SHOULD_STOP.get()
    if should_stop is not None and should_stop():
        raise AbandonedError("Nobody waits for this any more.")

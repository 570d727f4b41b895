"""Measures how long a request takes in each stage of the front end, from the first byte that was read.

Stages may be timed in threads: those that work for a request have its context. Without a request, nothing is
measured. Knows nothing of what the stages do.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Literal

Stage = Literal["body", "parse", "turn", "template", "tokenize", "grammar"]
STAGES: Final = ("body", "parse", "turn", "template", "tokenize", "grammar")

# What a request's state names the time of its first byte.
ARRIVED: Final = "arrived"


class Stages:
    """Belongs to one request. ``arrived`` is when its first byte was read, by ``time.perf_counter``.

    A stage within another one is not counted twice: the outer one gets what is left. ``observe`` is told of
    each as it ends. ``has_had_turn`` is true once some work of the request has had its turn, for the API key
    ``key``.
    """

    def __init__(
        self, arrived: float | None = None, observe: Callable[[Stage, float], None] | None = None
    ) -> None:
        self.arrived = time.perf_counter() if arrived is None else arrived
        self.seconds: dict[Stage, float] = {}
        self.has_had_turn = False
        self.key = ""
        self._observe = observe

    def add(self, stage: Stage, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        if self._observe is not None:
            self._observe(stage, seconds)

    def log_fields(self) -> dict[str, float]:
        return {
            f"{stage}_seconds": round(self.seconds[stage], 6) for stage in STAGES if stage in self.seconds
        }


_CURRENT: ContextVar[Stages | None] = ContextVar("stages", default=None)


def current_stages() -> Stages:
    """Returns those of the request that is served here, or new ones that nobody looks at."""
    return _CURRENT.get() or Stages()


@contextmanager
def measuring(stages: Stages) -> Iterator[None]:
    """Makes them the current ones."""
    token = _CURRENT.set(stages)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def timed(stage: Stage) -> Iterator[None]:
    """Adds the time of a block to a stage of the current request, also where the block fails."""
    stages = current_stages()
    began, others = time.perf_counter(), sum(stages.seconds.values())
    try:
        yield
    finally:
        within = sum(stages.seconds.values()) - others
        stages.add(stage, max(0.0, time.perf_counter() - began - within))

"""Defines runners, which execute a step: they draft, score and verify as the scheduler has planned."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from truedraft.engine.core.step import StepPlan, StepResult


class Runner(Protocol):
    """Executes steps. ``run`` returns the step's rounds and changes nothing of the sequences except the
    number of computed tokens in their block tables: at least every token but the pending one, and perhaps
    rejected drafts, which the commit truncates."""

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one round, or several up to ``plan.max_rounds`` where they are short."""


@runtime_checkable
class LaunchingRunner(Runner, Protocol):
    """Calls ``when_launched`` when the device is at work on a step, and the host would only wait for it."""

    when_launched: Callable[[], None]

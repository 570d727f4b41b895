"""What executes a step."""

from typing import Protocol

from engine.core.sequence import RowNeeds
from engine.core.step import StepPlan, StepResult


class Runner(Protocol):
    """``supports`` is all that the rows of a plan may need."""

    supports: RowNeeds

    def run(self, plan: StepPlan) -> StepResult:
        """At least one round of all rows. The block tables count what the caches hold afterwards; sequences
        stay as they are."""

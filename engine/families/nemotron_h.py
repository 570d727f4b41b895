"""Says what only Nemotron-H has: limits of its recurrence's time steps."""

from typing import Any

from truedraft.engine.families.recurrences import is_recurrence


def keep_limits(module: Any) -> None:
    """Lets dt have the limits that its makers' code takes, in prompts and in steps alike, which is
    ``time_step_limit``. transformers takes the least with which training began, and in prompts only."""
    for layer in module.model.layers:
        if is_recurrence(layer.mixer):
            layer.mixer.time_step_limit = tuple(module.config.time_step_limit)

"""Handles what only Nemotron-H has: limits of its recurrence's time steps."""

from typing import Any

from truedraft.engine.families.recurrences import is_recurrence


def keep_limits(module: Any) -> None:
    """Sets the limits of dt to ``time_step_limit``, as its makers' code does, in prompts and in single steps
    alike. transformers uses the minimum of the start of training instead, and in prompts only."""
    for layer in module.model.layers:
        if is_recurrence(layer.mixer):
            layer.mixer.time_step_limit = tuple(module.config.time_step_limit)

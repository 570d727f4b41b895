"""Torch reads these when it is loaded: how many OpenMP threads there are, and how long they look for more
work before they sleep."""

from collections.abc import Mapping

# The number of threads, unless the settings have one.
THREADS_VARIABLE = "OMP_NUM_THREADS"


def spin_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that make it microseconds, unless ``environ`` says how long. By default it is milliseconds,
    on processors that the engine's own threads need."""
    return {} if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys() else {"GOMP_SPINCOUNT": "1000"}

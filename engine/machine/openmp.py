"""Has variables that torch reads when it is loaded: the number of OpenMP threads, and how long they spin
before they sleep.
"""

from collections.abc import Mapping

# This variable is the number of threads, unless the settings name one.
THREADS_VARIABLE = "OMP_NUM_THREADS"


def spin_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that make threads spin for microseconds, unless ``environ`` says how long. By default
    they spin for milliseconds, on processors that the engine's own threads need."""
    return {} if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys() else {"GOMP_SPINCOUNT": "1000"}

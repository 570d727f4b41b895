"""How long torch's OpenMP threads look for more work before they sleep; read when torch is loaded."""

from collections.abc import Mapping


def spin_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that make it microseconds, unless ``environ`` says how long. By default it is milliseconds,
    on processors that the engine's own threads need."""
    return {} if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys() else {"GOMP_SPINCOUNT": "1000"}

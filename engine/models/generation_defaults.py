"""A model's ``generation_config.json`` as defaults of requests: what its makers recommend for sampling.

The same fields that vLLM takes under ``--generation-config auto``. ``do_sample`` is not among them: greedy is
``temperature`` 0, and a request that names no temperature samples.
"""

from collections.abc import Callable
from typing import Any

from truedraft.engine.errors import ModelLoadError

# Field -> whether a value is in the range that requests have.
FIELDS: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value <= 2,
    "top_k": lambda value: value >= 0,
    "top_p": lambda value: 0 < value <= 1,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: value > 0,
    "max_new_tokens": lambda value: value >= 1,
}


def default_sampling(generation_config: Any) -> dict[str, float]:
    """What the config sets of ``FIELDS``; ``ModelLoadError`` for a value that no request could have."""
    given = {name: getattr(generation_config, name, None) for name in FIELDS}
    for name, value in given.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and FIELDS[name](value)):
            wrong = "out of range" if is_number else "no number"
            raise ModelLoadError(
                f"the model's generation_config.json has {name} {value!r}, which is {wrong}: correct it, "
                "or set generation_config to none"
            )
    return {name: value for name, value in given.items() if value is not None}

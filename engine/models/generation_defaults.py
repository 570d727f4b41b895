"""Takes defaults of requests from a model's ``generation_config.json``: its makers' recommendations for
sampling.

These are the fields that vLLM takes under ``--generation-config auto``. ``do_sample`` is not among them:
greedy is ``temperature`` 0, and a request that names no temperature samples.
"""

from typing import Any

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.parameters import PARAMETERS, RECOMMENDED

# A generation config may have these fields, with the values that a request could have.
FIELDS = {"max_new_tokens": PARAMETERS["max_tokens"], **RECOMMENDED}


def default_sampling(generation_config: Any) -> dict[str, float]:
    """Returns the config's values of ``FIELDS``; raises ``ModelLoadError`` for a value that no request could
    have."""
    given = {name: getattr(generation_config, name, None) for name in FIELDS}
    for name, value in given.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and FIELDS[name].allows(value)):
            wrong = "out of range" if is_number else "no number"
            raise ModelLoadError(
                f"the model's generation_config.json has {name} {value!r}, which is {wrong}: correct it, "
                "or set generation_config to none"
            )
    return {name: value for name, value in given.items() if value is not None}


def recommended(setting: str, generation_config: Any) -> dict[str, Any]:
    """Returns the config's values, or nothing if the setting ``generation_config`` is none."""
    values: dict[str, Any] = {} if setting == "none" else default_sampling(generation_config)
    return values | ({"top_k": int(values["top_k"])} if "top_k" in values else {})

"""Checks the values of sampling parameters, where no front end has done so."""

import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from truedraft.engine.core.admission import RequestError
from truedraft.engine.parameters import MAX_LOGPROB_TOKENS, MAX_STOP_TOKENS, PARAMETERS, SamplingParams

P = TypeVar("P", bound=SamplingParams)


def checked(params: P) -> P:
    """Returns the parameters, with 0 for a ``top_k`` of -1, another usual way to say "off". Raises
    ``RequestError``, which names a parameter of a wrong type or out of range."""
    if not isinstance(params, SamplingParams):
        raise RequestError("invalid_value", f"params must be SamplingParams, not {type(params).__name__}")
    try:
        params = msgspec.convert(structs.asdict(params), type(params))
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at ")
        name = re.sub(r".*\$\.(\w+).*", r"\1", place)
        raise RequestError("invalid_value", f"{name}: {reason[0].lower()}{reason[1:]}") from error
    for name, row in PARAMETERS.items():
        for which, value in _numbers(name, getattr(params, name)):
            if not row.allows(value):
                raise RequestError("invalid_value", f"{which} is {value}, but must be {row.range}")
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise RequestError("invalid_value", f"stop_token_ids has over {MAX_STOP_TOKENS} entries")
    if len(params.logprob_token_ids) > MAX_LOGPROB_TOKENS:
        raise RequestError("invalid_value", f"logprob_token_ids has over {MAX_LOGPROB_TOKENS} entries")
    if params.logprob_token_ids and params.logprobs is None:
        raise RequestError("invalid_value", "logprob_token_ids needs logprobs, which may be 0")
    if params.prompt_logprobs_start and params.prompt_logprobs is None:
        raise RequestError("invalid_value", "prompt_logprobs_start needs prompt_logprobs, which may be 0")
    if params.min_tokens > params.max_tokens:
        raise RequestError(
            "invalid_value",
            f"min_tokens is {params.min_tokens}, but at most {params.max_tokens} tokens will be generated",
        )
    if params.method == "none" and params.num_speculative_tokens:
        raise RequestError(
            "invalid_value", "method 'none' drafts nothing, so num_speculative_tokens must be 0 or None"
        )
    return structs.replace(params, top_k=0) if params.top_k == -1 else params


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yields the numbers that a parameter's value is or holds, and words for what they are."""
    if isinstance(value, dict):
        yield from ((f"{name} of {key}", number) for key, number in value.items())
    elif isinstance(value, list):
        yield from ((f"one of {name}", number) for number in value)
    elif value is not None:
        yield name, value

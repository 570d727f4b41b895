"""The values that sampling parameters may have, where no front end has checked them, are listed here.

They are those of the HTTP API (``server.schemas``); a test compares the two.
"""

import re
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import structs

from truedraft.engine.core.admission import RequestError
from truedraft.engine.messages import SamplingParams

P = TypeVar("P", bound=SamplingParams)

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_STOP_TOKENS = 1024


@dataclass(frozen=True)
class Range:
    """Holds the numbers from ``low`` to ``high``, without ``low`` itself if ``above``."""

    low: float
    high: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        if self.high >= INT64_MAX and self.low > INT64_MIN:
            return f"at least {self.low}"
        return f"above {self.low} and at most {self.high}" if self.above else f"{self.low} to {self.high}"


RANGES = {
    "max_tokens": Range(1, INT64_MAX),
    "temperature": Range(0, 2),
    "top_k": Range(-1, INT64_MAX),
    "top_p": Range(0, 1, above=True),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0.01, 10),
    "min_tokens": Range(0, INT64_MAX),
    "seed": Range(INT64_MIN, INT64_MAX),
    "logprobs": Range(0, INT64_MAX),
    "prompt_logprobs": Range(0, INT64_MAX),
    "num_speculative_tokens": Range(0, 32),
}
BIASES = Range(-100, 100)


def checked(params: P) -> P:
    """Returns them, with 0 for a ``top_k`` of -1, another usual way to say "off"; ``RequestError`` names what
    has another type or is out of range."""
    if not isinstance(params, SamplingParams):
        raise RequestError("invalid_value", f"params must be SamplingParams, not {type(params).__name__}")
    try:
        params = msgspec.convert(structs.asdict(params), type(params))
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at ")
        name = re.sub(r".*\$\.(\w+).*", r"\1", place)
        raise RequestError("invalid_value", f"{name}: {reason[0].lower()}{reason[1:]}") from error
    for name, allowed in RANGES.items():
        value = getattr(params, name)
        if value is not None and value not in allowed:
            raise RequestError("invalid_value", f"{name} is {value}, but must be {allowed}")
    for token_id, bias in params.logit_bias.items():
        if bias not in BIASES:
            raise RequestError("invalid_value", f"logit_bias of {token_id} is {bias}, but must be {BIASES}")
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise RequestError("invalid_value", f"stop_token_ids has over {MAX_STOP_TOKENS} entries")
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

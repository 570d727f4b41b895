"""Defines what a caller of the library can ask of a text, and converts it to the engine's parameters.

The engine knows tokens only: stop strings are looked for in the text, and a schema becomes a grammar here.
"""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import structs
from pydantic import BaseModel

from truedraft.engine import messages
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.ranges import checked
from truedraft.engine.text.schema.cleaning import SchemaError
from truedraft.engine.text.schema.formats import Format, grammar_of

MAX_COMPLETIONS = 128


class SamplingParams(messages.SamplingParams, frozen=True, kw_only=True):
    """Says how the tokens of one prompt's completions are drawn, and what their text must be.

    ``n`` completions are made of a prompt; with a ``seed`` each has its own stream of random numbers. The
    text ends before the first of the strings ``stop``, or after it with ``include_stop_str_in_output``. It
    matches one of ``json_schema`` (an object, or written out), ``regex`` (the whole text), ``choice`` (one of
    these texts) and ``grammar``. ``prediction`` is the expected text, or most of it: it is drafted from, and
    changes nothing but the speed.

    ``max_tokens`` None is 16 for a text that is continued, as in the completions of OpenAI and vLLM; for the
    answer to a conversation it is the rest of the model's context. ``json_schema`` may also be a pydantic
    model.
    """

    max_tokens: int | None = None  # type: ignore[assignment]  # a number by the time the engine sees it
    n: int = 1
    stop: str | list[str] = []
    include_stop_str_in_output: bool = False
    json_schema: Any = None  # a dict, a text or a pydantic model
    regex: str | None = None
    choice: list[str] | None = None
    prediction: str | None = None

    def __post_init__(self) -> None:
        schema = self.json_schema
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            structs.force_setattr(self, "json_schema", _closed(schema.model_json_schema()))

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def for_engine(self) -> messages.SamplingParams:
        """Returns the parameters that concern tokens, with a schema as a grammar."""
        names = messages.SamplingParams.__struct_fields__
        values = {name: getattr(self, name) for name in names}
        return messages.SamplingParams(**values | {"grammar": self._grammar()})

    def _grammar(self) -> str | None:
        asked: dict[str, tuple[Format, Any]] = {
            "json_schema": ("json", self.json_schema),
            "regex": ("regex", self.regex),
            "choice": ("choice", self.choice),
        }
        given = [name for name, (_, source) in asked.items() if source is not None]
        given += [] if self.grammar is None else ["grammar"]
        if len(given) > 1:
            raise RequestError("invalid_value", f"{' and '.join(given)} exclude each other")
        if not given or given == ["grammar"]:
            return self.grammar
        kind, source = asked[given[0]]
        try:
            return grammar_of(kind, source, given[0])
        except ValueError as error:
            place = error.place if isinstance(error, SchemaError) else given[0]
            raise RequestError("invalid_grammar", f"{place} cannot be used: {error}") from error


def _closed(schema: Any) -> Any:
    """Returns a schema whose objects have the declared properties only, as OpenAI's SDK makes it."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    is_object = schema.get("type") == "object" and "properties" in schema
    return {"additionalProperties": False, **closed} if is_object else closed


def sampling_params(
    params: Any, num_items: int, defaults: Callable[[], SamplingParams]
) -> list[messages.SamplingParams]:
    """Returns the parameters of ``num_items`` prompts: one for all, one for each, or those of ``defaults``.

    Raises ``RequestError`` for anything else, ``ValueError`` where prompts and parameters differ in number.
    """
    if params is None:
        return [defaults()] * num_items
    if isinstance(params, messages.SamplingParams):
        return [params] * num_items
    if isinstance(params, dict):
        names = ", ".join(f"{name}={value!r}" for name, value in params.items())
        raise RequestError("invalid_value", f"params is a dict; write SamplingParams({names})")
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise RequestError("invalid_value", f"params must be SamplingParams, not {type(params).__name__}")
    if len(params) != num_items:
        raise ValueError(f"there are {num_items} prompts and {len(params)} params")
    return list(params)


def with_limit(params: messages.SamplingParams, default: int) -> messages.SamplingParams:
    """Returns parameters with a definite ``max_tokens``."""
    if not isinstance(params, messages.SamplingParams) or params.max_tokens is not None:
        return params
    return structs.replace(params, max_tokens=max(default, params.min_tokens))


def checked_params(params: messages.SamplingParams) -> SamplingParams:
    """Returns parameters with every field filled in; raises ``RequestError`` for one of a wrong type or out
    of range."""
    params = checked(params)
    if not isinstance(params, SamplingParams):
        params = SamplingParams(**structs.asdict(params))
    if not 1 <= params.n <= MAX_COMPLETIONS:
        raise RequestError("invalid_value", f"n is {params.n}, but must be 1 to {MAX_COMPLETIONS}")
    if "" in params.stop_strings:
        raise RequestError("invalid_value", "stop has an empty string, which would end every text at once")
    if not isinstance(params.json_schema, dict | str | None):
        kind = type(params.json_schema).__name__
        raise RequestError(
            "invalid_value", f"json_schema is a {kind}; give a dict, a text of JSON or a pydantic model"
        )
    if params.choice is not None and not params.choice:
        raise RequestError("invalid_value", "choice has no text to choose")
    return params

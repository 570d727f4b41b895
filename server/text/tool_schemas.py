"""Schemas of tools as libraries write them: one that cannot be used must not cost the request.

A strict tool is refused by the place of its fault. Of any other one is left out, and reported, what cannot be
enforced: a keyword at first, and the whole schema if it still has no grammar.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from truedraft.server.errors import InvalidRequestError
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.tools import FunctionDefinition
from truedraft.server.text.schema_cleaning import Cleaner, SchemaError

ANY_OBJECT = {"type": "object"}

# A schema that is made to can take the whole ``grammar_timeout``, twice.
MAX_LOOSENED = 8


def cleaned(function: FunctionDefinition, place: str, leniency: Leniency) -> FunctionDefinition:
    """``place``: of its parameters in the body."""
    if function.parameters is None:
        return function
    cleaner = Cleaner(None if function.strict else leniency.ignore, loose=True)
    try:
        return _with(function, cleaner.clean(function.parameters, place))
    except SchemaError as error:
        raise _refusal(error.place, function, str(error)) from error


async def loosen(
    functions: list[FunctionDefinition],
    places: Sequence[str],
    error_of: Callable[[FunctionDefinition], Awaitable[str]],
    leniency: Leniency,
) -> bool:
    """Put looser functions in the places of those that have no grammar; return whether there are such.

    ``error_of`` tells why a function alone has none, and is empty for one that has.
    """
    num_loosened = 0
    for number, (function, place) in enumerate(zip(functions, places, strict=True)):
        if not (reason := await error_of(function)):
            continue
        num_loosened += 1
        if function.strict or num_loosened > MAX_LOOSENED:
            raise _refusal(place, function, reason)
        leniency.ignore(place)
        cleaner = Cleaner(lambda _: None, loose=True, patterns=False)
        looser = _with(function, cleaner.clean(function.parameters, place))
        functions[number] = _with(function, ANY_OBJECT) if await error_of(looser) else looser
    return num_loosened > 0


def _with(function: FunctionDefinition, parameters: dict[str, Any]) -> FunctionDefinition:
    kind = parameters.get("type")
    if isinstance(kind, list) and "object" in kind:
        parameters = parameters | {"type": "object"}
    return function.model_copy(update={"parameters": parameters})


def _refusal(place: str, function: FunctionDefinition, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{place} of the tool '{function.name}' cannot be used: {reason.strip()}",
        param=place,
        code="invalid_grammar",
    )

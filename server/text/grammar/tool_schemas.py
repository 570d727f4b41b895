"""Libraries write odd schemas of tools. One that cannot be used must not cost the request.

A strict tool is refused by the place of its fault. Of any other one is left out, and reported, what cannot be
enforced: a keyword at first, and the whole schema if it still has no grammar.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from truedraft.engine.text.schema.cleaning import NOT_ENFORCED, Cleaner, SchemaError, size_of
from truedraft.server.errors import InvalidRequestError
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.tools import FunctionDefinition
from truedraft.server.text.families import CallFormat
from truedraft.server.text.grammar import quoted_arguments
from truedraft.server.text.grammar.tool_calls import NOT_IN_TEXT, Function
from truedraft.server.text.tool_arguments import is_plain_text, properties_of

ANY_OBJECT = {"type": "object"}

UNSUPPORTED_IN = {"json": NOT_ENFORCED, "tags": NOT_ENFORCED, "quoted": quoted_arguments.UNSUPPORTED}

# A schema that is made to can take the whole ``grammar_timeout``, twice.
MAX_LOOSENED = 8


def check_size(functions: Sequence[FunctionDefinition], max_size: int) -> None:
    """Refuses what is too large before anything else is done with it. Notes do not count."""
    size = 0
    for function in functions:
        size += size_of(function.parameters or {}, max_size - size)
        if size > max_size:
            raise too_large("tools", max_size)


def too_large(param: str, max_size: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} cannot be used: it has more than {max_size} characters (max_grammar_size).",
        param=param,
        code="invalid_grammar",
    )


def placed(function: FunctionDefinition, place: str, leniency: Leniency) -> Function:
    """Returns the function as the grammar takes it: unless it is strict, what makes no sense is left out."""
    return Function(function, place, None if function.strict else leniency.ignore)


def cleaned(
    function: FunctionDefinition, place: str, calls: CallFormat, leniency: Leniency
) -> FunctionDefinition:
    """Returns the function with what can be enforced of its parameters, which the body has at ``place``."""
    schema = function.parameters
    if schema is None:
        return function
    try:
        if function.strict:
            return _with(function, Cleaner(None).clean(schema, place))
        cleaner = Cleaner(leniency.ignore, loose=True, unsupported=UNSUPPORTED_IN[calls.arguments])
        schema = cleaner.clean(schema, place)
    except SchemaError as error:
        raise _refusal(error.place, function, str(error)) from error
    if calls.arguments == "tags":
        for name, inner in properties_of(schema).items():
            if is_plain_text(inner):
                for keyword in sorted(inner.keys() & NOT_IN_TEXT):
                    leniency.ignore(f"{place}.properties.{name}.{keyword}")
                    del inner[keyword]
    return _with(function, schema)


async def loosen(
    functions: list[FunctionDefinition],
    places: Sequence[str],
    error_of: Callable[[FunctionDefinition, str], Awaitable[Exception | None]],
    leniency: Leniency,
) -> bool:
    """Replaces functions that have no grammar by looser ones, and returns whether there were any.

    ``error_of`` tells why a function alone has none; None if it has one.
    """
    num_loosened = num_asked = 0
    for number, (function, place) in enumerate(zip(functions, places, strict=True)):
        if (error := await error_of(function, place)) is None:
            continue
        num_loosened += 1
        num_asked += not isinstance(error, SchemaError)
        at = error.place if isinstance(error, SchemaError) else place
        if function.strict or num_asked > MAX_LOOSENED:
            raise _refusal(at, function, str(error))
        leniency.ignore(place)
        without_patterns = Cleaner(lambda _: None, loose=True, patterns=False)
        looser = _with(function, without_patterns.clean(function.parameters or {}, place))
        functions[number] = _with(function, ANY_OBJECT) if await error_of(looser, place) else looser
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

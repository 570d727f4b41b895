"""Schemas of tools as libraries write them: one that cannot be used must not cost the request.

A strict tool is refused by the place of its fault. Of any other one is left out, and reported, what cannot be
enforced: a keyword at first, and the whole schema if it still has no grammar.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from truedraft.server.errors import InvalidRequestError
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.tools import FunctionDefinition
from truedraft.server.text.schema_cleaning import Cleaner, SchemaError
from truedraft.server.text.tool_grammar import call_grammar

if TYPE_CHECKING:
    from truedraft.server.text.tools import ToolUse

# Each takes a second at most, if it is made to.
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


async def loosen(tools: "ToolUse", error_of: Callable[[str], Awaitable[str]], leniency: Leniency) -> bool:
    """Put looser functions in the places of those that have no grammar; return whether there are such."""
    num_loosened = 0
    for number, function in enumerate(tools.functions):
        if not (reason := await _error_alone(tools, function, error_of)):
            continue
        num_loosened += 1
        place = tools.places[number]
        if function.strict or num_loosened > MAX_LOOSENED:
            raise _refusal(place, function, reason)
        leniency.ignore(place)
        without_patterns = Cleaner(lambda _: None, loose=True, patterns=False).clean(
            function.parameters, place
        )
        looser = _with(function, without_patterns)
        if await _error_alone(tools, looser, error_of):
            looser = _with(function, {"type": "object"})
        tools.functions[number] = looser
    return num_loosened > 0


async def _error_alone(
    tools: "ToolUse", function: FunctionDefinition, error_of: Callable[[str], Awaitable[str]]
) -> str:
    """Why it has no grammar; empty if it has."""

    def write() -> str:
        return call_grammar([function], tools.calls, tools.token_ids, required=True, parallel=False)

    try:
        return await error_of(await asyncio.to_thread(write))
    except ValueError as error:
        return str(error)


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

"""Turns what a request wants its text to match into a grammar of llguidance's that is known to be valid.

The worker compiles it again, and finds out which tokens may come next. Called by the routes.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from truedraft.engine.machine.deep_stack import on_deep_stack
from truedraft.engine.text.schema.cleaning import Cleaner, SchemaError
from truedraft.engine.text.schema.formats import JSON_OPTIONS, Format, grammar_of
from truedraft.server.errors import InvalidRequestError, UnsupportedParameterError
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.common import GenerationRequest, SamplingRequest
from truedraft.server.schemas.responses import ResponsesRequest
from truedraft.server.schemas.structured import (
    FlatJsonSchemaFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)
from truedraft.server.schemas.tools import FunctionDefinition
from truedraft.server.stages import timed
from truedraft.server.text.grammar.tool_schemas import loosen
from truedraft.server.text.grammar.validator import GrammarValidator
from truedraft.server.text.tokenizer import Tokenizer
from truedraft.server.text.tools import Reasoning, ToolUse

# Memory that reading a schema of the largest size may take.
READING_BYTES = 64 << 20

RunInThread = Callable[[int, str, Callable[[], str]], Awaitable[str]]


class Wanted(NamedTuple):
    """``source`` is a schema as an object or its text, a regular expression, choices or a grammar. For tools
    it is the schema of an answer that calls none. All of a ``strict`` schema is enforced or refused."""

    param: str
    kind: Format | Literal["tools"]
    source: Any
    strict: bool = True

    @property
    def may_lose_patterns(self) -> bool:
        """Tells whether it is a schema that may do without its patterns, and has some."""
        return not self.strict and "pattern" in str(self.source)


class Grammar(NamedTuple):
    """A grammar for ``SamplingParams``: what follows the tokens ``after`` matches ``text``."""

    text: str | None
    after: list[int]


NO_GRAMMAR = Grammar(None, [])


async def structured_grammar(
    request: SamplingRequest,
    tokenizer: Tokenizer,
    checks: GrammarValidator,
    leniency: Leniency,
    tools: ToolUse | None = None,
    reasoning: Reasoning | None = None,
    *,
    key: str = "",
    run: RunInThread,
) -> Grammar:
    """Returns what the request's text must match, tool calls included and reasoning excepted.

    ``run`` is given the weight of what is to be done in a thread, and the API ``key`` that it is for.

    Raises ``InvalidRequestError`` with the reason if there is no such text or it cannot be found out within
    the limits. What is not strict is made looser before that.
    """
    wanted = _wanted(request, tools)
    if wanted is None:
        return NO_GRAMMAR
    with timed("grammar"):
        return await _grammar_of(wanted, tokenizer, checks, leniency, tools, reasoning, key, run)


async def _grammar_of(
    wanted: Wanted,
    tokenizer: Tokenizer,
    checks: GrammarValidator,
    leniency: Leniency,
    tools: ToolUse | None,
    reasoning: Reasoning | None,
    key: str,
    run: RunInThread,
) -> Grammar:
    async def error_alone(function: FunctionDefinition) -> str:
        assert tools is not None
        try:
            return await checks.error_of(
                await run(READING_BYTES, key, lambda: tools.grammar_of(function)), tokenizer, key
            )
        except ValueError as error:
            return str(error)

    async def checked(*, patterns: bool = True) -> Grammar:
        reader = _Reader(wanted, checks.max_size, leniency, tools, patterns=patterns)
        text, after = await run(READING_BYTES, key, lambda: on_deep_stack(reader.read)), list[int]()
        if reasoning is not None:
            text, after = reasoning.before(text, has_header=tools is not None)
        if error := await checks.error_of(text, tokenizer, key):
            raise ValueError(error)
        return Grammar(text, after)

    try:
        try:
            return await checked()
        except ValueError:
            is_looser = tools is not None and await loosen(
                tools.functions, tools.places, error_alone, leniency
            )
            if not is_looser and not wanted.may_lose_patterns:
                raise
            return await checked(patterns=not wanted.may_lose_patterns)
    except ValueError as error:
        param = error.place if isinstance(error, SchemaError) else wanted.param
        raise InvalidRequestError(
            f"{param} cannot be used: {str(error).strip()}", param=param, code="invalid_grammar"
        ) from error


def _wanted(request: SamplingRequest, tools: ToolUse | None) -> Wanted | None:
    """Returns the one thing that the text must match; None if it may be any."""
    wanted = _formats(request)
    if tools is not None:
        wanted = _with_tools(wanted)
    if not wanted:
        if request.speculation is not None and request.speculation.method == "grammar":
            raise InvalidRequestError(
                "speculation.method 'grammar' needs a structured output or tools.", param="speculation.method"
            )
        return None
    if len(wanted) > 1:
        names = " and ".join(each.param for each in wanted)
        raise InvalidRequestError(f"{names} cannot be used together.", param=wanted[1].param)
    _check_others(request)
    return wanted[0]


def _with_tools(wanted: list[Wanted]) -> list[Wanted]:
    """A schema is for answers that call nothing; other formats exclude calls."""
    if any(each.param.startswith("structured_outputs") for each in wanted):
        return [*wanted, Wanted("tools", "tools", None)]
    if not wanted:
        return [Wanted("tools", "tools", None)]
    return [Wanted("tools", "tools", {"x-guidance": JSON_OPTIONS} | wanted[0].source, wanted[0].strict)]


def _formats(request: SamplingRequest) -> list[Wanted]:
    """Returns what the fields of the request ask for."""
    found = []
    if request.structured_outputs is not None:
        found.append(_structured(request.structured_outputs))
    if isinstance(request, ResponsesRequest):
        asked: Any = request.text.format if request.text is not None else None
        param = "text.format"
    else:
        assert isinstance(request, GenerationRequest)
        asked, param = request.response_format, "response_format"
    match asked:
        case JsonObjectFormat():
            found.append(Wanted(param, "json", {"type": "object"}))
        case JsonSchemaFormat(json_schema=named):
            place = f"{param}.json_schema.schema"
            found.append(Wanted(place, "json", named.json_schema, bool(named.strict)))
        case FlatJsonSchemaFormat():
            found.append(Wanted(f"{param}.schema", "json", asked.json_schema, bool(asked.strict)))
    return found


def _structured(asked: StructuredOutputs) -> Wanted:
    sources: dict[Format, Any] = {
        "json": asked.json_schema,
        "regex": asked.regex,
        "choice": asked.choice,
        "grammar": asked.grammar,
    }
    ((kind, source),) = [(kind, source) for kind, source in sources.items() if source is not None]
    return Wanted(f"structured_outputs.{kind}", kind, source)


def _check_others(request: SamplingRequest) -> None:
    """Fields that the end of the grammar leaves no meaning to."""
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request, name):
            raise UnsupportedParameterError(
                f"'{name}' is not supported with a structured output or tools, which decide where it ends.",
                param=name,
            )


class _Reader:
    """It writes the grammar, and measures it without what says nothing about the text."""

    def __init__(
        self, wanted: Wanted, max_size: int, leniency: Leniency, tools: ToolUse | None, *, patterns: bool
    ) -> None:
        self._wanted = wanted
        self._max_size = max_size
        self._tools = tools
        self._cleaner = Cleaner(None if wanted.strict else leniency.ignore, patterns=patterns)

    def read(self) -> str:
        kind, source = self._wanted.kind, self._wanted.source
        if kind == "tools":
            assert self._tools is not None
            grammar = self._tools.grammar(None if source is None else self._cleaned(source))
            self._check_size(grammar)
            return grammar
        if kind == "json":
            source = self._cleaned(source)
        self._check_size(source if isinstance(source, str) else json.dumps(source, ensure_ascii=False))
        return grammar_of(kind, source)

    def _cleaned(self, source: Any) -> Any:
        return self._cleaner.clean(
            from_json(source) if isinstance(source, str) else source, self._wanted.param
        )

    def _check_size(self, text: str) -> None:
        if len(text) > self._max_size:
            param = self._wanted.param
            raise InvalidRequestError(
                f"{param} cannot be used: it has {len(text)} characters, more than {self._max_size} "
                "(max_grammar_size).",
                param=param,
                code="invalid_grammar",
            )

"""Turns what a request wants its text to match into a grammar of llguidance's that is known to be valid.

The worker compiles it again, and finds out which tokens may come next. Called by the routes.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from threading import Event
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from truedraft.engine.machine.deep_stack import on_deep_stack
from truedraft.engine.text.schema.cleaning import Cleaner, SchemaError, size_of
from truedraft.engine.text.schema.demands import Placed
from truedraft.engine.text.schema.formats import Format, grammar_of, schema_grammar
from truedraft.engine.text.schema.numbers import read_json
from truedraft.engine.text.schema.place import Place
from truedraft.engine.text.schema.writer import Options
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
from truedraft.server.text.grammar.tool_calls import Rules
from truedraft.server.text.grammar.tool_schemas import loosen, placed, too_large
from truedraft.server.text.grammar.validator import GrammarValidator
from truedraft.server.text.tokenizer import Tokenizer
from truedraft.server.text.tools import Reasoning, ToolUse

# Memory that reading takes: of any schema, and for each of its characters.
READING_BYTES = 1 << 20
READING_BYTES_PER_CHARACTER = 200
# Strings that nothing matches are found by the compiler, one at a time.
MAX_EMPTY = 8
# What llguidance says of a line of the grammar, which is a rule of the schema.
FAULT = re.compile(r"\s*at (\d+)\(\d+\): ([^\n]*)")
SUBJECT = re.compile(r"failed to compile JSON schema: |Unsatisfiable schema: ")
UNSATISFIABLE = ("Unsatisfiable schema", "Regex is empty")

# Characters of a reason that a client gets.
MAX_REASON = 1000

T = TypeVar("T")


class RunInThread(Protocol):
    """Does work of a weight for an API key in a thread."""

    def __call__(self, weight: int, key: str, work: Callable[[], T]) -> Awaitable[T]: ...


class Wanted(NamedTuple):
    """``source`` is a schema as an object or its text, a regular expression, choices or a grammar. For tools
    it is the schema of an answer that calls none. All of a ``strict`` schema is enforced or refused."""

    param: str
    kind: Format | Literal["tools"]
    source: Any
    strict: bool = True


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
    abandoned = Event()
    reading = _Reading(wanted, checks, leniency, tools, abandoned)

    async def run_reading(work: Callable[[], T]) -> T:
        return await run(reading.weight, key, lambda: on_deep_stack(work))

    async def compiled(read: Callable[[Options], _Text]) -> _Text:
        """Returns what the compiler takes: strings that nothing matches are left out where they may be."""
        empty = set[str]()
        while True:
            text = await run_reading(lambda: read(Options(go_on=reading.go_on, empty=frozenset(empty))))
            whole, _ = _after(reasoning, text, has_header=tools is not None)
            if not (error := await checks.error_of(whole, tokenizer, key)):
                return text
            term, fault = _fault_of(error, text)
            if term is None or term in empty or len(empty) >= MAX_EMPTY:
                raise fault
            empty.add(term)

    async def error_alone(function: FunctionDefinition, place: str) -> Exception | None:
        assert tools is not None
        alone = placed(function, place, leniency)
        try:
            await compiled(lambda options: _Text.of(tools.grammar_of(alone, options)))
        except ValueError as error:
            return error
        return None

    try:
        await run_reading(reading.check_size)
        try:
            text = await compiled(reading.read)
        except ValueError:
            is_looser = tools is not None and await loosen(
                tools.functions, tools.places, error_alone, leniency
            )
            if not is_looser and not reading.has_patterns:
                raise
            text = await compiled(reading.without_patterns)
        return Grammar(*_after(reasoning, text, has_header=tools is not None))
    except ValueError as error:
        param = error.place if isinstance(error, SchemaError) else wanted.param
        raise InvalidRequestError(
            f"{param} cannot be used: {str(error).strip()[:MAX_REASON]}", param=param, code="invalid_grammar"
        ) from error
    finally:
        abandoned.set()


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
    (schema,) = wanted
    return [schema._replace(kind="tools")]


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


class AbandonedError(Exception):
    """Nobody waits for the grammar any more."""


class _Text(NamedTuple):
    """A grammar, and what its rules are for."""

    text: str
    places: Mapping[str, Place] = {}

    @staticmethod
    def of(rules: Rules) -> "_Text":
        return _Text(str(rules), rules.places)


class _Reading:
    """It writes the grammar, and measures what it is of before that, without what says nothing of a text."""

    def __init__(
        self,
        wanted: Wanted,
        checks: GrammarValidator,
        leniency: Leniency,
        tools: ToolUse | None,
        abandoned: Event,
    ) -> None:
        self._wanted = wanted
        self._max_size = checks.max_size
        self._leniency = leniency
        self._tools = tools
        self._abandoned = abandoned
        self._size = 0
        self.has_patterns = False

    @property
    def weight(self) -> int:
        return READING_BYTES + READING_BYTES_PER_CHARACTER * self._size

    def go_on(self) -> None:
        if self._abandoned.is_set():
            raise AbandonedError

    def check_size(self) -> None:
        """Measures it, which takes no longer for what is too large."""
        kind, source = self._wanted.kind, self._wanted.source
        if kind == "json" and isinstance(source, str):
            source = read_json(source)
            self._wanted = self._wanted._replace(source=source)
        if source is not None:
            size = len(source) if isinstance(source, str) else size_of(source, self._max_size)
            if size > self._max_size:
                raise too_large(self._wanted.param, self._max_size)
            self._size = size
        if self._tools is not None:
            self._size += sum(
                size_of(each.parameters or {}, self._max_size) for each in self._tools.functions
            )

    def read(self, options: Options) -> _Text:
        return self._read(options, patterns=True)

    def without_patterns(self, options: Options) -> _Text:
        return self._read(options, patterns=not self.has_patterns)

    def _read(self, options: Options, *, patterns: bool) -> _Text:
        kind, source = self._wanted.kind, self._wanted.source
        if kind == "tools":
            assert self._tools is not None
            schema = None if source is None else self._cleaned(source, patterns=patterns)
            return _Text.of(self._tools.grammar(self._leniency, schema, options))
        if kind != "json":
            return _Text(grammar_of(kind, source))
        return _Text(*schema_grammar(self._cleaned(source, patterns=patterns), options))

    def _cleaned(self, source: Any, *, patterns: bool) -> Placed:
        """A schema that is not strict may do without its patterns, if they keep it from being used."""

        def leave_out(place: Place) -> None:
            self._leniency.ignore(place)

        place = Place(self._wanted.param)
        leaving = None if self._wanted.strict else leave_out
        cleaner = Cleaner(leaving, patterns=patterns, go_on=self.go_on)
        cleaned = cleaner.clean(source, place)
        self.has_patterns = cleaner.has_kept_patterns
        return Placed(cleaned, place)


def _fault_of(error: str, text: _Text) -> tuple[str | None, ValueError]:
    """Returns the error by the place of the rule that it names, and the rule's term if no text matches it."""
    found = FAULT.match(error)
    lines = text.text.splitlines()
    if found is None or not 0 < int(found[1]) <= len(lines):
        return None, ValueError(error)
    name, _, term = lines[int(found[1]) - 1].partition(": ")
    if name not in text.places:
        return None, ValueError(error)
    is_empty = any(words in found[2] for words in UNSATISFIABLE)
    reason = "nothing satisfies it" if is_empty else SUBJECT.sub("", found[2])
    return (term if is_empty else None), SchemaError(reason, text.places[name])


def _after(reasoning: Reasoning | None, text: _Text, *, has_header: bool) -> tuple[str, list[int]]:
    if reasoning is None:
        return text.text, []
    return reasoning.before(text.text, has_header=has_header)

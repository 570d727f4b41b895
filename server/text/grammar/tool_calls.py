"""A grammar of tool calls in a family's own syntax, in llguidance's Lark: what constrains them.

Text in front of a call is free up to the family's trigger. Arguments match their tool's schema, and are
written with spaces as chat templates write them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from truedraft.engine.text.schema.cleaning import SchemaError
from truedraft.engine.text.schema.demands import Placed, count_of
from truedraft.engine.text.schema.notation import Layout, layout_of
from truedraft.engine.text.schema.place import Place
from truedraft.engine.text.schema.writer import Options, Writer, Written
from truedraft.server.schemas.tools import FunctionDefinition
from truedraft.server.text.families import HEADER_END, MESSAGE_END, CallFormat, ReasoningMarks
from truedraft.server.text.grammar.quoted_arguments import QuotedWriter
from truedraft.server.text.tool_arguments import is_plain_text, properties_of

JSON_LAYOUT = Layout(", ", ": ")
PARAMETER_END = "\n</parameter>\n"
SPEAKS_OF_OTHERS = {"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"}
# Keywords that a text in tags cannot be held to.
NOT_IN_TEXT = {"pattern", "format", "const", "anyOf", "allOf", "oneOf", "not"}
W = TypeVar("W", bound=Writer)
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(NamedTuple):
    """``place`` is where the request has its parameters. ``leave_out`` gets the places of what makes no sense
    in them; None: that is an error."""

    definition: FunctionDefinition
    place: str = "parameters"
    leave_out: Callable[[Place], object] | None = None


def arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """Functions take what they declare: other names are allowed only by a schema that speaks of them."""
    parameters = function.parameters
    if parameters is None:
        return NO_PARAMETERS
    properties, required = parameters.get("properties"), parameters.get("required")
    if not isinstance(properties, dict) or parameters.keys() & SPEAKS_OF_OTHERS:
        return {"type": "object"} | parameters
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    properties = {
        **properties,
        **{name: {} for name in names if name not in properties},
    }  # which declares them
    return {"type": "object", "additionalProperties": False} | parameters | {"properties": properties}


def call_grammar(
    functions: Sequence[Function],
    calls: CallFormat,
    token_ids: Mapping[str, int],
    *,
    required: bool,
    parallel: bool,
    schema: Placed | None = None,
    options: Options = Options(),  # noqa: B008 (it is frozen)
) -> "Rules":
    """Returns the grammar of an answer that calls ``functions``. It must if ``required``; else it may also be
    JSON that matches ``schema``, or any text if that is None. Texts with an id in ``token_ids`` match as that
    token only."""
    rules = Rules(token_ids, options)
    literal = rules.literal
    rules.add("call", " | ".join(rules.call(function, calls) for function in functions))
    one = f"call {literal(calls.end)}"
    more = f"({literal(calls.later)} {one})*" if parallel and calls.later is not None else ""
    rules.add("calls", f"{one} {more} {literal(calls.last)}")
    rest = f"{literal(calls.first.removeprefix(calls.trigger))} calls"
    content = literal(calls.before_content)
    if required:
        rules.add("start", f"{literal(calls.trigger)} {rest}")
    elif content:
        text = f"{rules.other_tokens(*token_ids)}*" if schema is None else rules.json(schema)
        rules.add("start", f"{literal(calls.trigger)} {rest} | {content} {text}")
    elif schema is not None:
        # Cut after a brace, which is how JSON begins: the longest piece that may follow wins.
        trigger = " ".join(map(literal, calls.trigger.partition("{")[1:])) if calls.at_start else ""
        rules.add("start", f"{trigger or literal(calls.trigger)} {rest} | {rules.json(schema)}")
    elif calls.trigger in token_ids:
        rules.add("start", f"{rules.other_tokens(calls.trigger)}* ({literal(calls.trigger)} {rest})?")
    else:
        # What stands before the trigger can no longer be text once the trigger is complete.
        rules.add("opening[lazy]", f"{'' if calls.at_start else 'TEXT '}{literal(calls.trigger)}")
        rules.add("start", f"text | opening {rest}")
        rules.add("text", "TEXT")
        rules.add("TEXT", r"/(.|\n)*/")
    return rules


def after_reasoning(
    grammar: str,
    marks: ReasoningMarks,
    token_ids: Mapping[str, int],
    *,
    is_open: bool,
    has_header: bool = False,
) -> tuple[str, list[int]]:
    """Returns a grammar that lets a model reason before ``grammar``, and the tokens after which it starts:
    none if it starts at once. ``is_open``: the prompt has begun the reasoning. The closing mark must be a
    token, or the tokens of a message's end. ``has_header``: ``grammar`` begins with that of the answer."""
    rules = Rules(token_ids)
    after = []
    if marks.answer:
        if not token_ids.keys() >= {MESSAGE_END, HEADER_END, "<|channel|>"}:
            return grammar, []
        header = f'{rules.literal("<|channel|>")} ("analysis" | "commentary") {rules.literal(HEADER_END)}'
        rules.add("message", f"{header} {rules.other_tokens(*token_ids)}* {rules.literal(marks.close)}")
        rules.add("start", f"message* {'' if has_header else rules.literal(marks.answer)} @body")
    elif marks.close not in token_ids:
        return grammar, []
    else:
        close = rules.literal(marks.close)
        thought = f"{rules.literal(marks.open)} {rules.other_tokens(marks.close)}* {close}"
        rules.add("start", "SPACE @body" if is_open else f"({thought} SPACE)? @body")
        rules.add("SPACE", r"/\s*/")
        after = [token_ids[marks.close]] if is_open else []
    body = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    whole = [{"name": "answer", "lark_grammar": str(rules)}, body[0] | {"name": "body"}, *body[1:]]
    return json.dumps({"grammars": whole}), after


class Rules:
    """Lines of a grammar. ``places`` says what rules of schemas are for, by their names."""

    def __init__(self, token_ids: Mapping[str, int], options: Options = Options()) -> None:  # noqa: B008
        self.places: dict[str, Place] = {}
        self._options = options
        self._num_schemas = 0
        self._token_ids = token_ids
        self._tokens = re.compile("|".join(map(re.escape, token_ids)) or r"(?!)")
        self._lines: list[str] = []

    def __str__(self) -> str:
        return "\n".join(["%llguidance {}", *self._lines])

    def add(self, name: str, expression: str) -> str:
        self._lines.append(f"{name}: {expression}")
        return name.partition("[")[0]

    def literal(self, text: str) -> str:
        """``text``, with tokens that match as such only."""
        pieces, start = [], 0
        for match in self._tokens.finditer(text):
            pieces += [_quoted(text[start : match.start()]), f"<[{self._token_ids[match[0]]}]>"]
            start = match.end()
        return " ".join(filter(None, [*pieces, _quoted(text[start:])]))

    def other_tokens(self, *texts: str) -> str:
        """Returns a term for any token but these."""
        ids = ",".join(str(self._token_ids[text]) for text in texts)
        return f"<[^{ids}]>" if ids else "<[*]>"

    def json(self, placed: Placed, leave_out: Callable[[Place], object] | None = None) -> str:
        """Adds the rules of JSON that matches a schema, and returns the first one's name."""
        layout = layout_of(placed.schema, JSON_LAYOUT)
        return self._added(self._writer(Writer, placed, layout, leave_out).write())

    def _writer(
        self, kind: type[W], placed: Placed, layout: Layout, leave_out: Callable[[Place], object] | None
    ) -> W:
        self._num_schemas += 1
        return kind(*placed, layout, f"s{self._num_schemas}j", replace(self._options, leave_out=leave_out))

    def _added(self, written: Written) -> str:
        self._lines += written.lines
        self.places |= written.places
        return written.start

    def call(self, function: Function, calls: CallFormat) -> str:
        """Adds a call's rule, from the name to the end of the arguments."""
        name, definition = f"call_{len(self._lines)}", function.definition
        placed = Placed(arguments_schema(definition), Place(function.place))
        if placed.schema["type"] != "object":
            raise SchemaError(f"the parameters of '{definition.name}' are not of type 'object'", placed.place)
        match calls.arguments:
            case "json":
                arguments = self.json(placed, function.leave_out)
            case "tags":
                arguments = self._tagged(name, placed, function.leave_out)
            case "quoted":
                quote, end = calls.quote, calls.end.removeprefix("}")
                if not self._token_ids.keys() >= {quote, end}:
                    raise ValueError(f"the model has no token for {quote!r}")
                writer = self._writer(QuotedWriter, placed, Layout(), function.leave_out)
                writer.marks = (quote, self.literal(quote), end)
                arguments = self._added(writer.write_members())
        return self.add(name, f"{self.literal(definition.name + calls.before_arguments)} {arguments}")

    def _tagged(self, prefix: str, placed: Placed, leave_out: Callable[[Place], object] | None) -> str:
        """The properties in their order, each in its tags."""
        schema, required = placed.schema, placed.schema.get("required")
        required = {*required} if isinstance(required, list) else set()
        shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        tagged = []
        for number, (name, inner) in enumerate(properties_of(schema).items()):
            place = placed.place.at("properties").at(name)
            if re.search(r"[>\n]", name):
                raise SchemaError(f"{name[:100]!r} cannot be written as the name of a parameter", place)
            rule = f"{prefix}_{number}"
            if not is_plain_text(inner):
                self.add(
                    rule,
                    f"{self.json(Placed(_with(inner, shared), place), leave_out)} {_quoted(PARAMETER_END)}",
                )
            elif "enum" in inner:
                self.add(rule, f"({' | '.join(map(_quoted, inner['enum']))}) {_quoted(PARAMETER_END)}")
            else:
                self._text(rule, Placed(inner, place))
            one = f"{_quoted(f'<parameter={name}>' + chr(10))} {rule}"
            tagged.append(one if name in required else f"({one})?")
        return " ".join(tagged)

    def _text(self, rule: str, placed: Placed) -> None:
        """Adds a rule for any text of the right length and the end of its tags, which shows where it ends."""
        schema, place = placed
        for keyword in schema.keys() & NOT_IN_TEXT:
            raise SchemaError(
                f"'{keyword}' of a string is not supported where arguments stand in tags", place.at(keyword)
            )
        least, most = (self._length(schema, name, place) for name in ("minLength", "maxLength"))
        if most is not None and (least or 0) > most:
            raise SchemaError("nothing satisfies it: minLength is above maxLength", place)
        count = f"{least or 0},{'' if most is None else most}"
        end = re.escape(PARAMETER_END.strip()).replace("/", r"\/")
        self.add(rule if most is not None else f"{rule}[lazy]", rf"/(.|\n){{{count}}}\n{end}\n/")

    def _length(self, schema: Any, name: str, place: Place) -> int | None:
        if name not in schema:
            return None
        if (length := count_of(schema[name])) is None:
            raise SchemaError("it is not a number from 0 on without a fraction", place.at(name))
        return length


def _with(schema: Any, shared: dict[str, Any]) -> Any:
    return schema | shared if isinstance(schema, dict) else schema


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""

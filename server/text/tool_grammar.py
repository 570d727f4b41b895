"""A grammar of tool calls in a family's own syntax, in llguidance's Lark: what constrains them.

Text in front of a call is free up to the family's trigger. Arguments match their tool's schema, and are
written with spaces as chat templates write them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from server.schemas.tools import FunctionDefinition
from server.text.families import CallFormat
from server.text.tool_arguments import is_plain_text, properties_of

JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    return NO_PARAMETERS if function.parameters is None else {"type": "object"} | function.parameters


def call_grammar(
    functions: Sequence[FunctionDefinition],
    calls: CallFormat,
    special_ids: Mapping[str, int],
    *,
    required: bool,
    parallel: bool,
    schema: Any = None,
) -> str:
    """Of an answer that calls ``functions``: it must if ``required``; else it may also be JSON that matches
    ``schema``, or any text if that is None. ``special_ids``: of tokens that no text is decoded to."""
    rules = _Rules(special_ids)
    literal = rules.literal
    rules.add("call", " | ".join(rules.call(function, calls) for function in functions))
    one = f"call {literal(calls.end)}"
    more = f"({literal(calls.later)} {one})*" if parallel and calls.later is not None else ""
    rules.add("calls", f"{one} {more} {literal(calls.last)}")
    if required or schema is not None:
        other = "" if required else f" | {_json(schema)}"
        rules.add("start", f"{literal(calls.first)} calls{other}")
    else:
        # As soon as the trigger is complete, what stands before it can no longer be text.
        is_lazy = calls.trigger not in special_ids
        text = "" if calls.at_start else "TEXT "
        rules.add("opening[lazy]" if is_lazy else "opening", text + literal(calls.trigger))
        rules.add("start", f"text | opening {literal(calls.first.removeprefix(calls.trigger))} calls")
        rules.add("text", "TEXT")
        rules.add("TEXT", r"/(.|\n)*/")
    return str(rules)


class _Rules:
    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        self._special = re.compile("|".join(map(re.escape, special_ids)) or r"(?!)")
        self._lines: list[str] = []

    def __str__(self) -> str:
        return "\n".join(["%llguidance {}", *self._lines])

    def add(self, name: str, expression: str) -> str:
        self._lines.append(f"{name}: {expression}")
        return name.partition("[")[0]

    def literal(self, text: str) -> str:
        """``text``, with special tokens as themselves."""
        pieces, start = [], 0
        for match in self._special.finditer(text):
            pieces += [_quoted(text[start : match.start()]), f"<[{self._special_ids[match[0]]}]>"]
            start = match.end()
        return " ".join(filter(None, [*pieces, _quoted(text[start:])]))

    def call(self, function: FunctionDefinition, calls: CallFormat) -> str:
        """From the name to the end of the arguments."""
        name = f"call_{len(self._lines)}"
        schema = arguments_schema(function)
        arguments = (
            _json(schema, function) if calls.arguments == "json" else self._tagged(name, schema, function)
        )
        return self.add(name, f"{self.literal(function.name + calls.before_arguments)} {arguments}")

    def _tagged(self, prefix: str, schema: dict[str, Any], function: FunctionDefinition) -> str:
        """The properties in their order, each in its tags."""
        required = schema.get("required", [])
        shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        tagged = []
        for number, (name, inner) in enumerate(properties_of(schema).items()):
            end = "\n</parameter>\n"
            if is_plain_text(inner) and "enum" not in inner:
                rule = self.add(f"{prefix}_{number}[lazy]", f"/(.|\\n)*/ {_quoted(end)}")
            else:
                choices = inner.get("enum") if is_plain_text(inner) else None
                value = (
                    " | ".join(map(_quoted, choices)) if choices else _json(_with(inner, shared), function)
                )
                rule = self.add(f"{prefix}_{number}", f"({value}) {_quoted(end)}")
            one = f"{_quoted(f'<parameter={name}>' + chr(10))} {rule}"
            tagged.append(one if name in required else f"({one})?")
        return " ".join(tagged)


def _with(schema: Any, shared: dict[str, Any]) -> Any:
    return schema | shared if isinstance(schema, dict) else schema


def _json(schema: Any, function: FunctionDefinition | None = None) -> str:
    """Keywords that are not supported matter where the tool is strict only."""
    layout = JSON_LAYOUT | ({"lenient": True} if function is not None and not function.strict else {})
    if isinstance(schema, dict):
        schema = {"x-guidance": layout} | schema
    return "%json " + json.dumps(schema, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""

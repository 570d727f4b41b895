"""Arguments as Gemma's models write them, as rules in llguidance's Lark.

Names stand as they are, in alphabetical order, without spaces; strings stand as they are between two marks,
each a token; other values are JSON.
"""

import json
import re
from typing import Any, Protocol

from truedraft.engine.text.schema.cleaning import ENFORCED, NOT_ENFORCED

# What stands around a name; none can be part of it.
NOT_IN_NAMES = re.compile(r"[{}\[\],:\s]")
NUMERIC = {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
KEYWORDS = {"anyOf", "enum", "const", "properties", "required", "additionalProperties", "items"}
KEYWORDS |= {"minItems", "maxItems", "minLength", "maxLength", "$ref", "$defs", "definitions"} | NUMERIC
UNSUPPORTED = (ENFORCED | NOT_ENFORCED) - KEYWORDS - {"oneOf"}
TYPES = ("string", "number", "boolean", "null", "array", "object")
# Far more than any tool has: each of several types at each level doubles what is below.
MAX_RULES = 5000


class RuleWriter(Protocol):
    def add(self, name: str, expression: str) -> str: ...
    def literal(self, text: str) -> str: ...


class QuotedArguments:
    """``end`` is the token after the arguments, which no string may spell either."""

    def __init__(self, rules: RuleWriter, prefix: str, root: dict[str, Any], marks: tuple[str, str]) -> None:
        self._rules = rules
        self._prefix = prefix
        self._root = root
        self._marks = marks
        self._num_rules = 0
        self._references: dict[str, str] = {}
        self._any: str | None = None

    def members(self, schema: dict[str, Any]) -> str:
        """The properties of an object. Each rule is what may follow the ones before."""
        self._check(schema)
        properties = schema.get("properties") or {}
        if not isinstance(properties, dict):
            raise ValueError("properties are not an object")
        if not properties:
            other = schema.get("additionalProperties", True)
            if other is False:
                return '""'
            member = f"{self._name()} {self._value(other)}"
            return f'({member} ("," {member})*)?'
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        first: str | None = None  # the rest's rule, if nothing stands before it
        later = '""'
        for name in sorted(properties, reverse=True):
            if NOT_IN_NAMES.search(name) or not name:
                raise ValueError(f"{name!r} cannot be written as the name of a parameter")
            member = f"{_text(f'{name}:')} {self._value(properties[name])}"
            is_required = name in required
            starting = f"{member} {later}"
            first = starting if is_required else f"{starting} | {first or _text('')}"
            later = f'"," {member} {later}' if is_required else f'("," {member})? {later}'
            first, later = self._rule(first), self._rule(later)
        assert first is not None
        return first

    def _value(self, schema: Any) -> str:
        if schema is True or schema == {}:
            return self._any_value()
        if not isinstance(schema, dict):
            raise ValueError(f"the schema {json.dumps(schema)} allows nothing")
        self._check(schema)
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self._rule(" | ".join(self._written(value) for value in values))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._rule(" | ".join(self._value(each) for each in schema[keyword]))
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._rule(" | ".join(self._value(schema | {"type": each}) for each in kind))
        if kind is None:
            kind = next((kind for name, kind in _IMPLIED.items() if name in schema), None)
        match kind:
            case None:
                return self._any_value()
            case "string":
                return self._string(schema)
            case "object":
                return self._rule(f'"{{" {self.members(schema)} "}}"')
            case "array":
                return self._array(schema)
        own = {name: value for name, value in schema.items() if name in NUMERIC}
        return self._rule(f"%json {json.dumps(own)}")

    def _array(self, schema: dict[str, Any]) -> str:
        item = self._value(schema.get("items", True))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return _text("[]")
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return self._rule(f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"')

    def _string(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        quote = self._rules.literal(self._marks[0])
        spelled = "|".join(re.escape(mark).replace("/", r"\/").replace('"', r"\"") for mark in self._marks)
        self._num_rules += 1
        text = f"{self._prefix}_text_{self._num_rules}".upper()
        self._rules.add(text, rf"/(.|\n){{{least},{most}}}/ & ~/(.|\n)*({spelled})(.|\n)*/")
        return self._rule(f"{quote} {text} {quote}")

    def _written(self, value: Any) -> str:
        match value:
            case str():
                if any(mark in value for mark in self._marks):
                    raise ValueError(f"{value!r} cannot be written as an argument")
                quote = self._rules.literal(self._marks[0])
                return f"{quote} {_text(value)} {quote}"
            case dict():
                raise ValueError("objects as values of enum or const are not supported for this model")
            case list():
                return f'"[" {" ".join(_joined([self._written(each) for each in value]))} "]"'
        return _text(json.dumps(value))

    def _reference(self, reference: Any) -> str:
        if reference not in self._references:
            *path, name = str(reference).split("/")
            definitions = self._root.get(path[-1]) if path[:1] == ["#"] and len(path) == 2 else None
            if not isinstance(definitions, dict) or name not in definitions:
                raise ValueError(f"the reference {reference!r} is not supported for this model")
            self._num_rules += 1
            rule = self._references[reference] = f"{self._prefix}_ref_{self._num_rules}"
            self._rules.add(rule, self._value(definitions[name]))
        return self._references[reference]

    def _any_value(self) -> str:
        if self._any is None:
            self._any = f"{self._prefix}_any"
            self._rules.add(self._any, " | ".join(self._value({"type": kind}) for kind in TYPES))
        return self._any

    def _name(self) -> str:
        self._num_rules += 1
        name = f"{self._prefix}_name_{self._num_rules}".upper()
        self._rules.add(name, r"/[^{}\[\],:\s<>]+:/")
        return name

    def _rule(self, expression: str) -> str:
        self._num_rules += 1
        if self._num_rules > MAX_RULES:
            raise ValueError(f"its parameters take more than {MAX_RULES} rules")
        return self._rules.add(f"{self._prefix}_{self._num_rules}", expression)

    def _check(self, schema: dict[str, Any]) -> None:
        unsupported = sorted(schema.keys() & UNSUPPORTED)
        if unsupported:
            raise ValueError(f"{unsupported} is not supported for this model")


_IMPLIED = {"properties": "object", "additionalProperties": "object", "items": "array"}
_IMPLIED |= {"minLength": "string", "maxLength": "string", "minimum": "number", "maximum": "number"}


def _joined(items: list[str]) -> list[str]:
    return [piece for item in items for piece in ('","', item)][1:]


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

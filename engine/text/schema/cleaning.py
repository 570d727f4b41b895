"""Removes from a JSON schema what says nothing about a text, so that only the grammar is counted.

Libraries write more into schemas than can be enforced. Unless a schema is strict, such keywords are left out
and reported by their places. ``engine.text.schema.writer`` reads the rest.
"""

from collections.abc import Callable, Mapping, Set
from typing import Any

from truedraft.engine.text.schema.demands import count_of
from truedraft.engine.text.schema.numbers import is_number
from truedraft.engine.text.schema.one_of import NAMED_SCHEMAS, VALUES, exclusive
from truedraft.engine.text.schema.pattern import exact_name, exact_pattern
from truedraft.engine.text.schema.place import Place

NOTES = {"title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"}
NOTES |= {"$comment", "externalDocs", "markdownDescription", "enumDescriptions", "errorMessage"}

# The first formats are enforced; other libraries write the rest only to tell a reader what a string holds.
ENFORCED_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri"}
ENFORCED_FORMATS |= {"uuid"}
NOTED_FORMATS = {"binary", "byte", "password", "unknown", "int32", "int64", "uint32", "uint64", "float"}
NOTED_FORMATS |= {"double", "decimal"}

# The first keywords are enforced, the second ones are known and not supported.
ENFORCED = {"type", "enum", "const", "properties", "patternProperties", "additionalProperties", "required"}
ENFORCED |= {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "minProperties"}
ENFORCED |= {"maxProperties", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "$ref"}
ENFORCED |= {"exclusiveMinimum", "exclusiveMaximum", "multipleOf", "anyOf", "allOf", "oneOf", "$defs"}
ENFORCED |= {"definitions"}
NOT_ENFORCED = {"not", "if", "then", "else", "contains", "minContains", "maxContains", "dependencies"}
NOT_ENFORCED |= {"dependentRequired", "dependentSchemas", "propertyNames", "uniqueItems", "unevaluatedItems"}
NOT_ENFORCED |= {"unevaluatedProperties", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor"}
NOT_ENFORCED |= {"$recursiveRef"}

TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}


class SchemaError(ValueError):
    """Something in a schema cannot be enforced. ``place`` is the path of the keyword at fault."""

    def __init__(self, message: str, place: object) -> None:
        super().__init__(message)
        self.place = str(place)


def size_of(schema: Any, limit: int) -> int:
    """Returns about the number of characters that a schema has without notes, of which it counts few more
    than ``limit``."""
    size, pending = 0, [(schema, "schema")]
    while pending and size <= limit:
        value, kind = pending.pop()
        if isinstance(value, dict):
            for name, each in value.items():
                is_note = kind == "schema" and (
                    name in NOTES or (name.startswith("x-") and name != "x-guidance")
                )
                size += 1 if is_note else len(name) + 4
                if size > limit:
                    break
                if not is_note:
                    pending.append((each, _kind_within(kind, name)))
        elif isinstance(value, list):
            size += len(value) + 2
            pending += ((each, kind) for each in value[:limit])
        else:
            size += len(value) + 2 if isinstance(value, str) else 8
    return size


def _kind_within(kind: str, name: str) -> str:
    if kind == "value" or (kind == "schema" and name in VALUES):
        return "value"
    return "names" if kind == "schema" and name in NAMED_SCHEMAS else "schema"


class Cleaner:
    """Cleans schemas. ``leave_out`` is told the places of keywords that are left out. It is None for a strict
    schema, in which they are errors.

    ``loose`` also leaves out ``unsupported`` keywords and those that make no sense, and turns ``oneOf`` into
    ``anyOf`` even where its schemas do not exclude each other. Without ``patterns`` all patterns are left
    out. ``go_on`` is called now and then, and may raise an exception to end work that nobody waits for.
    """

    def __init__(
        self,
        leave_out: Callable[[Place], object] | None,
        *,
        loose: bool = False,
        unsupported: Set[str] = NOT_ENFORCED,
        patterns: bool = True,
        go_on: Callable[[], None] = lambda: None,
    ) -> None:
        self._leave_out = leave_out
        self._is_loose = loose and leave_out is not None
        self._unsupported = unsupported if self._is_loose else frozenset[str]()
        self._has_patterns = patterns
        self._go_on = go_on
        self._root: Any = None
        self.has_kept_patterns = False

    def clean(self, schema: Any, place: str | Place) -> Any:
        """Returns a whole schema without the parts that are left out."""
        self._root = schema
        return self._clean(schema, Place(place) if isinstance(place, str) else place)

    def _clean(self, schema: Any, path: Place) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._go_on()
        schema = _names_as_properties(schema)
        written: dict[str, Any] = {}
        for keyword, value in schema.items():
            place = path.at(keyword)
            is_null = self._is_loose and value is None and keyword not in VALUES
            if is_null or keyword in NOTES or _says_nothing(keyword, value, schema):
                continue
            if self._is_loose and keyword == "oneOf" and self._may_be_several(value):
                self._report(place)
                if "anyOf" not in schema:
                    written["anyOf"] = self._inner(value, place)
            elif not self._is_left_out(keyword, value, place):
                written[keyword] = self._written(keyword, value, place)
        if self._is_loose:
            self._drop_impossible_names(written, path)
        return written

    def _may_be_several(self, branches: Any) -> bool:
        return not _makes_no_sense("oneOf", branches) and exclusive(branches, self._root) is None

    def _written(self, keyword: str, value: Any, place: Place) -> Any:
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            return self._named(keyword, value, place)
        return value if keyword in VALUES else self._inner(value, place)

    def _is_left_out(self, keyword: str, value: Any, place: Place) -> bool:
        if self._leave_out is None:
            if keyword == "pattern" and isinstance(value, str) and (fault := _fault_of(value)):
                raise SchemaError(fault, place)
            return False
        is_left_out = keyword in self._unsupported or (self._is_loose and _makes_no_sense(keyword, value))
        if isinstance(value, str):
            is_left_out |= keyword == "pattern" and (not self._has_patterns or bool(_fault_of(value)))
            is_left_out |= keyword == "format" and value not in ENFORCED_FORMATS
        if is_left_out:
            self._report(place)
        self.has_kept_patterns |= keyword == "pattern" and not is_left_out
        return is_left_out

    def _report(self, place: Place) -> None:
        assert self._leave_out is not None
        self._leave_out(place)

    def _named(self, keyword: str, schemas: Mapping[str, Any], place: Place) -> dict[str, Any]:
        written = {}
        for name, schema in schemas.items():
            if keyword != "patternProperties" or not self._is_name_left_out(name, place.at(name)):
                written[name] = self._schema(schema, place.at(name))
        return written

    def _is_name_left_out(self, name: str, place: Place) -> bool:
        fault = _fault_of(name, of_names=True)
        if self._leave_out is None and fault:
            raise SchemaError(fault, place)
        if self._leave_out is None or (self._has_patterns and not fault):
            self.has_kept_patterns |= self._leave_out is not None
            return False
        self._report(place)
        return True

    def _schema(self, value: Any, place: Place) -> Any:
        if self._is_loose and not isinstance(value, dict | bool):
            self._report(place)
            return True
        return self._clean(value, place)

    def _inner(self, value: Any, place: Place) -> Any:
        if isinstance(value, list):
            return [self._clean(each, place.at(number)) for number, each in enumerate(value)]
        return self._clean(value, place)

    def _drop_impossible_names(self, schema: dict[str, Any], path: Place) -> None:
        """Drops names of required properties that are not allowed, as they would allow no object."""
        required, properties = schema.get("required"), schema.get("properties", {})
        if schema.get("additionalProperties") is not False or "patternProperties" in schema or not required:
            return
        if any(name not in properties for name in required):
            self._report(path.at("required"))
            schema["required"] = [name for name in required if name in properties]


def _fault_of(pattern: str, *, of_names: bool = False) -> str:
    """Returns why a keyword cannot be enforced, or nothing if it can."""
    try:
        exact_name(pattern) if of_names else exact_pattern(pattern)
    except ValueError as error:
        return str(error)
    return ""


def _says_nothing(keyword: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if keyword == "format" and isinstance(value, str):
        return _is_noted_format(value, schema)
    if keyword in SAID_WITH:
        return schema.keys().isdisjoint(SAID_WITH[keyword])
    if keyword in ANYTHING:
        return ANYTHING[keyword](value)
    return _is_extension(keyword)


def _is_extension(keyword: str) -> bool:
    return keyword.startswith("x-") and keyword != "x-guidance"


def _is_noted_format(value: str, schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type", "string")
    is_said = "pattern" in schema or "string" not in (kinds if isinstance(kinds, list) else [kinds])
    return value in NOTED_FORMATS or (is_said and value not in ENFORCED_FORMATS)


def _allows_any_name(value: Any) -> bool:
    return value is True or (isinstance(value, dict) and not _without_notes(value))


def _is_false(value: Any) -> bool:
    return value is False


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and not value


def _allows_anything(value: Any) -> bool:
    return value is True or _is_empty(value)


# These keywords say something only together with one of the others.
SAID_WITH = {
    "then": {"if"},
    "else": {"if"},
    "if": {"then", "else"},
    "minContains": {"contains"},
    "maxContains": {"contains"},
}
# With these values a keyword allows anything.
ANYTHING: dict[str, Callable[[Any], bool]] = {
    "propertyNames": _allows_any_name,
    **dict.fromkeys(("uniqueItems", "not"), _is_false),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), _allows_anything),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), _is_empty),
}


def _without_notes(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema of strings without keywords that hold for any string."""
    return {
        keyword: value
        for keyword, value in schema.items()
        if keyword not in NOTES and (keyword, value) != ("type", "string")
    }


def _names_as_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a record's schema with its names as properties, where that means the same."""
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or schema.keys() & {"properties", "patternProperties"}:
        return schema
    value = schema.get("additionalProperties", True)
    match _without_notes(names):
        case {"pattern": str(pattern), **others} if not others:
            by_name = {"patternProperties": {pattern: value}}
        case {"enum": list(choices), **others} if not others and all(
            isinstance(each, str) for each in choices
        ):
            by_name = {"properties": dict.fromkeys(choices, value)}
        case {"const": str(only), **others} if not others:
            by_name = {"properties": {only: value}}
        case _:
            return schema
    rest = {keyword: each for keyword, each in schema.items() if keyword != "propertyNames"}
    return rest | by_name | {"additionalProperties": False}


def _makes_no_sense(keyword: str, value: Any) -> bool:
    return keyword in SENSIBLE and not SENSIBLE[keyword](value)


def _is_type(value: Any) -> bool:
    kinds: list[object] = value if isinstance(value, list) else [value]
    return bool(kinds) and all(isinstance(kind, str) and kind in TYPES for kind in kinds)


def _is_choice(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_schemas(value: Any) -> bool:
    return _is_choice(value) and all(map(_is_schema, value))


def _are_items(value: Any) -> bool:
    return all(map(_is_schema, value if isinstance(value, list) else [value]))


def _is_count(value: Any) -> bool:
    return count_of(value) is not None


def _is_step(value: Any) -> bool:
    return is_number(value) and value > 0


def _is_limit(value: Any) -> bool:
    """Tells whether the value is a number, or a flag as older drafts of the standard have it."""
    return isinstance(value, int | float)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Values of these keywords must be of this form to make sense.
SENSIBLE: dict[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "enum": _is_choice,
    "required": _are_names,
    "items": _are_items,
    "additionalProperties": _is_schema,
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _is_object),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _are_schemas),
    **dict.fromkeys(COUNTS, _is_count),
    **dict.fromkeys(("minimum", "maximum"), is_number),
    "multipleOf": _is_step,
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _is_limit),
    **dict.fromkeys(("pattern", "format", "$ref"), _is_text),
}

"""Lists what a JSON schema demands of values, keyword by keyword, without references and alternatives.

``Demands`` of several schemas that hold together are joined into one, with one list of demands for each type
of value. The module knows nothing of grammars.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from truedraft.engine.text.schema.numbers import (
    Bound,
    Range,
    common_multiple,
    exactly,
    is_beyond,
    is_number,
    is_within,
    tighter,
)
from truedraft.engine.text.schema.place import Place

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ALL_TYPES = frozenset(TYPES) - {"integer"}


class Placed(NamedTuple):
    schema: Any
    place: Place


class Members(NamedTuple):
    """Holds what one schema demands of an object's properties. ``others`` is for names that it does not
    mention."""

    properties: Mapping[str, Placed]
    patterns: Mapping[str, Placed]
    others: Placed | None


class Items(NamedTuple):
    first: tuple[Placed, ...]
    rest: Placed | None


@dataclass(frozen=True, slots=True)
class Demands:
    place: Place
    types: frozenset[str] = ALL_TYPES
    choices: tuple[Any, ...] | None = None
    low: Bound | None = None
    high: Bound | None = None
    multiples: tuple[Any, ...] = ()
    texts: tuple[Mapping[str, Any], ...] = ()  # patterns and formats, under the names of their keywords
    lengths: tuple[int, int | None] = (0, None)
    counts: tuple[int, int | None] = (0, None)
    items: tuple[Items, ...] = ()
    names: tuple[int, int | None] = (0, None)
    members: tuple[Members, ...] = ()
    required: Mapping[str, Place] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Returns the length of the lists that joining goes through."""
        return 1 + len(self.choices or ()) + len(self.members) + len(self.items) + len(self.required)

    def numbers(self) -> Range:
        return Range("number" not in self.types, self.low, self.high, common_multiple(self.multiples))

    def allow(self, value: Any) -> bool:
        """Tells whether a value may be one of the choices; their patterns and members are not examined."""
        kind = type_of(value)
        is_whole = kind == "number" and "integer" in self.types and exactly(value).denominator == 1
        if kind not in self.types and not is_whole:
            return False
        match value:
            case str():
                return _is_between(len(value), self.lengths)
            case list():
                return _is_between(len(value), self.counts)
            case dict():
                return _is_between(len(value), self.names) and self.required.keys() <= value.keys()
            case bool() | None:
                return True
        number = exactly(value)
        return is_within(number, self.low, self.high) and all(number % each == 0 for each in self.multiples)


def type_of(value: Any) -> str:
    kinds = {bool: "boolean", str: "string", list: "array", dict: "object", type(None): "null"}
    return kinds.get(type(value), "number")


def same_value(value: Any) -> object:
    """Returns a hashable value that is equal for values that JSON Schema calls equal, such as 1 and 1.0."""
    if isinstance(value, list):
        return ("array", *map(same_value, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, same_value(each)) for name, each in value.items()))
    return (type_of(value), exactly(value) if is_number(value) else value)


def joined(first: Demands, other: Demands) -> Demands:
    """Returns the demands of both together."""
    choices = first.choices if other.choices is None else other.choices
    if first.choices is not None and other.choices is not None:
        wanted = {same_value(each) for each in other.choices}
        choices = tuple(each for each in first.choices if same_value(each) in wanted)
    return replace(
        first,
        types=_both(first.types, other.types),
        choices=choices,
        low=tighter(first.low, other.low, upper=False),
        high=tighter(first.high, other.high, upper=True),
        multiples=first.multiples + other.multiples,
        texts=first.texts + other.texts,
        lengths=_limits(first.lengths, other.lengths),
        counts=_limits(first.counts, other.counts),
        items=first.items + other.items,
        names=_limits(first.names, other.names),
        members=first.members + other.members,
        required={**first.required, **other.required},
    )


def _both(first: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    shared = first & other
    if "integer" in first | other and {"integer", "number"} & first and {"integer", "number"} & other:
        shared = (shared - {"number"}) | {"integer"}
    return shared


def _limits(first: tuple[int, int | None], other: tuple[int, int | None]) -> tuple[int, int | None]:
    ends = [end for _, end in (first, other) if end is not None]
    return max(first[0], other[0]), min(ends) if ends else None


def _is_between(count: int, limits: tuple[int, int | None]) -> bool:
    return limits[0] <= count and (limits[1] is None or count <= limits[1])


class KeywordError(ValueError):
    """A keyword makes no sense; ``keyword`` names it."""

    def __init__(self, message: str, keyword: str) -> None:
        super().__init__(message)
        self.keyword = keyword


def demands_of(schema: Mapping[str, Any], place: Place) -> Demands:
    """Reads the keywords of one schema except references and alternatives; raises ``KeywordError`` if one
    makes no sense."""
    return Demands(
        place,
        types=_types(schema),
        choices=_choices(schema),
        low=_bound(schema, "minimum", "exclusiveMinimum", upper=False),
        high=_bound(schema, "maximum", "exclusiveMaximum", upper=True),
        multiples=_multiple(schema),
        texts=tuple({name: schema[name]} for name in ("pattern", "format") if name in schema),
        lengths=_counts(schema, "minLength", "maxLength"),
        counts=_counts(schema, "minItems", "maxItems"),
        items=_items(schema, place),
        names=_counts(schema, "minProperties", "maxProperties"),
        members=_members(schema, place),
        required=dict.fromkeys(_list(schema, "required", str), place.at("required")),
    )


def _list(schema: Mapping[str, Any], keyword: str, kind: type | None = None) -> list[Any]:
    value = schema.get(keyword, [])
    if not isinstance(value, list) or (kind and not all(isinstance(each, kind) for each in value)):
        what = "list of names" if kind is str else "list"
        raise KeywordError(f"it is not a {what}", keyword)
    return value


def _object(schema: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    value = schema.get(keyword, {})
    if not isinstance(value, dict):
        raise KeywordError("it is not an object", keyword)
    return value


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    if "type" not in schema:
        return ALL_TYPES
    kinds: list[object] = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for kind in kinds:
        if kind not in TYPES:
            shown = repr(kind)[:50]
            raise KeywordError(f"the type {shown} is none of {', '.join(TYPES)}", "type")
    named = frozenset(str(kind) for kind in kinds)
    return named - {"integer"} if "number" in named else named


def _choices(schema: Mapping[str, Any]) -> tuple[Any, ...] | None:
    choices = _list(schema, "enum") if "enum" in schema else None
    if "const" in schema:
        only = same_value(schema["const"])
        if choices is None or any(same_value(each) == only for each in choices):
            return (schema["const"],)
        return ()
    return None if choices is None else tuple(choices)


def _bound(schema: Mapping[str, Any], keyword: str, strict: str, *, upper: bool) -> Bound | None:
    """Returns the tighter of two bounds; that of draft 4 is strict if a flag says so."""
    found: Bound | None = None
    for name in (keyword, strict):
        value: Any = schema.get(name)
        if name not in schema or (name == strict and isinstance(value, bool)):
            continue
        if value is None or not is_number(value):
            raise KeywordError("it is not a number", name)
        if is_beyond(value):
            if (value > 0) is upper:
                continue
            raise KeywordError("no number that large is written", name)
        try:
            bound = Bound(exactly(value), name == strict or schema.get(strict) is True)
        except ValueError as error:
            raise KeywordError(str(error), name) from None
        found = tighter(found, bound, upper=upper)
    return found


def _multiple(schema: Mapping[str, Any]) -> tuple[Any, ...]:
    if "multipleOf" not in schema:
        return ()
    value = schema["multipleOf"]
    if not is_number(value) or not value > 0 or is_beyond(value):
        raise KeywordError("it is not a number above 0", "multipleOf")
    return (exactly(value),)


def count_of(value: Any) -> int | None:
    """Returns ``value`` as a count, such as 10 for 10.0; None if it is no whole number from 0 on."""
    if not is_number(value) or value < 0 or is_beyond(value) or value != int(value):
        return None
    return int(exactly(value))


def _counts(schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    return _count(schema, least) or 0, _count(schema, most)


def _count(schema: Mapping[str, Any], keyword: str) -> int | None:
    if keyword not in schema:
        return None
    if (count := count_of(schema[keyword])) is None:
        raise KeywordError("it is not a number from 0 on without a fraction", keyword)
    return count


def _items(schema: Mapping[str, Any], place: Place) -> tuple[Items, ...]:
    if not schema.keys() & {"items", "prefixItems"}:
        return ()
    keyword = "prefixItems" if "prefixItems" in schema else "items"
    rest = "items" if "prefixItems" in schema else "additionalItems"
    first: Iterable[Any] = ()
    if keyword == "prefixItems" or isinstance(schema["items"], list):
        first = _list(schema, keyword)
    else:
        rest = "items"
    placed = tuple(Placed(each, place.at(keyword).at(number)) for number, each in enumerate(first))
    return (Items(placed, Placed(schema[rest], place.at(rest)) if rest in schema else None),)


def _members(schema: Mapping[str, Any], place: Place) -> tuple[Members, ...]:
    keywords = ("properties", "patternProperties", "additionalProperties")
    if not schema.keys() & {*keywords}:
        return ()
    by_name, by_pattern = (
        {name: Placed(each, place.at(keyword).at(name)) for name, each in _object(schema, keyword).items()}
        for keyword in keywords[:2]
    )
    others = keywords[2]
    return (
        Members(by_name, by_pattern, Placed(schema[others], place.at(others)) if others in schema else None),
    )

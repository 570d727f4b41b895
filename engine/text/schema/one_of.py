"""Finds ``oneOf`` in a JSON schema whose schemas exclude each other: then it means what ``anyOf`` does.

pydantic writes unions with a discriminator in that way, OpenAPI numbers with titles, and people "one of these
two properties". The module knows nothing of grammars.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from truedraft.engine.text.schema.demands import same_value, type_of

# The first keywords have schemas by name as values, those of the second have values that are no schemas.
NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
VALUES = {"const", "enum", "default", "examples"}
# Each of up to this many branches is compared with each other one.
MOST_COMPARED = 50


def exclusive(branches: Any, root: Any) -> list[Any] | None:
    """Returns schemas that exclude each other, and of which one accepts a value only if exactly one of
    ``branches`` does; None if none are known. ``root`` has the definitions."""
    if not isinstance(branches, list) or not branches:
        return None
    schemas = [_resolved(branch, root) for branch in branches]
    # Two references to one definition do not exclude each other. The rest is no larger than the document.
    if len({*map(id, schemas)}) < len(schemas):
        return None
    if len(schemas) == 1 or _differ_in_values(schemas) or _differ_in_tags(schemas):
        return branches
    return _with_names_of_their_own(branches, schemas)


def _differ_in_values(schemas: Sequence[dict[str, Any]]) -> bool:
    """Tells whether a value's type, or the value itself, decides which schema it may match."""
    free: set[str] = set()  # These are the types of any value.
    listed: list[Any] = []
    for schema in schemas:
        if (values := _values_of(schema)) is not None:
            listed.append(values)
            continue
        kinds = _types_of(schema)
        if kinds is None or not free.isdisjoint(kinds):
            return False
        free |= kinds
    kinds_listed = {type_of(value) for values in listed for value in values}
    return free.isdisjoint(kinds_listed) and _are_disjoint({*map(same_value, values)} for values in listed)


def _differ_in_tags(schemas: Sequence[dict[str, Any]]) -> bool:
    tags = [_tags_of(schema) for schema in schemas]
    shared = set.intersection(*({*each} for each in tags))
    return any(_are_disjoint(each[name] for each in tags) for name in shared)


def _with_names_of_their_own(branches: list[Any], schemas: Sequence[dict[str, Any]]) -> list[Any] | None:
    """Returns each branch without a property that each other one requires."""
    if len(schemas) > MOST_COMPARED:
        return None
    required = [_required_by(schema) for schema in schemas]
    written = []
    for number, (branch, schema) in enumerate(zip(branches, schemas, strict=True)):
        forbidden = {}
        for names in required[:number] + required[number + 1 :]:
            own = [name for name in names if name not in required[number]]
            if not own:
                return None
            declared = schema.get("properties")
            is_declared = declared if isinstance(declared, dict) else {}
            forbidden[min(own, key=lambda name: name in is_declared)] = False
        written.append({"allOf": [branch, {"type": "object", "properties": forbidden}]})
    return written


def _are_disjoint(sets: Iterable[set[object]]) -> bool:
    seen: set[object] = set()
    for values in sets:
        if not seen.isdisjoint(values):
            return False
        seen |= values
    return True


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
    """Returns the definition to which a reference refers; a chain of references is not followed."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        start, _, path = schema["$ref"].partition("/")
        kind, _, name = path.partition("/")
        is_definition = start == "#" and kind in ("$defs", "definitions") and isinstance(root, dict)
        definitions = root.get(kind) if is_definition else None
        schema = definitions.get(name) if isinstance(definitions, dict) else None
    return schema if isinstance(schema, dict) else {}


def _values_of(schema: dict[str, Any]) -> list[Any] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _types_of(schema: dict[str, Any]) -> set[str] | None:
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        return None
    return {"number" if kind == "integer" else kind for kind in kinds}


def _required_by(schema: dict[str, Any]) -> dict[str, None]:
    names = schema.get("required")
    return dict.fromkeys(_texts(names)) if isinstance(names, list) else {}


def _texts(values: list[Any]) -> Iterator[str]:
    return (value for value in values if isinstance(value, str))


def _tags_of(schema: dict[str, Any]) -> dict[str, set[object]]:
    """Returns the values that a required property of an object may be, by its name."""
    properties = schema.get("properties")
    if schema.get("type") != "object" or not isinstance(properties, dict):
        return {}
    required = _required_by(schema)
    found: dict[str, set[object]] = {}
    for name, inner in properties.items():
        values = _values_of(inner) if isinstance(inner, dict) else None
        if name in required and values is not None:
            found[name] = {*map(same_value, values)}
    return found

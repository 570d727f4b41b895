"""``oneOf`` in a JSON schema, where it means what ``anyOf`` does: no value matches two of its schemas.

pydantic writes unions with a discriminator as ``oneOf`` of references, which llguidance refuses.
"""

from collections.abc import Iterable, Sequence
from typing import Any

# Keywords whose values are schemas by name, and those whose values are no schemas.
NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
VALUES = {"const", "enum", "default", "examples"}


def as_any_of(schema: Any, root: Any = None) -> Any:
    """``schema`` with ``anyOf`` for such. ``root`` has its definitions; None: it is the root."""
    root = schema if root is None else root
    if isinstance(schema, list):
        return [as_any_of(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    written: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            written[keyword] = {name: as_any_of(each, root) for name, each in value.items()}
        else:
            written[keyword] = value if keyword in VALUES else as_any_of(value, root)
    branches = schema.get("oneOf")
    if "anyOf" not in schema and isinstance(branches, list) and _exclude_each_other(branches, root):
        written["anyOf"] = written.pop("oneOf")
    return written


def _exclude_each_other(branches: Sequence[Any], root: Any) -> bool:
    """Branches exclude each other by their types, or by a text that a property must be."""
    schemas = [_resolved(branch, root) for branch in branches]
    # Two references to one definition exclude nothing. What is left is no larger than the document.
    if not schemas or len({*map(id, schemas)}) < len(schemas):
        return False
    types = [_type_of(schema) for schema in schemas]
    if None not in types and len({*types}) == len(types):
        return True
    tags = [_tags_of(schema) for schema in schemas]
    shared = set.intersection(*({*each} for each in tags))
    return any(_are_disjoint(each[name] for each in tags) for name in shared)


def _are_disjoint(sets: Iterable[set[str]]) -> bool:
    seen: set[str] = set()
    for texts in sets:
        if not seen.isdisjoint(texts):
            return False
        seen |= texts
    return True


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
    """Returns what a reference to a definition stands for; a chain of references is not followed."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        start, _, path = schema["$ref"].partition("/")
        kind, _, name = path.partition("/")
        is_definition = start == "#" and kind in ("$defs", "definitions") and isinstance(root, dict)
        definitions = root.get(kind) if is_definition else None
        schema = definitions.get(name) if isinstance(definitions, dict) else None
    return schema if isinstance(schema, dict) else {}


def _type_of(schema: dict[str, Any]) -> str | None:
    kind = schema.get("type")
    if not isinstance(kind, str):
        return None
    return "number" if kind == "integer" else kind


def _tags_of(schema: dict[str, Any]) -> dict[str, set[str]]:
    """The texts that a required property of an object may be, by its name."""
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type") != "object" or not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    found: dict[str, set[str]] = {}
    for name, inner in properties.items():
        values = inner.get("enum", [inner.get("const")]) if isinstance(inner, dict) else None
        if name in required and isinstance(values, list) and all(isinstance(each, str) for each in values):
            found[name] = set(values)
    return found

"""Makes requests whose one field is as large as wanted, for every field of every route that takes a body.

A shape says how a field grows: a longer string of some kind, more items, more keys, deeper nesting, a larger
number. A case is a field with a shape.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Fields are looked for in objects within objects, so many levels deep.
DEPTH = 6
MODEL = "tiny-model"
Schema = Mapping[str, Any]
Value = Callable[[int], Any]

# Least bodies that are answered; what a case does not grow is as here.
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/responses": {"model": MODEL, "input": "x", "max_output_tokens": 2},
    "/v1/messages": {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
    "/v1/decisions": {
        "model": MODEL,
        "input": "x",
        "questions": [{"type": "predicate", "instructions": "y"}],
    },
    "/infill": {"model": MODEL, "input_prefix": "x", "n_predict": 2},
    "/api/show": {"model": MODEL},
    "/tokenize": {"model": MODEL, "prompt": "x"},
    "/detokenize": {"model": MODEL, "tokens": [65]},
    "/v1/embeddings": {"model": MODEL, "input": "x"},
    "/v1/rerank": {"model": MODEL, "query": "x", "documents": ["x"]},
    "/v1/score": {"model": MODEL, "text_1": "x", "text_2": "x"},
}
# These ask a model that does not write text.
OF_VECTORS = ("/v1/embeddings", "/v1/rerank", "/v1/score")
# Fields without which another one says nothing, or is refused for its absence.
WITH: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
}

STRINGS: dict[str, Value] = {
    "a word again and again": lambda size: "a b c " * (size // 6),
    "one letter": lambda size: "a" * size,
    "spaces": lambda size: " " * size,
    "special tokens": lambda size: "<|special|>" * (size // 11),
    "wide letters": lambda size: "\u6f22" * (size // 3),
    "quotes and backslashes": lambda size: '\\"' * (size // 4),
    "opened brackets": lambda size: "([{<" * (size // 4),
    "line ends": lambda size: "\u2028\n" * (size // 4),
}
# Where any JSON is allowed, such as a schema, these are tried.
ANY: dict[str, Value] = {
    "many keys": lambda size: {f"k{number}": 1 for number in range(size // 10)},
    "many items": lambda size: [1] * (size // 2),
    "deep lists": lambda size: nested(size // 2, lambda inner: [inner]),
    "a long string": lambda size: "a" * size,
    "many properties": lambda size: {
        "type": "object",
        "properties": {f"p{number}": {"type": "string"} for number in range(size // 28)},
    },
    "many required properties": lambda size: {
        "type": "object",
        "properties": {f"p{number}": {"type": "string"} for number in range(size // 36)},
        "required": [f"p{number}" for number in range(size // 36)],
    },
    "nested properties": lambda size: nested(
        size // 40, lambda inner: {"type": "object", "properties": {"p": inner}}
    ),
    "many choices": lambda size: {"enum": [f"{number:x}" for number in range(size // 8)]},
    "a long pattern": lambda size: {"type": "string", "pattern": "a" * size},
    "a pattern of groups": lambda size: {"type": "string", "pattern": "(a|b)" * (size // 5)},
    "keywords that are ignored": lambda size: {
        "type": "object",
        "properties": {
            "n" * (size // 2): {"properties": {str(n): {"format": "x"} for n in range(size // 40)}}
        },
    },
    "many references": lambda size: {
        "$defs": {"x": {"type": "string"}},
        "anyOf": [{"$ref": "#/$defs/x"}] * (size // 20),
    },
    "alternatives of objects": lambda size: {
        "oneOf": [
            {"type": "object", "properties": {"t": {"const": str(number)}}, "required": ["t"]}
            for number in range(size // 80)
        ]
    },
}


@dataclass(frozen=True)
class Case:
    path: str
    field: str
    shape: str
    body: Value

    @property
    def name(self) -> str:
        return f"{self.path} {self.field}: {self.shape}"

    def content(self, size: int, **more: Any) -> bytes:
        return json.dumps(self.body(size) | more, ensure_ascii=False).encode()


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    """Returns a value of limited depth: JSON readers refuse more, and Python's writer cannot make it."""
    value: Any = 1
    for _ in range(min(depth, 400)):
        value = wrap(value)
    return value


def cases(document: Schema) -> Iterator[Case]:
    """Yields a case for each field and each shape that fits its declaration."""
    for path, base in BASES.items():
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        walk = Walk(document)
        for place, shape, value in walk.values(content["schema"], (), 0):
            if place:
                yield Case(path, ".".join(map(str, place)), shape, grown(base, place, value))
        yield Case(path, "(unknown)", "many keys", unknown(base))


def unknown(base: dict[str, Any]) -> Value:
    return lambda size: base | {f"unknown{number}": 1 for number in range(size // 14)}


def grown(base: dict[str, Any], place: tuple[Any, ...], value: Value) -> Value:
    """Returns a body whose field at ``place`` grows. A place tells, for each level, a key or what is put
    around the rest of it."""

    def body(size: int) -> Any:
        made = value(size)
        for part in reversed(place[1:]):
            made = part.around(made) if isinstance(part, Around) else {part: made}
        return base | WITH.get(place[0], {}) | {place[0]: made}

    return body


@dataclass(frozen=True)
class Around:
    """An object with one field that grows, and the others that it must have; or a list of one item."""

    key: str
    others: tuple[tuple[str, Any], ...] = ()
    is_list: bool = False

    def around(self, value: Any) -> Any:
        return [value] if self.is_list else dict(self.others) | {self.key: value}

    def __str__(self) -> str:
        return "0" if self.is_list else self.key


class Walk:
    """Looks through the schemas of one route; a schema that repeats inside of itself is looked at once."""

    def __init__(self, document: Schema) -> None:
        self._schemas = document["components"]["schemas"]

    def values(
        self, schema: Schema, place: tuple[Any, ...], depth: int, seen: tuple[str, ...] = ()
    ) -> Iterator[tuple[tuple[Any, ...], str, Value]]:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in seen:
                yield from self.values(self._schemas[name], place, depth, (*seen, name))
            return
        if depth > DEPTH:
            return
        for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
            yield from self.values(part, place, depth, seen)
        match schema.get("type"):
            case "string" if not {"enum", "const"} & schema.keys():
                for shape, value in STRINGS.items():
                    yield place, shape, value
            case "integer" | "number":
                yield place, "a number", whole_number(schema)
            case "array":
                yield from self._of_list(schema, place, depth, seen)
            case "object":
                yield from self._of_object(schema, place, depth, seen)
            case None if not {"anyOf", "oneOf", "allOf", "enum", "const"} & schema.keys():
                for shape, value in ANY.items():
                    yield place, shape, value

    def _of_list(
        self, schema: Schema, place: tuple[Any, ...], depth: int, seen: tuple[str, ...]
    ) -> Iterator[tuple[tuple[Any, ...], str, Value]]:
        items = schema.get("items", {})
        for item in self.least_items(items):
            size_of_one = len(json.dumps(item)) + 1
            yield place, f"items like {json.dumps(item)[:40]}", repeated(item, size_of_one)
        yield from self.values(items, (*place, Around("0", is_list=True)), depth + 1, seen)

    def _of_object(
        self, schema: Schema, place: tuple[Any, ...], depth: int, seen: tuple[str, ...]
    ) -> Iterator[tuple[tuple[Any, ...], str, Value]]:
        others = schema.get("additionalProperties")
        if isinstance(others, Mapping):
            item = self.least(others)
            yield place, "many keys", keys(item, len(json.dumps(item)) + 9)
        elif others is True or not schema.get("properties"):
            for shape, value in ANY.items():
                yield place, shape, value
        properties = schema.get("properties", {})
        required = {name: self.least(properties[name]) for name in schema.get("required", ())}
        for name, declared in properties.items():
            more = tuple((each, value) for each, value in required.items() if each != name)
            part = Around(name, more) if place else name
            yield from self.values(declared, (*place, part), depth + 1, seen)

    def least_items(self, schema: Schema) -> list[Any]:
        """Returns a least value of each kind that a list's items may have."""
        if "$ref" in schema:
            return self.least_items(self._schemas[schema["$ref"].rpartition("/")[2]])
        parts = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        return [item for part in parts for item in self.least_items(part)] or [self.least(schema)]

    def least(self, schema: Schema) -> Any:
        """Returns a small value that fits."""
        if "$ref" in schema:
            return self.least(self._schemas[schema["$ref"].rpartition("/")[2]])
        for name in ("anyOf", "oneOf", "allOf"):
            if name in schema:
                return self.least(schema[name][0])
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else schema["enum"][0]
        match schema.get("type"):
            case "string":
                return "x"
            case "integer" | "number":
                return max(1, int(schema.get("minimum", 1)))
            case "boolean":
                return True
            case "array":
                return [self.least(schema.get("items", {}))]
            case "object":
                properties = schema.get("properties", {})
                return {name: self.least(properties[name]) for name in schema.get("required", ())}
            case _:
                return {}


def repeated(item: Any, size_of_one: int) -> Value:
    return lambda size: [item] * max(1, size // size_of_one)


def keys(item: Any, size_of_one: int) -> Value:
    return lambda size: {str(number): item for number in range(size // size_of_one)}


def whole_number(schema: Schema) -> Value:
    """Returns a number that grows with the size, within the declared bounds."""
    most = min(schema.get("maximum", 1 << 30), schema.get("exclusiveMaximum", 1 << 30))

    def value(size: int) -> float:
        return max(schema.get("minimum", 0), min(most, size // 64))

    return value


# Answers that grow: with what is asked of them, and with the number of choices.
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "a text": ("/v1/completions", {}),
    "log-probabilities": ("/v1/completions", {"logprobs": 5}),
    "origins": ("/v1/completions", {"speculation": {"origins": True}}),
    "usage with each event": (
        "/v1/completions",
        {"n": 16, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "text that is held": (
        "/v1/completions",
        {"stop": ["Hello, w\u00f6rld \U0001f600! " * 400 + "!"], "logprobs": 1},
    ),
    "a chat": ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 5}),
    "a response": ("/v1/responses", {"include": ["message.output_text.logprobs"], "top_logprobs": 5}),
    "a message": ("/v1/messages", {}),
}


def answers() -> Iterator[Case]:
    for name, (path, asked) in ASKED.items():
        for stream in (False, True):
            more = {key: value for key, value in asked.items() if stream or key != "stream_options"}
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            yield Case(
                path, f"{limit}, stream {stream}", name, answer(path, limit, more | {"stream": stream})
            )


def answer(path: str, limit: str, asked: dict[str, Any]) -> Value:
    return lambda size: BASES[path] | asked | {limit: size // (8 * asked.get("n", 1))}

"""``oneOf`` becomes ``anyOf`` where both mean the same, and stays otherwise."""

import itertools
import json
import tracemalloc
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from tests.server.schema_texts import accepts
from truedraft.engine.text.schema.one_of import exclusive


class Cat(BaseModel):
    kind: Literal["cat", "tiger"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Owner(BaseModel):
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]


def tagged(tag: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"t": {"const": tag}}, "required": ["t"]} | more


def test_unions_with_a_discriminator() -> None:
    schema = Owner.model_json_schema()
    assert "oneOf" in schema["properties"]["pets"]["items"]
    assert accepts(schema, '{"pets":[{"kind":"dog","name":"Rex"},{"kind":"tiger","lives":1}]}')
    assert not accepts(schema, '{"pets":[{"kind":"dog","lives":1}]}')


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "string"}, {"type": "integer"}, {"type": "null"}],
        [tagged("a"), tagged("b", properties={"t": {"enum": ["b", "c"]}})],
        [{"$ref": "#/$defs/a"}, tagged("b")],
        [{"const": 1, "title": "one"}, {"const": 2}],
        [{"const": 1}, {"const": True}, {"enum": [None, "1", 2.5]}, {"type": "object"}],
        [tagged(1), tagged(True), tagged(None)],
        [{"type": ["string", "null"]}, {"type": "integer"}],
        [{}],
    ],
)
def test_what_excludes_each_other(branches: list[Any]) -> None:
    definitions = {"$defs": {"a": tagged("a")}}
    assert exclusive(branches, definitions) == branches
    for value in ("x", 1, True, 2.5, None, {"t": "a"}, {"t": "b"}, {"t": "c"}, {"t": "d"}, {}, []):
        one, other = ({keyword: branches} | definitions for keyword in ("oneOf", "anyOf"))
        assert Draft202012Validator(one).is_valid(value) is Draft202012Validator(other).is_valid(value)


def test_a_definition_that_is_referred_to_often_is_read_once() -> None:
    """A small body with a thousand references to a long list of texts."""
    texts = [f"{number:x}" for number in range(5200)]
    schema = {
        "oneOf": [{"$ref": "#/$defs/x"}] * 1000,
        "$defs": {"x": tagged("a", properties={"t": {"enum": texts}})},
    }
    tracemalloc.start()
    try:
        assert exclusive(schema["oneOf"], schema) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000


@pytest.mark.parametrize(
    "branches",
    [
        [{"required": ["a"]}, {"required": ["b"]}],
        [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c", "d"]}],
        [
            {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"required": ["b"], "type": "object"},
        ],
    ],
)
def test_properties_of_which_one_is_there(branches: list[Any]) -> None:
    """What is let through is valid, and each branch by itself is let through."""
    texts = [
        json.dumps(dict.fromkeys(names, 1), separators=(",", ":"))
        for count in range(5)
        for names in itertools.combinations("abcd", count)
    ]
    schema = {"oneOf": branches}
    written = [text for text in texts if accepts(schema, text)]
    valid = [text for text in texts if Draft202012Validator(schema).is_valid(json.loads(text))]
    assert {*written} <= {*valid}
    assert all(any(name in text for text in written) for name in "ab")
    assert not accepts(schema, "1"), "both branches let it through, and so it is not valid"


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "number"}, {"type": "integer"}],
        [tagged("a"), tagged("a")],
        [tagged("a"), tagged("b", required=[])],
        [tagged("a"), {**tagged("b"), "type": ["object", "null"]}],
        [tagged(1), tagged(1.0)],
        [{"const": 1}, {"enum": [2, 1.0]}],
        [{"required": ["a"]}, {"required": ["a", "b"]}],
        [{"enum": ["a"]}, {"type": "string"}],
        [{"type": "string"}, {}],
        [{"$ref": "#/$defs/none"}, tagged("b")],
        [{"$ref": "other"}, tagged("b")],
        [tagged("a"), True],
        [],
        "no list",
    ],
)
def test_what_may_not(branches: Any) -> None:
    assert exclusive(branches, {"$defs": 1}) is None

"""``oneOf`` becomes ``anyOf`` where both mean the same, and stays otherwise."""

import tracemalloc
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, Field

from truedraft.engine.text.schema.one_of import as_any_of
from truedraft.engine.text.schema.pattern import read_schema


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
    grammar = LLMatcher.grammar_from_json_schema(read_schema(schema), defaults={"whitespace_flexible": False})
    tokenizer = LLTokenizer("byte")
    for text, is_valid in (
        ('{"pets":[{"kind":"dog","name":"Rex"},{"kind":"tiger","lives":1}]}', True),
        ('{"pets":[{"kind":"dog","lives":1}]}', False),
    ):
        matcher, ids = LLMatcher(tokenizer, grammar, log_level=0), [*text.encode()]
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is is_valid


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "string"}, {"type": "integer"}, {"type": "null"}],
        [tagged("a"), tagged("b", properties={"t": {"enum": ["b", "c"]}})],
        [{"$ref": "#/$defs/a"}, tagged("b")],
    ],
)
@pytest.mark.parametrize(
    "wrap", [lambda inner: inner, lambda inner: {"items": {"properties": {"oneOf": inner}}}]
)
def test_what_excludes_each_other(branches: list[Any], wrap: Any) -> None:
    definitions = {"$defs": {"a": tagged("a")}}
    found = as_any_of(wrap({"oneOf": branches}) | definitions)
    assert found == wrap({"anyOf": branches}) | definitions
    for value in ("x", 1, None, {"t": "a"}, {"t": "b"}, {"t": "c"}, {"t": "d"}, {}, []):
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
        assert as_any_of(schema) == schema
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "number"}, {"type": "integer"}],
        [tagged("a"), tagged("a")],
        [tagged("a"), tagged("b", required=[])],
        [tagged("a"), {**tagged("b"), "type": ["object", "null"]}],
        [tagged(1), tagged(True)],
        [{"type": "string"}, {}],
        [{"$ref": "#/$defs/none"}, tagged("b")],
        [{"$ref": "other"}, tagged("b")],
        [tagged("a"), True],
        [],
        "no list",
    ],
)
def test_what_may_not(branches: Any) -> None:
    assert as_any_of([{"oneOf": branches, "$defs": 1}]) == [{"oneOf": branches, "$defs": 1}]
    for schema in ({"oneOf": branches}, {"const": {"oneOf": [{"type": "string"}, {"type": "null"}]}}):
        assert as_any_of(schema) == schema

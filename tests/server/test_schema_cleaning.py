"""Schemas as libraries write them: what says nothing is dropped, what cannot be enforced is reported."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from tests.server.refusals import CHAT, COMPLETIONS, refused
from tests.server.running import RunningServer
from tests.server.schema_texts import accepts
from tests.server.test_tools import TEMPLATE, flat, saying, tool
from truedraft.engine.text.schema.cleaning import Cleaner, SchemaError
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.tools import FunctionDefinition
from truedraft.server.text.families import CALL_FORMATS
from truedraft.server.text.grammar.tool_calls import Function, arguments_schema, call_grammar
from truedraft.server.text.grammar.tool_schemas import cleaned as cleaned_tool

RESPONSES = "/v1/responses"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
INTEGER = {"type": "integer"}
NOTED = {"title": "A", "description": "x" * 1000, "default": None, "examples": [1], "x-order": 1}


def cleaned(schema: Any, **options: Any) -> tuple[Any, list[str]]:
    left_out: list[str] = []
    return Cleaner(lambda place: left_out.append(str(place)), **options).clean(schema, "s"), left_out


def test_notes_are_dropped_and_names_are_not() -> None:
    inner = {"type": "string", "enum": ["title", "default"], "const": "default"}
    schema = {"type": "object", "properties": dict.fromkeys(NOTED, inner), "required": [*NOTED]}
    noted = {**schema, **NOTED, "properties": dict.fromkeys(NOTED, inner | NOTED)}
    assert cleaned(noted) == (schema, [])
    assert cleaned(noted, loose=True) == (schema, [])
    kept = {"x-guidance": {"whitespace_flexible": True}, "const": {"title": 1}, "items": {}}
    assert cleaned(kept) == (kept, [])


@pytest.mark.parametrize(
    "nothing",
    [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {}},
        {"propertyNames": True},
        {"uniqueItems": False},
        {"unevaluatedProperties": True},
        {"dependentRequired": {}},
        {"then": {"type": "string"}},
        {"if": {"type": "string"}},
        {"minContains": 1},
        {"not": False},
        {"type": "string", "format": "binary"},
        {"type": "integer", "format": "int64"},
        {"type": "integer", "format": "odd"},
        {"type": "string", "format": "starts_with", "pattern": "^a"},
    ],
)
def test_what_says_nothing(nothing: dict[str, Any]) -> None:
    """It has the same valid values without, says the reference, and is dropped where all else is strict."""
    schema = Cleaner(None).clean(nothing, "s")
    assert schema.items() < nothing.items()
    for value in ({}, {"a": 1}, [1, 1], [], "a", "b", 1, None):
        assert Draft202012Validator(schema).is_valid(value) == Draft202012Validator(nothing).is_valid(value)


@pytest.mark.parametrize(
    "record",
    [
        {
            "propertyNames": {"type": "string", "pattern": "^[a-c]+$"},
            "additionalProperties": {"type": "integer"},
        },
        {"propertyNames": {"pattern": "^a"}},
        {
            "propertyNames": {"enum": ["a", "b"]},
            "additionalProperties": {"type": "integer"},
            "required": ["a"],
        },
        {"propertyNames": {"const": "a", "description": "x"}, "additionalProperties": INTEGER},
    ],
)
def test_records_with_names(record: dict[str, Any]) -> None:
    """zod writes such schemas; each text is accepted exactly if it is valid."""
    record = {"type": "object"} | record
    schema, left_out = cleaned(record)
    assert left_out == []
    texts = [
        "{}",
        '{"a":1}',
        '{"a":"x"}',
        '{"b":1}',
        '{"a":1,"b":2}',
        '{"d":1}',
        '{"abc":1}',
        '{"a":1,"d":1}',
    ]
    expected = [Draft202012Validator(record).is_valid(json.loads(text)) for text in texts]
    assert [accepts(schema, text) for text in texts] == expected
    assert len({*expected}) == 2


LOOKAHEAD = {"type": "string", "pattern": "^(?!x)y"}


@pytest.mark.parametrize(
    "pattern", ["^(?!x)y", r"\bword\b", "(?i)a", r"(a)\1", "a++", "(?<=a)b", "[]a]", "a{,2}", r"\Z"]
)
def test_patterns_that_cannot_be_enforced(pattern: str) -> None:
    schema = {"properties": {"a": {"type": "string", "minLength": 1, "pattern": pattern}}}
    assert cleaned(schema) == (
        {"properties": {"a": {"type": "string", "minLength": 1}}},
        ["s.properties.a.pattern"],
    )
    with pytest.raises(SchemaError) as raised:
        Cleaner(None).clean(schema, "s")
    assert raised.value.place == "s.properties.a.pattern"
    names, left_out = cleaned({"patternProperties": {pattern: {}, "^b": {}}})
    assert (names, left_out) == ({"patternProperties": {"^b": {}}}, [f"s.patternProperties.{pattern}"])


def test_patterns_that_can_stay() -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "^[a-z]+$", "format": "email"}}}
    assert cleaned(schema) == (schema, [])
    assert Cleaner(None).clean(schema, "s") == schema
    assert cleaned(schema, patterns=False)[1] == ["s.properties.a.pattern"]


ODD: list[dict[str, Any]] = [
    {"type": "str"},
    {"type": ["string", "any"]},
    {"type": []},
    {"properties": []},
    {"properties": "none"},
    {"required": True},
    {"required": ["a", 1]},
    {"enum": []},
    {"anyOf": []},
    {"allOf": [{"type": "string"}, "x"]},
    {"items": "string"},
    {"additionalProperties": "no"},
    {"minLength": "5"},
    {"minimum": "1"},
    {"maxItems": -1},
    {"pattern": 5},
    {"format": ["email"]},
    {"$ref": 5},
    {"not": {"type": "string"}},
    {"uniqueItems": True},
    {"contains": {}},
    {"dependentRequired": {"a": ["b"]}},
    {"propertyNames": {"maxLength": 5}},
    {"format": "idn-email"},
]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_loose_schemas_lose_what_makes_no_sense(odd: dict[str, Any]) -> None:
    ((keyword, _),) = odd.items()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": odd}, "required": ["a"]}
    written, left_out = cleaned(schema, loose=True)
    assert written == {**schema, "properties": {"a": {"type": "integer"}, "b": {}}}
    assert left_out == [f"s.properties.b.{keyword}"]
    assert accepts(written | {"additionalProperties": False}, '{"a":1,"b":"x"}')


def test_loose_schemas_lose_nulls_and_names_that_cannot_be() -> None:
    written, left_out = cleaned({"type": None, "items": None, "const": None}, loose=True)
    assert (written, left_out) == ({"const": None}, [])
    closed = {"properties": {"a": {}}, "required": ["a", "q"], "additionalProperties": False}
    assert cleaned(closed, loose=True) == (closed | {"required": ["a"]}, ["s.required"])
    assert cleaned({"properties": {"a": "text"}}, loose=True) == (
        {"properties": {"a": True}},
        ["s.properties.a"],
    )


def test_required_names_are_declared() -> None:
    parameters = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["q", "b"]}
    schema = arguments_schema(FunctionDefinition(name="f", parameters=parameters))
    assert [*schema["properties"]] == ["b", "q"]
    assert accepts(schema, '{"b":1,"q":[2]}')
    assert not accepts(schema, '{"b":1}')
    assert not accepts(schema, '{"b":1,"q":2,"r":3}')


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with saying(tmp_path_factory.mktemp, "Well.", TEMPLATE) as running:
        yield running


class Order(BaseModel):
    raw: bytes
    tags: set[str] = Field(description="x" * 500)


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
NO_NUMBER = {"type": "integer", "minimum": 5, "maximum": 2}

# Libraries and servers of tools write these; each stands with what is reported of it.
TOOLS: list[tuple[dict[str, Any], list[str]]] = [
    (Order.model_json_schema(), ["properties.tags.uniqueItems"]),
    (
        {"properties": {"price": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}}},
        ["properties.price.anyOf.1.pattern"],
    ),
    (
        {"properties": {"mail": {"type": "string", "format": "email", "pattern": r"^(?!\.)a"}}},
        ["properties.mail.pattern"],
    ),
    ({"type": "object", "required": ["q"]}, []),
    ({"type": "object", "properties": {}, "required": ["q"]}, []),
    ({"type": "object", "properties": None, "required": None}, []),
    ({"type": ["object", "null"], "properties": {"a": {"type": "string"}}}, []),
    ({}, []),
    ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(a"}}}, ["properties.a.pattern"]),
    (
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "[z-a]"}}},
        ["properties.a.pattern"],
    ),
    ({"type": "object", "properties": {"a": NO_NUMBER}}, []),
    ({"type": "object", "properties": {"a": NO_NUMBER}, "required": ["a"]}, [""]),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, ["properties.a.$ref"]),
    ({"type": "array", "items": {}}, [""]),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, [""]),
    (
        {"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}, {"minLength": 1}]}}},
        ["properties.a.oneOf"],
    ),
    ({"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}, {"type": "null"}]}}}, []),
]


@pytest.mark.parametrize(("parameters", "left_out"), TOOLS, ids=range(len(TOOLS)))
def test_one_odd_tool_does_not_cost_the_request(
    calling: RunningServer, parameters: dict[str, Any], left_out: list[str]
) -> None:
    fine = tool("fine", parameters={"type": "object", "properties": {"city": {"type": "string"}}})
    place = "tools.2.function.parameters"
    for choice in ("auto", "required", {"type": "function", "function": {"name": "odd"}}):
        tools = {"tools": [{"type": "web_search"}, fine, tool("odd", parameters=parameters)]}
        num_before = len(calling.messages_to_worker("Generate"))
        response = calling.post(CHAT, ASK | tools | {"tool_choice": choice})
        assert response.status_code == 200, response.text
        names = ["tools.0", *(f"{place}.{name}".rstrip(".") for name in left_out)]
        assert response.headers["x-truedraft-ignored"].split(", ") == names
        (line,) = calling.messages_to_worker("Generate")[num_before:]
        assert '"odd' in line
        assert ('"fine' in line) is (choice in ("auto", "required"))


LIMITED = {"type": "string", "pattern": "^a", "format": "email", "maxLength": 5, "odd": 1}
ALL_OF = {"allOf": [{"type": "string"}], "minProperties": 1}


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("hermes", []),
        ("qwen_tags", ["a.format", "a.pattern"]),
        ("gemma4", ["a.pattern", "a.format"]),
    ],
)
def test_what_a_family_cannot_write_is_reported(name: str, left_out: list[str]) -> None:
    form = next(form for form in CALL_FORMATS if form.name == name)
    parameters = {"type": "object", "properties": {"a": LIMITED, "b": ALL_OF}}
    leniency = Leniency(strict=False)
    function = cleaned_tool(FunctionDefinition(name="f", parameters=parameters), "p", form, leniency)
    reported = leniency.headers().get("x-truedraft-ignored", "")
    assert reported.split(", ") == ([f"p.properties.{place}" for place in left_out] or [""])
    ids = {form.quote: 1, form.end.removeprefix("}"): 2} if form.quote else {}
    grammar = call_grammar([Function(function)], form, ids, required=True, parallel=False)
    assert "5" in str(grammar)  # the length is still enforced


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"type": "object", "properties": {"a": LOOKAHEAD}}, ".properties.a.pattern"),
        (
            {"type": "object", "properties": {"a": {"type": "string", "format": "odd"}}},
            ".properties.a.format",
        ),
        ({"type": "object", "properties": {"a": {"uniqueItems": True}}}, ".properties.a.uniqueItems"),
        (
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a"}}},
            ".properties.a.pattern",
        ),
        ({"type": "array"}, ""),
        ({"type": "object", "properties": 5}, ".properties"),
        ({"type": "object", "properties": {}, "required": ["q"], "additionalProperties": False}, ""),
    ],
)
def test_a_strict_tool_is_refused_by_its_place(
    calling: RunningServer, parameters: dict[str, Any], place: str
) -> None:
    tools: list[dict[str, Any]] = [tool("one"), {"type": "web_search"}, tool("two")]
    tools.append(tool("odd", parameters=parameters, strict=True))
    error = refused(calling, CHAT, ASK | {"tools": tools})
    assert (error["param"], error["code"]) == (f"tools.3.function.parameters{place}", "invalid_grammar")
    assert "'odd'" in error["message"]
    fields = {"input": "x", "tools": [flat("one"), flat("odd", parameters=parameters, strict=True)]}
    assert refused(calling, RESPONSES, fields)["param"] == f"tools.1.parameters{place}"


def test_many_odd_tools(calling: RunningServer) -> None:
    """A keyword that makes no sense, or that nothing satisfies, is found without the compiler."""
    for odd in ({"$ref": "#/$defs/none"}, {"type": "string", "minLength": 5, "maxLength": 2}):
        parameters = {"type": "object", "properties": {"a": odd}, "required": ["a"]}
        tools = [tool(f"t{i}", parameters=parameters) for i in range(30)]
        assert calling.post(CHAT, ASK | {"tools": tools}).status_code == 200


def test_many_slow_tools_are_too_many(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Finding out about each takes the whole ``grammar_timeout``."""
    patterns = [{"pattern": f"{'a' * i}b{'c' * i}"} for i in range(30)]
    slow = {"type": "object", "properties": {"a": {"type": "string", "allOf": patterns}}, "required": ["a"]}
    with saying(tmp_path_factory.mktemp, "Well.", TEMPLATE, grammar_timeout=0.05) as calling:
        for number, status in ((8, 200), (9, 400)):
            tools = [tool(f"t{i}", parameters=slow) for i in range(number)]
            assert calling.post(CHAT, ASK | {"tools": tools}).status_code == status


def test_descriptions_of_tools_do_not_count(calling: RunningServer) -> None:
    described = {"type": "string", "description": "y" * 300, "examples": ["z" * 100]}
    parameters = {"type": "object", "properties": {f"p{i}": described for i in range(8)}}
    tools = [tool(f"t{i}", description="x" * 1000, parameters=parameters) for i in range(80)]
    assert len(json.dumps(tools)) > 4 * 65536
    response = calling.post(CHAT, ASK | {"tools": tools})
    assert response.status_code == 200, response.text
    large = tool("large", parameters={"type": "object", "properties": {f"p{i}": {} for i in range(40_000)}})
    error = refused(calling, CHAT, ASK | {"tools": [large]})
    assert "max_grammar_size" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        ({"type": "object", "properties": {"a": LOOKAHEAD}}, ".properties.a.pattern"),
        ({"items": {"type": "string", "pattern": "(a"}}, ".items.pattern"),
        ({"type": "string", "format": "odd"}, ".format"),
        ({"type": "object", "propertyNames": {"type": "string"}, "description": "x" * 70_000}, ""),
        ({"type": "string", "format": "starts_with", "pattern": "^a"}, ""),
        (Order.model_json_schema() | {"properties": {"raw": {"type": "string", "format": "binary"}}}, ""),
    ],
)
def test_response_formats_of_libraries(
    server: RunningServer, path: str, schema: dict[str, Any], left_out: str
) -> None:
    place = "text.format.schema" if path == RESPONSES else "response_format.json_schema.schema"

    def asking(**more: Any) -> dict[str, Any]:
        named = {"name": "a.b[c]", "schema": schema, **more}
        if path == RESPONSES:
            return {"input": "x", "text": {"format": {"type": "json_schema"} | named}}
        prompt: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else ASK
        return prompt | {"response_format": {"type": "json_schema", "json_schema": named}}

    response = server.post(path, asking())
    assert response.status_code == 200, response.text
    assert response.headers.get("x-truedraft-ignored", "") == (f"{place}{left_out}" if left_out else "")
    if left_out:
        error = refused(server, path, asking(strict=True))
        assert error["code"] == "invalid_grammar"
        assert error["param"] in (place, f"{place}{left_out}")
    else:
        assert server.post(path, asking(strict=True)).status_code == 200


def test_what_is_asked_for_by_its_own_name_is_strict(server: RunningServer) -> None:
    for schema in (LOOKAHEAD, {"type": "string", "format": "odd"}, {"uniqueItems": True}):
        error = refused(server, COMPLETIONS, {"prompt": "x", "structured_outputs": {"json": schema}})
        assert error["param"].startswith("structured_outputs.json")

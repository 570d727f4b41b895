"""What a structured output may be, and what is refused before the engine sees it."""

import json
from typing import Any

import pytest

from tests.server.conftest import StartServer
from tests.server.running import RunningServer

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 4},
    RESPONSES: {"input": "Hi", "max_output_tokens": 4},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def formats(schema: object) -> dict[str, dict[str, Any]]:
    named = {"name": "it", "schema": schema}
    nested = {"response_format": {"type": "json_schema", "json_schema": named}}
    return {
        CHAT: nested,
        COMPLETIONS: nested,
        RESPONSES: {"text": {"format": {"type": "json_schema", **named}}},
    }


def error_of(server: RunningServer, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, PROMPTS[path] | fields)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(
    "asked",
    [
        {"json": SCHEMA},
        {"json": json.dumps(SCHEMA)},
        {"regex": "a+"},
        {"choice": ["a"]},
        {"grammar": 'start: "a"'},
    ],
)
def test_structured_outputs_on_every_endpoint(
    server: RunningServer, path: str, asked: dict[str, Any]
) -> None:
    response = server.post(path, PROMPTS[path] | {"structured_outputs": asked})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", PROMPTS)
def test_formats_on_every_endpoint(server: RunningServer, path: str) -> None:
    assert server.post(path, PROMPTS[path] | formats(SCHEMA)[path]).status_code == 200
    field = "text" if path == RESPONSES else "response_format"
    for kind in ("text", "json_object"):
        asked = {"format": {"type": kind}} if path == RESPONSES else {"type": kind}
        response = server.post(path, PROMPTS[path] | {field: asked})
        assert response.status_code == 200, response.text
        if path == RESPONSES:
            assert response.json()["text"] == asked


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        ({"type": "object", "contains": {}, "not": {}}, ".contains", "'contains' is not supported"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "", "no number lies between"),
        ({"$ref": "#/$defs/nowhere"}, ".$ref", "does not exist"),
        ({"type": "strin"}, ".type", "'strin' is none of null, boolean"),
        ({"properties": {"a": {"uniqueItems": True}}}, ".properties.a.uniqueItems", "not supported"),
        ({"items": {"oneOf": [{}, {"type": "null"}]}}, ".items.oneOf", "use anyOf"),
        ({"required": "a"}, ".required", "not a list of names"),
        ({"items": {"allOf": [{"maxLength": "5"}]}}, ".items.allOf.0.maxLength", "not a number from 0 on"),
    ],
)
def test_schemas_are_refused_with_the_reason(
    server: RunningServer, path: str, schema: object, place: str, reason: str
) -> None:
    error = error_of(server, path, formats(schema)[path])
    param = "text.format.schema" if path == RESPONSES else "response_format.json_schema.schema"
    assert (error["param"], error["code"]) == (f"{param}{place}", "invalid_grammar")
    assert reason in error["message"]
    assert not any(word in error["message"] for word in ("coerce", "llguidance", "%json"))


def test_strings_that_nothing_matches(server: RunningServer) -> None:
    """One of several alternatives is left out; the only one is refused by its place, or loses its pattern."""
    none = {"type": "string", "pattern": "^a{3}$", "maxLength": 2}
    only, some = {"type": "array", "minItems": 1, "items": none}, {"anyOf": [none, {"type": "null"}]}
    error = error_of(server, CHAT, {"structured_outputs": {"json": only}})
    assert error["param"] == "structured_outputs.json.items"
    assert "nothing satisfies it" in error["message"]
    response = server.post(CHAT, PROMPTS[CHAT] | {"structured_outputs": {"json": some}})
    assert response.status_code == 200, response.text
    response = server.post(CHAT, PROMPTS[CHAT] | formats(only)[CHAT])
    ignored = "response_format.json_schema.schema.items.pattern"
    assert (response.status_code, response.headers["x-truedraft-ignored"]) == (200, ignored)


@pytest.mark.parametrize(
    ("asked", "param", "code"),
    [
        ({"regex": "(a"}, "regex", "invalid_grammar"),
        ({"regex": "(?=a)b"}, "regex", "invalid_grammar"),
        ({"grammar": "start: nothing"}, "grammar", "invalid_grammar"),
        ({"grammar": ""}, "grammar", "invalid_grammar"),
        ({"json": "{"}, "json", "invalid_grammar"),
        ({"json": "[1]"}, "json", "invalid_grammar"),
        ({"json": [1]}, "json", "invalid_type"),
        ({"choice": []}, "choice", "invalid_value"),
        ({"choice": [1]}, "choice.0", "invalid_type"),
        ({"regex": "a", "choice": ["b"]}, "", "invalid_value"),
        ({}, "", "invalid_value"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern", "unsupported_parameter"),
    ],
)
def test_structured_outputs_are_refused(
    server: RunningServer, asked: dict[str, Any], param: str, code: str
) -> None:
    error = error_of(server, COMPLETIONS, {"structured_outputs": asked})
    assert (error["param"], error["code"]) == (f"structured_outputs.{param}".rstrip("."), code)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"min_tokens": 2}, "min_tokens", "unsupported_parameter"),
        ({"ignore_eos": True}, "ignore_eos", "unsupported_parameter"),
        ({"structured_outputs": {"regex": "a"}}, "response_format", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format", "invalid_type"),
        ({"response_format": "json"}, "response_format", "invalid_type"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "missing_required_parameter",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
            "response_format.schema",
            "unsupported_parameter",
        ),
    ],
)
def test_what_excludes_a_format(server: RunningServer, fields: dict[str, Any], param: str, code: str) -> None:
    error = error_of(server, CHAT, {"response_format": {"type": "json_object"}} | fields)
    assert (error["param"], error["code"]) == (param, code)


def test_method_grammar_needs_a_format(server: RunningServer) -> None:
    error = error_of(server, CHAT, {"speculation": {"method": "grammar"}})
    assert error["param"] == "speculation.method"


def test_limits(start_server: StartServer) -> None:
    with start_server(grammar_timeout=0.2) as server:
        error = error_of(server, CHAT, {"structured_outputs": {"grammar": intersection(30)}})
        assert "more than 0.2 seconds (grammar_timeout)" in error["message"]
    with start_server(max_grammar_size=20) as server:
        error = error_of(server, CHAT, {"structured_outputs": {"choice": ["x" * 30]}})
        assert "max_grammar_size" in error["message"]
        fields = {"structured_outputs": {"choice": ["x" * 3]}}
        assert server.post(CHAT, PROMPTS[CHAT] | fields).status_code == 200


def intersection(count: int) -> str:
    """Returns a grammar of ``count`` expressions, of which llguidance makes exponentially many."""
    terms = " & ".join(rf"/(.|\n)*{'a' * i}b{'c' * i}(.|\n)*/" for i in range(count))
    return f"start: T\nT: ({terms}) | /[abc]*/"


PRODUCT = [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in "ab"]} for i in range(99)]


def many_rules(count: int) -> str:
    return "".join(f"r{i}:r{i + 1}\n" for i in range(count))


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"grammar": f'start: r0\n{many_rules(5000)}r5000: "a"'}, 200),
        ({"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}, 400),
        ({"regex": "(" * 30_000 + "a" + ")" * 30_000}, 400),
        ({"json": "[" * 60_000}, 400),
        ({"json": {"$ref": "#"}}, 400),
        ({"json": {"allOf": PRODUCT}}, 400),
        ({"grammar": intersection(4)}, 200),
        ({"grammar": intersection(30)}, 400),
    ],
    ids=["chain of rules", "parentheses", "groups", "brackets", "itself", "product", *["intersection"] * 2],
)
def test_hostile_grammars(server: RunningServer, asked: dict[str, Any], status: int) -> None:
    """They are read or refused; in either case the server goes on."""
    response = server.post(COMPLETIONS, PROMPTS[COMPLETIONS] | {"structured_outputs": asked})
    assert response.status_code == status, response.text
    assert server.post(COMPLETIONS, PROMPTS[COMPLETIONS]).status_code == 200

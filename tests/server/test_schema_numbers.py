"""Schemas to the digit: numbers, ends, bounds, days, and schemas that nothing satisfies.

Whatever a schema's grammar lets through is valid with every number as its digits say, and what is valid is
let through, apart from the narrowing that the documentation states.
"""

import datetime
import json
import random
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.running import MODEL, RunningServer
from tests.server.schema_texts import accepts, allows, drawn, is_valid, matcher_of
from tests.server.test_tools import TEMPLATE, saying
from truedraft.engine.text.schema import demands, numbers, times, writer
from truedraft.engine.text.schema.cleaning import SchemaError
from truedraft.engine.text.schema.formats import grammar_of
from truedraft.engine.text.schema.numbers import WrittenFloat, read_json

SNOWFLAKE, MOST_OF_64 = 1234567890123456789, 2**63 - 1
CONSTANTS = [
    "1234567890123456789",
    "9007199254740993",
    "18446744073709551615",
    "-9223372036854775808",
    "9223372036854775808",
    "123456789.12345679",
    "0.1000000000000000055511151231257827",
    "100000000000000000000",
    "1e300",
    "1.0",
    "-0.0",
    '[1234567890123456789,{"a":9007199254740993}]',
]


@pytest.mark.parametrize("text", CONSTANTS)
@pytest.mark.parametrize("form", ['{"const": %s}', '{"enum": [%s, "x"]}', '{"allOf": [{"const": %s}, {}]}'])
def test_constants_keep_their_text(text: str, form: str) -> None:
    schema = form % text
    matcher = matcher_of(schema)
    assert allows(matcher, text)
    texts = {drawn(matcher, random.Random(seed)) for seed in range(20)}
    assert texts <= {text, '"x"'}


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"enum": [2**53 + 1, 2**53 + 3]}, {str(2**53 + 1), str(2**53 + 3)}),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, {str(2**53 + 1)}),
        ({"enum": [1, 1.0, True], "type": "integer"}, {"1", "1.0"}),
        ({"enum": [1, True, "1", None], "type": ["boolean", "string"]}, {"true", '"1"'}),
        ({"enum": ["a", "b", "ab", 1], "pattern": "^a"}, {'"a"', '"ab"', "1"}),
        ({"enum": [SNOWFLAKE, SNOWFLAKE + 1], "exclusiveMinimum": SNOWFLAKE}, {str(SNOWFLAKE + 1)}),
        ({"type": "integer", "exclusiveMinimum": 2.5, "exclusiveMaximum": 4}, {"3"}),
        ({"type": "integer", "minimum": 10**20, "maximum": 10**20}, {str(10**20)}),
        ({"type": "integer", "minimum": 0, "maximum": 20, "multipleOf": 7}, {"0", "7", "14"}),
        (
            {"type": "number", "minimum": -0.5, "maximum": 0.5, "multipleOf": 0.25},
            {"-0.5", "-0.25", "0", "0.25", "0.5"},
        ),
    ],
)
def test_all_that_is_let_through(schema: dict[str, Any], texts: set[str]) -> None:
    matcher = matcher_of(schema)
    assert {drawn(matcher, random.Random(seed)) for seed in range(60)} == texts


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer"},
        {"type": "number"},
        {},
        {"type": "integer", "minimum": 0},
        {"type": "number", "exclusiveMaximum": 5},
        {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 1},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "integer", "multipleOf": 3},
        {"type": "number", "maximum": 3.4e38},
        {"type": "string", "format": "duration"},
    ],
)
def test_numbers_have_an_end(schema: dict[str, Any]) -> None:
    """A model that would go on with zeros for ever cannot: from every digit on there is an end soon."""
    matcher = matcher_of(schema)
    prefix = {"array": "[", "object": '{"a":', "string": '"P'}.get(schema.get("type", ""), "")
    assert matcher.try_consume_tokens([*prefix.encode()]) == len(prefix)
    length = 0
    while True:
        mask = matcher.compute_bitmask()
        digit = next((each for each in b"1230" if mask[each >> 3] >> (each & 7) & 1), None)
        if digit is None:
            break
        assert matcher.consume_token(digit)
        length += 1
        assert length < 45


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            ["-9223372036854775808", "9223372036854775807", "0"],
            ["-9223372036854775809", "9223372036854775808", "-0", "1.0"],
        ),
        (
            {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
            ["18446744073709551615"],
            ["18446744073709551616"],
        ),
        ({"type": "number", "maximum": 1e19}, ["10000000000000000000", "-1.5"], ["10000000000000000000.1"]),
        ({"type": "number", "maximum": 1.8e308, "minimum": -3.4e38}, ["3.14", "-2"], []),
        (
            {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            ["0.5", "0.00000000000001"],
            ["0", "1", "0.0", "1.0"],
        ),
        ({"minimum": 5, "exclusiveMinimum": True, "type": "integer"}, ["6"], ["5"]),
        ('{"type": "number", "maximum": 1e400}', ["3"], []),
        ('{"type": "number", "minimum": 9007199254740993.0}', ["9007199254740993"], ["9007199254740992"]),
        ({"type": "string", "maxLength": 10.0, "minLength": 2.0}, ['"ab"'], ['"a"', '"abcdefghijk"']),
        ({"type": "array", "maxItems": 1.0}, ["[1]"], ["[1,2]"]),
    ],
)
def test_bounds(schema: Any, valid: list[str], invalid: list[str]) -> None:
    matcher = matcher_of(schema)
    for text in valid:
        assert is_valid(schema, text), text
        assert allows(matcher, text), text
    for text in invalid:
        assert not allows(matcher, text), text


BOUNDS = st.one_of(
    st.integers(-50, 50).map(Fraction),
    st.builds(Fraction, st.integers(-(10**6), 10**6), st.sampled_from([1, 10, 100, 10**5])),
    st.sampled_from([2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 10**19, 10**15, 10**15 - 1]).map(Fraction),
)
RANGES = st.builds(
    numbers.Range,
    st.booleans(),
    st.none() | st.builds(numbers.Bound, BOUNDS, st.booleans()),
    st.none() | st.builds(numbers.Bound, BOUNDS, st.booleans()),
    st.none(),
)


def schema_of(limits: numbers.Range) -> str:
    """Returns the schema as text, so that its numbers are exact."""
    written = ['"type": "integer"' if limits.is_integer else '"type": "number"']
    names = {False: ("minimum", "maximum"), True: ("exclusiveMinimum", "exclusiveMaximum")}
    for place, bound in enumerate((limits.low, limits.high)):
        if bound is not None:
            name = names[bound.is_strict][place]
            written.append(f'"{name}": {numbers.text_of_fraction(bound.value)}')
    return f"{{{', '.join(written)}}}"


def check_range(limits: numbers.Range, near: int) -> None:
    """Compares texts next to the bounds with what a validator says of them, exactly."""
    schema = schema_of(limits)
    try:
        matcher = matcher_of(schema)
    except SchemaError:
        matcher = None
    for bound in (limits.low, limits.high):
        for step in (0, 1, -1, near):
            for unit in (1, 100, 10**7):
                value = (bound.value if bound else 0) + Fraction(step, unit)
                text = numbers.text_of_fraction(value)
                if limits.is_integer and "." in text:
                    continue
                is_let_through = matcher is not None and allows(matcher, text)
                is_wanted = is_valid(schema, text)
                assert not is_let_through or is_wanted, (schema, text)
                is_short = len(text.partition(".")[2]) <= numbers.LEAST_DECIMALS
                is_within_ends = abs(value) < numbers.END or None not in (limits.low, limits.high)
                assert is_let_through or not is_wanted or not is_short or not is_within_ends, (schema, text)


@settings(max_examples=150, deadline=None)
@given(RANGES, st.integers(-1000, 1000))
def test_ranges_are_exact(limits: numbers.Range, near: int) -> None:
    check_range(limits, near)


VALUES: list[Any] = [
    1,
    1.0,
    True,
    None,
    "a",
    "ab",
    [],
    [1],
    {"a": 1},
    2**53 + 1,
    WrittenFloat("0.10000000000000000555"),
]
NAMES = ["a", "b", 'q"', "é", "n\n"]


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.choice(["number", "string", "constant", "any"] + ["object", "array", "several"] * (depth < 3))
    schema: dict[str, Any] = {}
    match kind:
        case "number":
            schema["type"] = rng.choice(["integer", "number", ["integer", "null"]])
            for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
                if rng.random() < 0.3:
                    schema[keyword] = rng.choice(
                        [0, 1, -7, 0.5, 2**53 + 1, 2**63 - 1, 1e19, 10**20, 12.34, WrittenFloat("1e400")]
                    )
            if rng.random() < 0.2:
                schema["multipleOf"] = rng.choice([1, 7, 0.5, 0.25, 0.01, 1.5, 1000])
        case "string":
            schema = {"type": "string", "maxLength": rng.choice([1, 3, 2.0])}
            if rng.random() < 0.5:
                schema["pattern"] = rng.choice(["^[a-z]+$", "b", r"^\d{2}$", "^(a|b)c"])
        case "constant":
            schema["enum"] = rng.sample(VALUES, rng.randint(1, 4))
            if rng.random() < 0.3:
                schema |= rng.choice(
                    [{"type": "integer"}, {"minimum": 1}, {"items": {"type": "integer"}}, {"pattern": "b"}]
                )
        case "object":
            names = rng.sample(NAMES, rng.randint(0, 3))
            schema = {"type": "object", "properties": {name: random_schema(rng, depth + 1) for name in names}}
            schema["additionalProperties"] = rng.choice([False, True, {"type": "boolean"}])
            schema["required"] = rng.sample([*names, "r"], rng.randint(0, len(names)))
            if rng.random() < 0.3:
                pattern = rng.choice(["^a", "b$", '"', ".", "^[a-b]+$"])
                schema["patternProperties"] = {pattern: random_schema(rng, depth + 1)}
            if rng.random() < 0.2:
                schema["maxProperties"] = rng.randint(0, 3)
        case "array":
            schema = {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": rng.randint(0, 3)}
            if rng.random() < 0.4:
                schema["prefixItems"] = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 2))]
                schema["minItems"] = rng.randint(0, 2)
        case "several":
            branches = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
            schema = {rng.choice(["anyOf", "allOf", "oneOf"]): branches}
            if rng.random() < 0.3:
                schema |= random_schema(rng, depth + 3)
    return schema


def check_schema(number: int) -> int:
    """Draws texts of a random schema, and returns how many there were; each has to be valid."""
    rng = random.Random(number)
    schema = random_schema(rng)
    try:
        matcher = matcher_of(schema)
    except (SchemaError, AssertionError):  # refused by its place, or by the compiler: see other tests
        return 0
    texts = [text for _ in range(4) if (text := drawn(matcher, rng)) is not None]
    for text in texts:
        assert is_valid(schema, text), (json.dumps(schema), text)
    return len(texts)


def test_what_is_let_through_is_valid() -> None:
    assert sum(map(check_schema, range(250))) > 500


def plant_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        writer, "text_of", lambda value: json.dumps(float(value)) if value > 2**53 else json.dumps(value)
    )


def plant_rounded_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demands, "exactly", lambda value: Fraction(float(value)))


def plant_lax_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "_first", lambda low: int(low.value))


def plant_loose_exclusion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "exclusive", lambda branches, root: branches)


def check_all(limits: list[numbers.Range]) -> None:
    for each in limits:
        check_range(each, 1)
    for text in CONSTANTS[:4]:
        test_constants_keep_their_text(text, '{"const": %s}')
    for number in range(400):
        check_schema(number)


@pytest.mark.parametrize(
    "plant", [plant_doubles, plant_rounded_bounds, plant_lax_ends, plant_loose_exclusion]
)
def test_planted_bugs_are_seen(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    limits = [
        numbers.Range(True, numbers.Bound(Fraction(2**53 + 1)), None, None),
        numbers.Range(True, numbers.Bound(Fraction(5, 2)), None, None),
    ]
    with pytest.raises(AssertionError):
        check_all(limits)


@pytest.mark.parametrize(
    ("kind", "valid", "invalid"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "2023-02-28", "2023-12-31"],
            ["2023-02-29", "1900-02-29", "2024-02-30", "2023-04-31", "0000-01-01"],
        ),
        (
            "date-time",
            ["2024-02-29T00:00:00Z", "2023-01-01T23:59:59.5+01:00"],
            ["2023-02-29T00:00:00Z", "2023-01-01T12:00:60Z", "2023-01-01T24:00:00Z", "2023-01-01T00:00:00"],
        ),
        ("time", ["23:59:59Z", "00:00:00-23:59"], ["23:59:60Z", "12:00:60+00:00", "24:00:00Z", "1:00:00Z"]),
        ("duration", ["P1Y2M3DT4H5M6S", "P3W", "PT1S"], ["P", "P1YT", "PT", "P1S", "P1W1D"]),
    ],
)
def test_days_and_times(kind: str, valid: list[str], invalid: list[str]) -> None:
    matcher = matcher_of({"type": "string", "format": kind})
    assert [text for text in valid + invalid if allows(matcher, f'"{text}"')] == valid


def test_every_day_of_a_few_centuries() -> None:
    """Months have the days that Python's calendar gives them."""
    pattern = re.compile(times.PATTERNS["date"])
    for year in [*range(1, 9), 400, *range(1896, 1906), *range(1996, 2006), 2100, 9999]:
        for month in range(1, 13):
            for day in range(1, 32):
                try:
                    is_day = bool(datetime.date(year, month, day))
                except ValueError:
                    is_day = False
                assert bool(pattern.search(f"{year:04}-{month:02}-{day:02}")) is is_day


CHAIN = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/A"}},
    "required": ["a"],
    "additionalProperties": False,
}
UNSATISFIABLE: list[tuple[dict[str, Any], str, str]] = [
    ({"$defs": {"A": CHAIN}, "$ref": "#/$defs/A"}, "s.$defs.A", "needs itself"),
    (
        {
            "type": "object",
            "properties": {"kids": {"type": "array", "minItems": 1, "items": {"$ref": "#"}}},
            "required": ["kids"],
        },
        "s",
        "needs itself",
    ),
    (
        {
            "$defs": {
                "A": {"anyOf": [CHAIN, {"type": "array", "minItems": 2, "items": {"$ref": "#/$defs/A"}}]}
            },
            "$ref": "#/$defs/A",
        },
        "s.$defs.A",
        "needs itself",
    ),
    (
        {"properties": {"a": {"enum": []}}, "required": ["a"], "type": "object"},
        "s.properties.a",
        "no choices",
    ),
    ({"properties": {"a": False}, "required": ["a"], "type": "object"}, "s", "'a' is required"),
    ({"type": "object", "required": ["q"], "additionalProperties": False}, "s", "'q' is required"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "s", "nothing satisfies it"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "s", "nothing satisfies it"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "s", "nothing satisfies it"),
    (
        {
            "type": "array",
            "prefixItems": [True, {"type": "integer", "minimum": 5, "maximum": 2}],
            "minItems": 2,
        },
        "s.prefixItems.1",
        "no number lies",
    ),
    ({"$ref": "#"}, "s.$ref", "refers to itself"),
    ({"const": "abc", "maxLength": 2}, "s", "nothing satisfies it"),
    (
        {"type": "object", "minProperties": 2, "properties": {"a": True}, "additionalProperties": False},
        "s",
        "nothing satisfies it",
    ),
]


@pytest.mark.parametrize(("schema", "place", "reason"), UNSATISFIABLE)
def test_what_nothing_satisfies(schema: dict[str, Any], place: str, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason) as raised:
        grammar_of("json", schema, "s")
    assert raised.value.place == place


def test_recursion_with_an_end() -> None:
    tree = {
        "$defs": {
            "t": {
                "type": "object",
                "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
                "required": ["kids"],
            }
        },
        "$ref": "#/$defs/t",
    }
    assert accepts(tree, '{"kids":[{"kids":[]},{"kids":[]}]}')
    optional = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "none": {"enum": []}},
        "additionalProperties": False,
    }
    assert accepts(optional, '{"next":{"next":{}}}')
    assert not accepts(optional, '{"none":1}')


ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


def named(schema: str) -> str:
    return f'{{"name": "n", "schema": {schema}}}'


PLACES = [
    ("/v1/chat/completions", '"response_format": {"type": "json_schema", "json_schema": %s}', named),
    ("/v1/chat/completions", '"structured_outputs": {"json": %s}', str),
    ("/v1/chat/completions", '"structured_outputs": {"json": %s}', json.dumps),
    (
        "/v1/chat/completions",
        '"tools": [{"type": "function", "function": {"name": "f", "strict": true, "parameters": '
        '{"type": "object", "properties": {"id": %s}}}}]',
        str,
    ),
    ("/v1/messages", '"output_config": {"format": {"type": "json_schema", "schema": %s}}', str),
    ("/v1/responses", '"text": {"format": {"type": "json_schema", "name": "n", "schema": %s}}', str),
]


@pytest.mark.parametrize(("path", "form", "write"), PLACES)
def test_a_number_of_a_body_keeps_its_digits(server: RunningServer, path: str, form: str, write: Any) -> None:
    """From the bytes of the body to what the worker gets."""
    for text in ("1234567890123456789", "0.1000000000000000055511151231257827"):
        schema = f'{{"const": {text}}}'
        ask = (
            '"input": "x"'
            if path == "/v1/responses"
            else '"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]'
        )
        body = f'{{"model": "{MODEL}", {ask}, {form % write(schema)}}}'
        headers = {"content-type": "application/json"}
        response = server.client.post(path, content=body, headers=headers)
        assert response.status_code == 200, response.text
        (*_, sent) = server.messages_to_worker("Generate")
        assert text in sent


INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
FORECAST = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "day": INT64,
        "odd": {"type": "integer", "minimum": 1e400},
    },
    "required": ["city", "day"],
}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with saying(tmp_path_factory.mktemp, "Well.", TEMPLATE) as running:
        yield running


def test_a_bound_of_64_bits_does_not_cost_the_tool(calling: RunningServer) -> None:
    """Many such tools are fine, too; a bound that no number reaches costs that keyword alone."""
    for count in (1, 9, 30):
        tools = [
            {"type": "function", "function": {"name": f"f{i}", "parameters": FORECAST}} for i in range(count)
        ]
        body = json.dumps(ASK | {"tools": tools, "tool_choice": "required"}).replace("Infinity", "1e400")
        headers = {"content-type": "application/json"}
        response = calling.client.post("/v1/chat/completions", content=body, headers=headers)
        assert response.status_code == 200, response.text
        (*_, sent) = calling.messages_to_worker("Generate")
        assert "Paris" in sent
        ignored = response.headers["x-truedraft-ignored"].split(", ")
        assert ignored[0] == "tools.0.function.parameters.properties.odd.minimum"
        assert all(each.endswith("odd.minimum") for each in ignored[:10])


def test_a_tool_that_nothing_satisfies(calling: RunningServer) -> None:
    """It becomes any object, next to a good one; a strict one is refused by its place."""
    none = {
        "$defs": {"A": CHAIN},
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/A"}},
        "required": ["x"],
    }
    for more in ({}, {"strict": True}):
        tools = [
            {"type": "function", "function": {"name": "good", "parameters": {"type": "object"}}},
            {"type": "function", "function": {"name": "none", "parameters": none} | more},
        ]
        response = calling.post("/v1/chat/completions", ASK | {"tools": tools, "tool_choice": "required"})
        if not more:
            assert response.status_code == 200, response.text
            assert response.headers["x-truedraft-ignored"] == "tools.1.function.parameters"
            continue
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tools.1.function.parameters.$defs.A")
        assert "of the tool 'none'" in error["message"]
        assert "nothing satisfies it" in error["message"]


def test_numbers_of_json_that_is_written_out() -> None:
    value = read_json('{"a": [1, 2.5, 1e400, 123456789012345678901234567890, 9007199254740993.0]}')["a"]
    assert [numbers.text_of(each) for each in value] == [
        "1",
        "2.5",
        "1e400",
        "123456789012345678901234567890",
        "9007199254740993.0",
    ]
    with pytest.raises(ValueError, match="NaN"):
        read_json("[NaN]")

"""What reading a schema costs: sizes before work, words that end, no more than the schema, and no longer than
somebody waits."""

import asyncio
import json
import sys
import threading
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.server.running import RunningServer
from truedraft.engine.text.schema import cleaning, pattern
from truedraft.engine.text.schema.cleaning import Cleaner, size_of
from truedraft.engine.text.schema.demands import Placed
from truedraft.engine.text.schema.formats import grammar_of, schema_grammar
from truedraft.engine.text.schema.place import MAX_LENGTH, Place
from truedraft.engine.text.schema.writer import Options
from truedraft.server.leniency import MAX_HEADER_LENGTH, Leniency
from truedraft.server.schemas.chat import ChatRequest
from truedraft.server.settings import RequestSettings
from truedraft.server.text.grammar import requested
from truedraft.server.text.grammar.validator import GrammarValidator

LONG = "n" * 500_000
CHAT = "/v1/chat/completions"


def ignored_of(schema: dict[str, Any]) -> str:
    leniency = Leniency(strict=False)
    Cleaner(leniency.ignore, loose=True).clean(schema, "s")
    return leniency.headers()["x-truedraft-ignored"]


def peak_of(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def within(name: str, keyword: str, count: int) -> dict[str, Any]:
    leaves = {str(number): {keyword: {}} for number in range(count)}
    return {"type": "object", "properties": {name: {"type": "object", "properties": leaves}}}


@pytest.mark.parametrize("name", [LONG, "a", "é" * 100_000])
def test_paths_of_what_is_left_out_take_no_memory(name: str) -> None:
    """Two thousand paths with a name of half a megabyte would be a gigabyte."""
    schema = within(name, "not", 2000)
    assert peak_of(lambda: ignored_of(schema)) < 8_000_000
    assert len(ignored_of(schema)) <= MAX_HEADER_LENGTH
    deep: dict[str, Any] = within("x", "not", 100)
    for _ in range(50):
        deep = {"properties": {name: deep}}
    assert len(ignored_of(deep)) <= MAX_HEADER_LENGTH


def test_a_place_is_short_and_tells_where() -> None:
    place = Place("s").at("properties").at("a").at(3)
    assert str(place) == "s.properties.a.3"
    for name in (LONG, "é" * 1000):
        place = place.at(name)
    assert len(str(place)) <= MAX_LENGTH
    for number in range(5000):
        place = place.at(number)
    assert len(str(place)) == MAX_LENGTH


def test_notes_end_before_they_are_made() -> None:
    class Loud:
        count = 0

        def __str__(self) -> str:
            Loud.count += 1
            return f"field{Loud.count}"

    leniency = Leniency(strict=False)
    for _ in range(10_000):
        leniency.ignore(Loud())
    assert Loud.count < 200
    assert len(leniency.headers()["x-truedraft-ignored"]) == MAX_HEADER_LENGTH


def test_errors_show_little_of_a_pattern() -> None:
    with pytest.raises(ValueError, match="not supported") as raised:
        pattern.exact_pattern("a" * 100_000 + "(?=b)")
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "a" * 300_000},
        {"pattern": "\\." * 300_000},
        {"properties": {LONG: {"not": {}}}},
        {"enum": ["x" * 10] * 40_000},
        {"patternProperties": {"(" * 300_000: {}}},
        {"allOf": [{"$ref": "#"}] * 30_000},
    ],
)
@pytest.mark.parametrize("is_tool", [False, True])
def test_what_is_too_large_is_not_read(
    server: RunningServer, schema: dict[str, Any], is_tool: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is read before its size is known")

    monkeypatch.setattr(cleaning, "exact_pattern", fail)
    monkeypatch.setattr(cleaning, "exact_name", fail)
    monkeypatch.setattr(Cleaner, "clean", fail)
    asked: dict[str, Any] = {"structured_outputs": {"json": schema}}
    if is_tool:
        asked = {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | asked
    response = server.post(CHAT, body)
    assert response.status_code == 400, response.text
    assert "max_grammar_size" in response.json()["error"]["message"]


def test_the_size_leaves_out_notes_alone() -> None:
    noted = {"description": "x" * 1000, "title": "t", "x-order": "x" * 1000}
    assert size_of({"type": "string"} | noted, 10_000) < size_of({"type": "string"}, 10_000) + 5
    assert size_of({"properties": {"description": {"const": {"title": "x" * 1000}}}}, 10_000) > 1000
    assert size_of({"enum": [{"default": "x" * 1000}]}, 10_000) > 1000
    text = json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(100)}})
    assert 0.8 < size_of(json.loads(text), 10_000) / len(text) < 1.2


SHAPES: dict[str, Callable[[int], dict[str, Any]]] = {
    "required": lambda n: {
        "properties": {f"p{i}": {} for i in range(n)},
        "required": [f"p{i}" for i in range(n)],
    },
    "optional": lambda n: {"properties": {f"p{i}": {"maxLength": i} for i in range(n)}, "type": "object"},
    "closed": lambda n: {"properties": {f"p{i}": {} for i in range(n)}, "additionalProperties": False},
    "anyOf": lambda n: {"anyOf": [{"const": i} for i in range(n)]},
    "oneOf": lambda n: {"oneOf": [{"const": i} for i in range(n)]},
    "allOf": lambda n: {"allOf": [{"properties": {f"p{i}": {}}} for i in range(n)]},
    "prefixItems": lambda n: {"prefixItems": [{"const": i} for i in range(n)]},
    "chain": lambda n: {
        "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(n)} | {f"d{n}": {}},
        "$ref": "#/$defs/d0",
    },
    "pattern": lambda n: {"type": "string", "pattern": "a\\." * n},
    "names": lambda n: {"patternProperties": {"a\\." * n: {}}},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_twice_the_schema_is_twice_the_work(shape: str) -> None:
    """Counts the calls of Python functions, which do not depend on the machine, and the grammar's size."""
    counts = []
    for count in (200, 400):
        schema, calls = SHAPES[shape](count), [0]

        def trace(_frame: Any, event: str, _arg: Any, calls: list[int] = calls) -> None:
            calls[0] += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(trace)
        try:
            text = grammar_of("json", schema)
        finally:
            sys.setprofile(before)
        counts.append((calls[0], len(text)))
    (calls_of_one, size_of_one), (calls_of_two, size_of_two) = counts
    assert calls_of_two < 2.2 * calls_of_one
    assert size_of_two < 2.2 * size_of_one


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(40)]},
        {
            "$defs": {
                f"d{i}": {
                    "properties": {
                        "x": {"$ref": f"#/$defs/d{i * 2 % 97}"},
                        "y": {"$ref": f"#/$defs/d{(i * 3 + 1) % 97}"},
                    }
                }
                for i in range(97)
            },
            "allOf": [{"$ref": f"#/$defs/d{i}"} for i in (1, 2, 5, 11)],
        },
    ],
)
def test_products_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="combines too many|more than 20000 rules"):
        grammar_of("json", schema)


class LeftError(Exception):
    """The client has left."""


def test_nobody_waits_for_it() -> None:
    """The reader asks now and then whether to go on, and ends where it is told to."""
    schema = SHAPES["optional"](1000)
    left = [20]

    def go_on() -> None:
        left[0] -= 1
        if not left[0]:
            raise LeftError

    with pytest.raises(LeftError):
        schema_grammar(Placed(schema, Place("s")), Options(go_on=go_on))
    left[0] = 20
    with pytest.raises(LeftError):
        Cleaner(None, go_on=go_on).clean(schema, "s")


async def test_a_client_that_leaves_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads a schema ends soon after the request is given up."""
    body = ChatRequest.model_validate(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "structured_outputs": {"json": SHAPES["optional"](1000)},
        }
    )
    begun, ended, goes_on = threading.Event(), list[BaseException](), threading.Event()
    inner = requested._Reading.go_on

    def go_on(self: Any) -> None:
        begun.set()
        goes_on.wait(30)
        inner(self)

    monkeypatch.setattr(requested._Reading, "go_on", go_on)

    async def run(_weight: int, _key: str, work: Callable[[], Any]) -> Any:
        def watched() -> Any:
            try:
                return work()
            except BaseException as error:
                ended.append(error)
                raise

        return await asyncio.to_thread(watched)

    checks = GrammarValidator(RequestSettings())
    waiting: Awaitable[Any] = requested.structured_grammar(
        body,
        None,
        checks,
        Leniency(strict=False),
        run=run,  # type: ignore[arg-type]
    )
    task = asyncio.ensure_future(waiting)
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    goes_on.set()
    while not ended:
        await asyncio.sleep(0.01)
    assert isinstance(ended[0], requested.AbandonedError)

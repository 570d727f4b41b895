"""Answers to random JSON schemas at temperature 1: every complete one parses and validates.

    python -m tests.integration.random_schemas http://127.0.0.1:8000 500 [FIRST]

Asks a running server, eight requests at a time, and prints how many answers were complete. Schemas are
functions of their numbers, which begin with FIRST (0).
"""

import json
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx
from jsonschema import Draft202012Validator

WORDS = ["name", "größe", "名前", "is ok", 'a"b', "x\\y", "emoji 😀", "n", "tags", "$id_", "line\nbreak", ""]
PATTERNS = [r"^[A-Z]{2}[0-9]{1,3}$", r"^(yes|no|ja)$", r"^\d{4}-\d{2}$", "^[äöü]+ß?$", r"^[^\"\\]{1,5}$"]
MAX_TOKENS = 300
# Answers of the same server at the same time.
PARALLEL = 8


def random_schema(rng: random.Random) -> dict[str, Any]:
    """An object whose definitions are used, some of them by themselves."""
    definitions = {name: _schema(rng, 2, []) for name in ("small", "ünï")}
    definitions["tree"] = {
        "type": "object",
        "properties": {
            "value": {"$ref": "#/$defs/small"},
            "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {**_object(rng, 0, [*definitions]), "$defs": definitions}


def _schema(rng: random.Random, depth: int, definitions: list[str]) -> dict[str, Any]:
    kinds = [_string, _number, _constant, _choice]
    if depth < 3:
        kinds += [_object, _array, _any_of]
    if definitions and rng.random() < 0.2:
        return {"$ref": f"#/$defs/{quote(rng.choice(definitions))}"}
    return rng.choice(kinds)(rng, depth, definitions)


def _object(rng: random.Random, depth: int, definitions: list[str]) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth + 1, definitions) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int, definitions: list[str]) -> dict[str, Any]:
    least = rng.randint(0, 2)
    items = _schema(rng, depth + 1, definitions)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _any_of(rng: random.Random, depth: int, definitions: list[str]) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth + 1, definitions) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random, _depth: int, _definitions: list[str]) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 9)}


def _number(rng: random.Random, _depth: int, _definitions: list[str]) -> dict[str, Any]:
    least = rng.randint(-100, 100)
    kind = rng.choice(["integer", "number"])
    lower = rng.choice(["minimum", "exclusiveMinimum"])
    upper = rng.choice(["maximum", "exclusiveMaximum"])
    return {"type": kind, lower: least, upper: least + rng.randint(2, 5000)}


def _constant(rng: random.Random, _depth: int, _definitions: list[str]) -> dict[str, Any]:
    return {"const": rng.choice([None, True, 12, -0.5, 'é\n"', [1, {"a": []}], {"k": "v"}])}


def _choice(rng: random.Random, _depth: int, _definitions: list[str]) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 1, 2.5, None, False], rng.randint(1, 4))}


def ask(url: str, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the schema, and the answer's only choice."""
    schema = random_schema(random.Random(number))
    body = {
        "model": httpx.get(f"{url}/v1/models").json()["data"][0]["id"],
        "messages": [{"role": "user", "content": "Fill in this form."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}},
        "max_tokens": MAX_TOKENS,
        "temperature": 1,
        "seed": number if number % 2 else None,
    }
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
    assert response.status_code == 200, (schema, response.text)
    return schema, response.json()["choices"][0]


def check(url: str, count: int, first: int = 0) -> Counter[str]:
    """Count finish reasons; an answer that is not what its schema says is printed, and counts as invalid."""
    reasons: Counter[str] = Counter()
    with ThreadPoolExecutor(PARALLEL) as pool:
        for schema, choice in pool.map(lambda number: ask(url, number), range(first, first + count)):
            reason = choice["finish_reason"]
            if reason == "stop":
                value = json.loads(choice["message"]["content"])
                if not Draft202012Validator(schema).is_valid(value):
                    reason = "invalid"
                    print(json.dumps(schema), json.dumps(value))
            reasons[reason] += 1
    return reasons


if __name__ == "__main__":
    print(dict(check(sys.argv[1], *map(int, sys.argv[2:]))))

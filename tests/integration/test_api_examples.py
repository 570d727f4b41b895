"""docs/api-examples.md: every curl command gets the answer printed below it, but for ids, times, numbers."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.conftest import TIMEOUT_SECONDS, Server

PAGE = (Path(__file__).parents[2] / "docs" / "api-examples.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```\n(curl .*?)```\n+```(json|text)\n(.*?)```", PAGE, re.DOTALL)

# What says the same on every machine and at every time; of other values the type is compared.
FIXED = {
    "object",
    "model",
    "finish_reason",
    "role",
    "type",
    "param",
    "code",
    "message",
    "status",
    "prompt_tokens",
}
FIXED |= {"tool_form", "completion_tokens", "count", "tokens", "prompt", "max_model_len", "index"}


def send(base_url: str, command: str) -> httpx.Response:
    """The request that curl would send; only -H, -d and the address are used on the page."""
    words = shlex.split(command.replace("\\\n", " "))[1:]
    headers: dict[str, str] = {}
    body = None
    url = ""
    while words:
        match words.pop(0):
            case "-H":
                name, _, value = words.pop(0).partition(": ")
                headers[name] = value
            case "-d":
                body = words.pop(0)
            case "-N":
                pass
            case address:
                url = address.replace("http://127.0.0.1:8000", base_url)
    method = "GET" if body is None else "POST"
    return httpx.request(method, url, headers=headers, content=body, timeout=TIMEOUT_SECONDS)


def outline(value: Any, name: str = "") -> Any:
    """Names, types and fixed values."""
    if isinstance(value, dict):
        return {key: outline(inner, key) for key, inner in value.items()}
    if isinstance(value, list) and name not in FIXED:
        return [outline(inner, name) for inner in value]
    if name in FIXED:
        return value
    return (
        "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    )


def events(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in data]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == PAGE.count("```\ncurl ") >= 9


@pytest.mark.parametrize(
    ("command", "kind", "answer"), EXAMPLES, ids=[f"{i}-{kind}" for i, (_, kind, _) in enumerate(EXAMPLES)]
)
def test_the_answer_is_the_printed_one(server: Server, command: str, kind: str, answer: str) -> None:
    response = send(server.url, command)
    if kind == "json":
        assert outline(response.json()) == outline(json.loads(answer))
        return
    # The number of a stream's chunks depends on time, so the first, the last and the usage are compared.
    shown, received = events(answer), events(response.text)
    assert outline(received[0]) == outline(shown[0])
    assert outline(received[-2]) == outline(shown[-2])
    assert received[-1] == shown[-1] == "[DONE]"

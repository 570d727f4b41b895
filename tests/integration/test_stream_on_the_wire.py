"""Raw server-sent events of the real server, line by line: framing, usage, stop strings, characters."""

import json
from typing import Any

import pytest

from tests.integration.conftest import Server

MODEL = "truedraft-demo"
ENDPOINTS = ["/v1/completions", "/v1/chat/completions"]
each_endpoint = pytest.mark.parametrize("path", ENDPOINTS)

# These are an emoji with a skin tone, Chinese, and combining marks.
CHARACTERS = "👍🏽 你好，世界 é̂ नि 👩‍👩‍👧"


def ask(path: str, text: str, **fields: Any) -> dict[str, Any]:
    prompt = (
        {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    )
    return {"model": MODEL, "temperature": 0, "max_tokens": 60} | prompt | fields


def lines_of(server: Server, path: str, body: dict[str, Any]) -> list[str]:
    with server.stream(path, body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(response.iter_lines())


def chunks_of(lines: list[str]) -> list[dict[str, Any]]:
    """Every line is an event or a comment and followed by an empty one; [DONE] is last."""
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all((line == "") == (number % 2 == 1) for number, line in enumerate(lines))
    data = [line for line in lines[:-2:2] if line != ": ping"]
    assert all(line.startswith("data: {") for line in data)
    return [json.loads(line.removeprefix("data: ")) for line in data]


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


def whole(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(path, body).json()
    choice = answer["choices"][0]
    return {
        "text": choice["text"] if "text" in choice else choice["message"]["content"],
        "finish_reason": choice["finish_reason"],
        "completion_tokens": answer["usage"]["completion_tokens"],
    }


@each_endpoint
@pytest.mark.parametrize("k", [0, 4, 8])
def test_frames_roles_and_usage(server: Server, path: str, k: int) -> None:
    body = ask(path, "One day, a boy", speculation={"num_speculative_tokens": k})
    lines = lines_of(server, path, body | {"stream_options": {"include_usage": True}})
    *chunks, last = chunks_of(lines)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    if path == "/v1/chat/completions":
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
    expected = whole(server, path, body)
    assert "".join(map(text_of, choices)) == expected["text"]
    assert choices[-1]["finish_reason"] == expected["finish_reason"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == expected["completion_tokens"]
    assert last["truedraft"]["drafted_tokens"] > 0 if k else last["truedraft"]["drafted_tokens"] == 0


@each_endpoint
def test_no_usage_unless_asked_for(server: Server, path: str) -> None:
    chunks = chunks_of(lines_of(server, path, ask(path, "One day", max_tokens=8)))
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@each_endpoint
@pytest.mark.parametrize("k", [0, 6])
def test_stop_strings_never_leak(server: Server, path: str, k: int) -> None:
    """Strings that stand at every place of what is said: at its start, inside words, across tokens."""
    body = ask(path, "One day, a little girl", speculation={"num_speculative_tokens": k})
    text = whole(server, path, body)["text"]
    assert len(text) > 60
    for start in (0, 7, 20, 33, 50):
        stop = text[start : start + 9]
        choices = [
            chunk["choices"][0]
            for chunk in chunks_of(lines_of(server, path, body | {"stop": [stop, "never"]}))
        ]
        said = "".join(map(text_of, choices))
        assert said == text[: text.index(stop)]
        assert choices[-1]["finish_reason"] == "stop"
        assert said == whole(server, path, body | {"stop": [stop, "never"]})["text"]


@each_endpoint
@pytest.mark.parametrize("k", [0, 5])
def test_characters_are_never_split(server: Server, path: str, k: int) -> None:
    """A bias leaves the model nothing but the bytes of ``CHARACTERS``, of which some make characters."""
    ids = server.post("/tokenize", {"prompt": CHARACTERS}).json()["tokens"]
    assert len(ids) > len(CHARACTERS)  # characters of several tokens
    bias = dict.fromkeys(map(str, set(ids)), 100)
    body = ask(path, CHARACTERS, logit_bias=bias, temperature=1, seed=5, max_tokens=200, ignore_eos=True)
    body |= {"speculation": {"num_speculative_tokens": k}}
    choices = [chunk["choices"][0] for chunk in chunks_of(lines_of(server, path, body))]
    pieces = [text_of(choice) for choice in choices]
    expected = whole(server, path, body)["text"]
    assert "".join(pieces) == expected
    assert any(ord(character) > 0x7F and character != "\ufffd" for character in expected)

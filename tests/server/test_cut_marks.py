"""A mark that is cut is no text: every form is cut at every place, by the length and by stop strings."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.server.refusals import CHAT
from tests.server.running import RunningServer
from tests.server.test_message_parser import FORMATS, said, written
from tests.server.test_tools import TEMPLATE, flat, saying, tool
from truedraft.server.text.families import (
    FINAL_HEADER,
    MESSAGE_END,
    NEXT_MESSAGE,
    REASONING_MARKS,
    ReasoningMarks,
)
from truedraft.server.text.message_parser import MessageFormat, MessageParser

CALLED = {"city": "Rome"}
CONTENT = "I look it up."
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def read(form: MessageFormat, text: str, cut_off: str | None, *, piece: int) -> tuple[Any, Any, Any]:
    """Reads a text in pieces of some characters, as it would be streamed, to its end."""
    reader = MessageParser(form)
    parts = []
    for start in range(0, len(text), piece):
        parts += reader.push(text[start : start + piece])
    return said(parts + reader.finish(cut_off))


def all_cuts(text: str) -> Iterator[tuple[str, str | None]]:
    """Yields every beginning of a text with what ended it: the length, or a stop string that follows."""
    for length in range(len(text)):
        for num_stopped in (0, 1, 3):
            yield text[:length], text[length : length + num_stopped]


@pytest.mark.parametrize("must_call", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_every_form(name: str, must_call: bool) -> None:
    form = FORMATS[name]
    content = "" if must_call or form.at_start else CONTENT
    wanted = [("weather", CALLED), ("now", {})][: 2 if form.later is not None else 1]
    text = content + written(form, wanted)
    for cut, cut_off in all_cuts(text):
        answers = [
            read(MessageFormat(calls=form, must_call=must_call), cut, cut_off, piece=size)
            for size in (1, 3, 999)
        ]
        assert answers[0] == answers[1] == answers[2]
        _, given, calls = answers[0]
        assert (given or "") == content[: len(cut)], (cut, cut_off)
        assert [called for called, _ in calls] in ([], ["weather"], ["weather", "now"])


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_must_come_is_no_text_whatever_ends_it(name: str) -> None:
    """A token among the request's own stop tokens may end a call anywhere, and nothing says what it was."""
    form = FORMATS[name]
    text = written(form, [("weather", CALLED)])
    for length in range(len(text)):
        _, given, _ = read(MessageFormat(calls=form, must_call=True), text[:length], None, piece=4)
        assert not given, text[:length]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("marks", REASONING_MARKS)
def test_reasoning_of_every_form(marks: ReasoningMarks, is_open: bool) -> None:
    if marks.answer and is_open:
        return  # its prompts never open the reasoning
    thought, answer = "Two is less.", "Yes, it is."
    header = FINAL_HEADER if marks.answer else "\n\n"
    text = f"{'' if is_open else marks.open}{thought}{marks.close}{header}{answer}"
    start = text.index(answer)
    for cut, cut_off in all_cuts(text):
        form = MessageFormat(reasoning=marks, is_reasoning=is_open)
        answers = [read(form, cut, cut_off, piece=size) for size in (1, 3, 999)]
        assert answers[0] == answers[1] == answers[2]
        reasoned, given, _ = answers[0]
        assert thought.startswith(reasoned or ""), (cut, cut_off)
        assert (given or "") == text[start : len(cut)], (cut, cut_off)


@pytest.mark.parametrize("form", [MessageFormat(calls=FORMATS["hermes"]), MessageFormat(REASONING_MARKS[0])])
@pytest.mark.parametrize("text", ["a <", "<", "if a <tool", "a <tool_cal", "<thin"])
def test_what_a_model_has_ended_is_text(form: MessageFormat, text: str) -> None:
    """It is no mark if the model has ended it, or if its stop string does not go on with the mark."""
    assert read(form, text, None, piece=2) == (None, text, [])
    assert read(form, text, "\n", piece=2) == (None, text, [])


def test_a_mark_that_is_a_token_is_never_cut() -> None:
    form = MessageFormat(calls=FORMATS["hermes"], token_ids={"<tool_call>": 7})
    for text in ("a <", "a <tool_cal", "a <tool_call>"):
        assert read(form, text, "", piece=1) == (None, text, [])
    reader = MessageParser(form)
    parts = reader.push("a <tool_call>\n", [len("a <tool_call>")]) + reader.finish("")
    assert said(parts) == (None, "a", [])


def test_headers_of_messages() -> None:
    """gpt-oss has more of them than one: between messages no beginning of one is text."""
    form = MessageFormat(REASONING_MARKS[-1], FORMATS["gpt_oss"])
    first = f"<|channel|>commentary<|message|>I look.{MESSAGE_END}{NEXT_MESSAGE}"
    text = f"{first} to=functions.f<|channel|>commentary json<|message|>{{}}"
    for length in range(len(first), len(text)):
        assert read(form, text[:length], "", piece=2)[1] in ("I look.", None)


# What the model says; a token is a byte.
SAID = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THOUGHT = f"<think>\nHm.\n</think>\n\n{SAID}"


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with saying(tmp_path_factory.mktemp, THOUGHT, TEMPLATE) as running:
        yield running


def shown(answer: Any, path: str) -> Iterator[str]:
    """Yields every text that an answer, or the events of a stream, show to a user."""
    if isinstance(answer, list):
        for inner in answer:
            yield from shown(inner, path)
    elif isinstance(answer, dict):
        if path == CHAT and isinstance(answer.get("content"), str):
            yield answer["content"]
        if answer.get("type") in ("output_text", "text_delta", "text") and answer.get("text"):
            yield answer["text"]
        if answer.get("type") == "response.output_text.delta":
            yield answer["delta"]
        for inner in answer.values():
            yield from shown(inner, path)


def data_of(text: str) -> Sequence[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines] if lines else [json.loads(text)]


BODIES: dict[str, Callable[[int], dict[str, Any]]] = {
    CHAT: lambda n: {"messages": [{"role": "user", "content": "x"}], "max_tokens": n, "tools": [tool()]},
    RESPONSES: lambda n: {"input": "x", "max_output_tokens": n, "tools": [flat()]},
    MESSAGES: lambda n: {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": n,
        "tools": [{"name": "add", "input_schema": {"type": "object", "properties": {"a": {}}}}],
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_every_endpoint_at_every_length(calling: RunningServer, path: str, stream: bool) -> None:
    choice: Any = {"type": "any"} if path == MESSAGES else "required"
    for length in range(1, len(THOUGHT)):
        body = BODIES[path](length) | {"stream": stream, "tool_choice": choice}
        response = calling.post(path, body)
        assert response.status_code == 200, response.text
        texts = [text for text in shown(data_of(response.text), path) if text]
        assert texts == [], (length, texts)


@pytest.mark.parametrize("stop", ["\n{", "{", '"name"', "call>"])
def test_a_stop_string_inside_of_a_call(calling: RunningServer, stop: str) -> None:
    answer = calling.post(CHAT, BODIES[CHAT](500) | {"stop": [stop], "tool_choice": "required"}).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], answer["choices"][0]["finish_reason"]) == ("", "stop")


def test_the_test_can_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With what is held given out as text at the end, every property above is broken."""
    monkeypatch.setattr(MessageParser, "_cut_at", lambda self, mark: len(self._held))
    for name in ("hermes", "qwen_tags", "mistral_list", "gemma4", "function_gemma", "llama3"):
        with pytest.raises(AssertionError):
            test_calls_of_every_form(name, True)
    for marks in REASONING_MARKS:
        with pytest.raises(AssertionError):
            test_reasoning_of_every_form(marks, False)

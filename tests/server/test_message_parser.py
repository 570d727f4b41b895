"""Answers of every family, cut at every place: reasoning, content and tool calls come out whole."""

import json
from collections.abc import Sequence

import pytest

from truedraft.server.text.chat_parts import DeltaWriter, whole_message
from truedraft.server.text.families import CALL_FORMATS, REASONING_MARKS, CallFormat, ReasoningMarks
from truedraft.server.text.message_parser import MessageFormat, MessageParser, Part, joined

FORMATS = {each.name: each for each in CALL_FORMATS}
SCHEMA = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
ARGUMENTS = {"city": 'São "Paulo {[\n\\', "days": 3}
PARALLEL = [name for name, form in FORMATS.items() if form.later is not None]


def written(form: CallFormat, calls: Sequence[tuple[str, dict[str, object]]]) -> str:
    """Returns the calls in the family's own syntax."""
    texts = []
    for name, arguments in calls:
        body = json.dumps(arguments)
        if form.arguments == "tags":
            tags = (
                f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
                for key, value in arguments.items()
            )
            body = "".join(tags)
        elif form.arguments == "quoted":
            body = ",".join(
                f"{key}:{form.quote}{value}{form.quote}"
                if isinstance(value, str)
                else f"{key}:{json.dumps(value)}"
                for key, value in sorted(arguments.items())
            )
        texts.append(f"{name}{form.before_arguments}{body}{form.end}")
    return form.first + (form.later or "").join(texts) + form.last


def read(form: MessageFormat, pieces: Sequence[str]) -> tuple[list[Part], MessageParser]:
    reader = MessageParser(form)
    parts: list[Part] = []
    for piece in pieces:
        parts += reader.push(piece)
    return parts + reader.finish(), reader


def said(parts: list[Part]) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    """Reasoning, content and calls."""
    message = whole_message(parts)
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return message.reasoning_content, message.content, calls


def cuts(text: str) -> list[list[str]]:
    """Whole, character by character, and in two at every place."""
    return [[text], list(text), *([text[:place], text[place:]] for place in range(1, len(text)))]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("content", ["", "I look it up.", "a < b\n\n "])
def test_calls_of_every_family_cut_everywhere(name: str, content: str) -> None:
    form = FORMATS[name]
    wanted = [("weather", ARGUMENTS), ("now", {})][: 2 if form.later is not None else 1]
    if form.at_start:
        content = ""
    text = content + written(form, wanted)
    for pieces in cuts(text):
        parts, _ = read(MessageFormat(calls=form, schemas={"weather": SCHEMA}), pieces)
        _, message, calls = said(parts)
        assert message == (content.rstrip() or None)
        assert [(name, json.loads(arguments)) for name, arguments in calls] == wanted


@pytest.mark.parametrize("marks", REASONING_MARKS[:-1])
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_of_every_family_cut_everywhere(marks: ReasoningMarks, is_open: bool) -> None:
    opening = "" if is_open else f"\n{marks.open}"
    text = f"{opening}\n2 < 3 </ so\n\nyes.\n{marks.close}\n\nYes </, it is.\n"
    end = text.index(marks.close) + len(marks.close)
    for pieces in cuts(text):
        parts, reader = read(MessageFormat(reasoning=marks, is_reasoning=is_open), pieces)
        assert said(parts) == ("2 < 3 </ so\n\nyes.", "Yes </, it is.\n", [])
        assert reader.reasoning_end == end


THOUGHT = "<|channel|>analysis<|message|>Hm, 2 < 3.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
AS_A_MODEL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
AS_TEMPLATES = " to=functions.f<|channel|>commentary json<|message|>"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"{FINAL}Yes.\n", (None, "Yes.\n", [])),
        (f"{THOUGHT}{FINAL}Yes.", ("Hm, 2 < 3.", "Yes.", [])),
        (f'{THOUGHT}{AS_A_MODEL}{{"a": 1}}', ("Hm, 2 < 3.", None, [("f", '{"a": 1}')])),
        (f"{THOUGHT}{PREAMBLE}{AS_TEMPLATES}{{}}", ("Hm, 2 < 3.", "I look.", [("f", "{}")])),
        (THOUGHT.removesuffix("<|start|>assistant"), ("Hm, 2 < 3.", "", [])),
        (THOUGHT, ("Hm, 2 < 3.", "", [])),
        (f"{THOUGHT}<|channel|>fin", ("Hm, 2 < 3.", "", [])),
        ("No header.", (None, "No header.", [])),
        ("", (None, "", [])),
    ],
)
def test_messages_with_headers_cut_everywhere(
    text: str, wanted: tuple[str | None, str | None, list[tuple[str, str]]]
) -> None:
    """gpt-oss writes messages like these."""
    form = MessageFormat(REASONING_MARKS[-1], FORMATS["gpt_oss"])
    for pieces in cuts(text):
        parts, reader = read(form, pieces)
        assert said(parts) == wanted
        assert (reader.reasoning_end == 0) is (wanted[0] is None)
        if FINAL in text:
            assert reader.reasoning_end in (0, text.index(FINAL) + len(FINAL))


def test_a_call_is_not_complete_before_its_end() -> None:
    for name, form in FORMATS.items():
        text = written(form, [("weather", {"city": "x"})])
        _, reader = read(MessageFormat(calls=form), [text])
        assert not reader.is_in_call, name
        _, reader = read(MessageFormat(calls=form), [text[: text.index("x")]])
        assert reader.is_in_call, name


def test_reasoning_then_calls() -> None:
    form = MessageFormat(REASONING_MARKS[0], FORMATS["hermes"])
    call = written(FORMATS["hermes"], [("f", {"a": 1})])
    for pieces in cuts(f"<think>{call}</think>\nSo:\n{call}"):
        assert said(read(form, pieces)[0]) == (call, "So:", [("f", '{"a": 1}')])


@pytest.mark.parametrize("text", ["", " \n", "<", "<think", " <thin king", "a<think>b</think>", "</think>"])
def test_what_is_no_reasoning_is_content(text: str) -> None:
    for pieces in cuts(text):
        assert said(read(MessageFormat(REASONING_MARKS[0]), pieces)[0]) == (None, text, [])


@pytest.mark.parametrize("text", ["a <tool_cal", ' {"name": "f"', "[TOOL_CALLS", "x\n"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    for pieces in cuts(text):
        assert said(read(MessageFormat(calls=FORMATS[name]), pieces)[0]) == (None, text, [])


def test_reasoning_that_is_cut() -> None:
    for pieces in cuts("<think>\nso </th"):
        parts, reader = read(MessageFormat(REASONING_MARKS[0]), pieces)
        assert said(parts) == ("so </th", "", [])
        assert reader.reasoning_end == len("<think>\nso </th")


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_anywhere(name: str) -> None:
    """What comes of it is a beginning of the call, or text that the model has ended before its trigger."""
    form = FORMATS[name]
    whole = written(form, [("weather", ARGUMENTS)])
    _, _, [(_, all_arguments)] = said(read(MessageFormat(calls=form), [whole])[0])
    for length in range(len(whole)):
        _, content, calls = said(read(MessageFormat(calls=form), [whole[:length]])[0])
        if length < len(form.first):
            text = whole[:length] if length < len(form.trigger) else ""
            assert (content, calls) == (text, [])
        for called, arguments in calls:
            assert called == "weather"
            assert form.arguments == "tags" or all_arguments.startswith(arguments)


@pytest.mark.parametrize("name", PARALLEL)
def test_deltas_add_up(name: str) -> None:
    """Each call begins with its id, type and name; its index counts."""
    form = FORMATS[name]
    text = "Well." + written(form, [("weather", ARGUMENTS), ("now", {"a": [1, {}]})])
    reader, writer = MessageParser(MessageFormat(calls=form, schemas={"weather": SCHEMA})), DeltaWriter()
    deltas = [delta for piece in text for delta in writer.deltas(reader.push(piece))]
    deltas += writer.deltas(reader.finish())
    assert "".join(delta.get("content", "") for delta in deltas) == "Well."
    for index, wanted in enumerate([ARGUMENTS, {"a": [1, {}]}]):
        pieces = [call for delta in deltas for call in delta.get("tool_calls", []) if call["index"] == index]
        assert pieces[0]["type"] == "function"
        assert pieces[0]["function"]["name"] == ["weather", "now"][index]
        assert len(pieces[0]["id"]) == len(form.call_id_prefix) + form.call_id_length
        assert all("id" not in piece and "name" not in piece["function"] for piece in pieces[1:])
        assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == wanted
        assert form.arguments != "json" or len(pieces) > 5


def test_joined_parts_say_the_same() -> None:
    form = MessageFormat(REASONING_MARKS[0], FORMATS["hermes"])
    text = f"<think>Hm.</think>\nSo:\n{written(FORMATS['hermes'], [('f', {'a': 1}), ('g', {})])}"
    parts, _ = read(form, list(text))
    for place in range(len(parts) + 1):
        whole = joined(joined([], parts[:place]), parts[place:])
        assert [type(part).__name__ for part in whole] == ["TextPart"] * 2 + ["CallStart", "Arguments"] * 2
        assert said(whole) == said(parts) == ("Hm.", "So:", [("f", '{"a": 1}'), ("g", "{}")])

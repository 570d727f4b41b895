"""The tests of messages can fail: bugs planted in what reads and writes their parts, each caught by one.

``MUTANTS`` maps a bug to the code that has it and the test that must raise; without a bug all of them pass in
``test_message_parser``.
"""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.server import test_choice, test_cut_marks
from tests.server import test_message_parser as tests
from truedraft.server.text import message_parser
from truedraft.server.text.chat_parts import DeltaWriter
from truedraft.server.text.families import REASONING_MARKS
from truedraft.server.text.message_parser import MessageFormat, MessageParser

Gate = Callable[[], None]

calls = partial(tests.test_calls_of_every_family_cut_everywhere, "hermes", "I look it up.")
call_at_start = partial(tests.test_calls_of_every_family_cut_everywhere, "llama3", "")
reasoning = partial(tests.test_reasoning_of_every_family_cut_everywhere, REASONING_MARKS[0], False)
cut = partial(tests.test_a_call_that_is_cut_anywhere, "hermes")
deltas = partial(tests.test_deltas_add_up, "hermes")
no_call = partial(tests.test_what_is_no_call_is_content, "hermes", "a <tool_cal")


cut_call = partial(test_cut_marks.test_calls_of_every_form, "hermes", False)
ended = partial(
    test_cut_marks.test_what_a_model_has_ended_is_text, MessageFormat(calls=tests.FORMATS["hermes"]), "a <"
)
quoted = partial(tests.test_calls_of_every_family_cut_everywhere, "gemma4", "")
messages = partial(
    tests.test_messages_with_headers_cut_everywhere, tests.THOUGHT + tests.FINAL, ("Hm, 2 < 3.", "", [])
)


def spelled() -> None:
    with TemporaryDirectory() as folder:
        test_choice.test_marks_that_are_spelled_are_text(Path(folder), True, 3)


@dataclass(frozen=True)
class Mutant:
    """``right`` of the code of ``owner``'s ``name`` becomes ``wrong``."""

    owner: Any
    name: str
    right: str
    wrong: str
    gate: Gate


MUTANTS = {
    "a mark split over two deltas is text": Mutant(
        MessageParser, "_read_text", "self._num_sure(end)", "len(self._held)", reasoning
    ),
    "a call's mark split over two deltas is text": Mutant(
        MessageParser, "_read_text", "self._num_sure(end)", "len(self._held)", calls
    ),
    "what could begin a mark is lost at the end": Mutant(
        MessageParser, "_read_text", "cut = self._cut_at(end)", "cut = 0", no_call
    ),
    "a mark that is cut is text": Mutant(
        MessageParser, "_read_text", "cut = self._cut_at(end)", "cut = len(self._held)", cut_call
    ),
    "a mark that is cut is no mark where nothing follows": Mutant(
        MessageParser, "_cut_at", 'self._cut_off or ""', "self._cut_off or '?'", cut_call
    ),
    "any beginning of a mark is one, whatever follows": Mutant(
        MessageParser, "_cut_at", 'self._cut_off or ""', "''", ended
    ),
    "space before a mark is given at once": Mutant(
        MessageParser, "_read_text", "len(self._held[:sure].rstrip()) if end else sure", "sure", reasoning
    ),
    "an opening mark counts as first text only": Mutant(
        MessageParser, "_read_reasoning", "self._held.lstrip()", "self._held", reasoning
    ),
    "the end of the reasoning is not noted": Mutant(
        MessageParser, "_read_reasoning", "self.reasoning_end = self._num_read", "pass", reasoning
    ),
    "reasoning does not end": Mutant(
        MessageParser, "_read_reasoning", '"reasoning", marks.close', '"reasoning", ""', reasoning
    ),
    "space behind the reasoning is content": Mutant(
        MessageParser,
        "_read_reasoning",
        "_num_read\n    yield from self._skip_space()",
        "_num_read",
        reasoning,
    ),
    "the next call's mark split over two deltas ends the calls": Mutant(
        MessageParser, "_read", "yield from self._await(len(later))", "pass", calls
    ),
    "a mark between calls becomes a name": Mutant(
        MessageParser, "_read", "self._drop(len(later))", "pass", calls
    ),
    "only whole answers are taken for calls at their start": Mutant(
        MessageParser, "_read", "yield from self._await(len(calls.first))", "yield None", call_at_start
    ),
    "a name that is cut is a call": Mutant(
        MessageParser, "_read_call", "return", "yield CallStart('call_1', self._held); return", cut
    ),
    "arguments are given again with the next delta": Mutant(
        MessageParser, "_read_object", "self._take(len(self._held))", "self._held", calls
    ),
    "an escaped quote ends a string": Mutant(
        MessageParser, "_read_object", "if is_escaped:", "if False:", calls
    ),
    "a brace in a string counts": Mutant(
        MessageParser, "_read_object", "elif is_string:", "elif False:", calls
    ),
    "the last piece of arguments is lost": Mutant(
        MessageParser,
        "_read_object",
        "yield Arguments(self._take(place + 1))",
        "self._take(place + 1)",
        calls,
    ),
    "a mark that is spelled counts": Mutant(
        MessageParser, "_find", "place + end not in self._mark_ends", "False", spelled
    ),
    "a call is complete when it starts": Mutant(
        MessageParser,
        "_start_call",
        "self.is_in_call = True",
        "pass",
        tests.test_a_call_is_not_complete_before_its_end,
    ),
    "all messages are content": Mutant(
        MessageParser, "_read_messages", '"analysis" in header', "False", messages
    ),
    "a header is part of the content": Mutant(
        MessageParser, "_read_messages", "self._drop(len(HEADER_END) if place >= 0 else 0)", "pass", messages
    ),
    "strings with quotes stay as they are": Mutant(
        message_parser, "quoted_as_json", "json.dumps(piece, ensure_ascii=False)", "piece", quoted
    ),
    "joined content follows its reasoning as one": Mutant(
        message_parser,
        "_is_same_text",
        "and part.kind == first.kind",
        "",
        tests.test_joined_parts_say_the_same,
    ),
    "joined arguments lose what came before": Mutant(
        message_parser,
        "_as_one",
        "for part in run if",
        "for part in run[1:] if",
        tests.test_joined_parts_say_the_same,
    ),
    "arguments of all calls are the first one's": Mutant(
        tests, "whole_message", "calls[-1].function", "calls[0].function", calls
    ),
    "a call's index does not advance": Mutant(DeltaWriter, "deltas", "self._num_calls += 1", "pass", deltas),
    "arguments have the first call's index": Mutant(
        DeltaWriter, "deltas", "index = self._num_calls - 1", "index = 0", deltas
    ),
    "arguments have the next call's index": Mutant(
        DeltaWriter, "deltas", "index = self._num_calls - 1", "index = self._num_calls", deltas
    ),
    "every delta of a call has an id": Mutant(
        DeltaWriter, "deltas", "more = ToolCallDelta(", "more = ToolCallDelta(id='call_1', ", deltas
    ),
}


@pytest.mark.parametrize("bug", MUTANTS)
def test_every_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[bug]
    honest = getattr(mutant.owner, mutant.name)
    source = textwrap.dedent(inspect.getsource(honest))
    assert mutant.right in source
    planted: dict[str, Any] = {}
    exec(source.replace(mutant.right, mutant.wrong), honest.__globals__, planted)
    monkeypatch.setattr(mutant.owner, mutant.name, planted[mutant.name])
    with pytest.raises((AssertionError, ValueError, IndexError)):
        mutant.gate()

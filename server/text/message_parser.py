"""Parses an assistant's message as its text comes: reasoning, content, tool calls.

Knows nothing of tokens. However the text is cut, the pieces of a part add up to the same.
"""

import re
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from truedraft.engine.text.detokenizer import longest_stop_prefix
from truedraft.server.text.families import HEADER_END, MESSAGE_END, CallFormat, ReasoningMarks
from truedraft.server.text.tool_arguments import quoted_as_json, tagged_as_json


class TextPart(msgspec.Struct, frozen=True):
    kind: Literal["reasoning", "content"]
    text: str


class CallStart(msgspec.Struct, frozen=True):
    id: str
    name: str


class Arguments(msgspec.Struct, frozen=True):
    """More of the last call's arguments."""

    text: str


Part = TextPart | CallStart | Arguments
HEADER_START, RECIPIENT_START = "<|channel|>", " to=functions."
# Whom a message with a header is for.
RECIPIENT = re.compile(r"to=functions\.([^<]+?)(?: *<|$)")
# A step yields a part, or None where it needs more text.
Steps = Generator[Part | None, None, None]


def joined(parts: Iterable[Part], later: Iterable[Part] = ()) -> list[Part]:
    """One after the other, without a cut through a text."""
    found = [*parts, *later]
    if len(found) < 2:
        return found
    runs: list[list[Part]] = []
    for part in found:
        if runs and _is_same_text(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_as_one(run) for run in runs]


def _is_same_text(first: Part, part: Part) -> bool:
    if isinstance(first, TextPart):
        return isinstance(part, TextPart) and part.kind == first.kind
    return isinstance(first, Arguments) and isinstance(part, Arguments)


def _as_one(run: list[Part]) -> Part:
    if len(run) == 1 or isinstance(run[0], CallStart):
        return run[0]
    return replace(run[0], text="".join(part.text for part in run if not isinstance(part, CallStart)))


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """``calls``: None if the model may not call anything. ``schemas``: of the tools' arguments, by name.
    ``must_call``: its grammar allows only calls. ``is_reasoning``: the prompt has opened the reasoning.
    ``token_ids``: of texts in marks that are tokens; spelled in other tokens they mark nothing."""

    reasoning: ReasoningMarks | None = None
    calls: CallFormat | None = None
    must_call: bool = False
    is_reasoning: bool = False
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    token_ids: dict[str, int] = field(default_factory=dict)

    @property
    def literals(self) -> list[str]:
        """Texts that have to be in the decoded text, also where they are special tokens."""
        marks = self.reasoning.literals if self.reasoning else []
        return marks + (self.calls.literals if self.calls else [])


class MessageParser:
    """Parses one choice: ``push`` its text, and ``finish`` once. ``mark_ids`` are tokens whose ends count."""

    def __init__(self, form: MessageFormat) -> None:
        self._form = form
        self.mark_ids = frozenset(form.token_ids.values())
        self._mark_ends: set[int] = set()
        self._held = ""
        self._num_read = 0
        self._is_over = False
        self._cut_off: str | None = None  # the known beginning of what would have followed a text that is cut
        self._steps = self._read()
        # Characters up to the end of the reasoning and its mark; None while that is not known.
        self.reasoning_end: int | None = None
        self.num_calls = 0
        self.is_in_call = False  # whose arguments are not complete

    def push(self, text: str, mark_ends: Iterable[int] = ()) -> list[Part]:
        """``mark_ends``: places in the whole text where tokens of ``mark_ids`` end."""
        self._mark_ends.update(mark_ends)
        self._held += text
        parts: list[Part] = []
        for part in self._steps:
            if part is None:
                break
            parts.append(part)
        return parts

    def finish(self, cut_off: str | None = None) -> list[Part]:
        """No more text will come. A mark that is cut is no text, and a call whose name is cut is left out.

        ``cut_off``: the stop string that ended a text and is not part of it, "" where the length did; None
        for a text that the model has ended, so that what could have begun a mark did not.
        """
        self._is_over = True
        self._cut_off = "" if self._form.must_call and cut_off is None else cut_off
        return self.push("")

    def _read(self) -> Steps:
        if self._form.reasoning is not None and self._form.reasoning.answer:
            yield from self._read_messages()
            return
        yield from self._read_reasoning()
        if self.reasoning_end is None:
            self.reasoning_end = 0
        calls = self._form.calls
        if calls is None:
            yield from self._read_text("content", "")
            return
        if calls.at_start:
            yield from self._await(len(calls.first))
        is_cut = self._is_over and bool(self._held) and self._cut_at(calls.first) == 0
        is_text = calls.at_start and not self._held.startswith(calls.first) and not is_cut
        yield from self._read_text("content", "" if is_text else calls.first)
        while not is_text and (not self._is_over or self._held):
            yield from self._read_call(calls)
            later = calls.end + (calls.later or "")
            yield from self._await(len(later))
            if calls.later is None or not self._held.startswith(later):
                break
            self._drop(len(later))
        # What follows is constrained to be the end of the last call.
        self._drop(len(self._held))

    def _read_messages(self) -> Steps:
        """Each with a header, which says what it is. What has none is content."""
        has_reasoned, is_first = False, True
        while not self._is_over or self._held:
            while (place := self._find(HEADER_END)) < 0 and not self._is_over:
                yield None
            header = self._take(place) if place >= 0 else ""
            if place < 0 and self._is_header_cut(is_first):
                self._drop(len(self._held))
            is_first = False
            self._drop(len(HEADER_END) if place >= 0 else 0)
            if "analysis" in header:
                has_reasoned = True
                yield from self._read_text("reasoning", MESSAGE_END)
                continue
            if self.reasoning_end is None:
                self.reasoning_end = self._num_read if has_reasoned else 0
            calls = self._form.calls
            if calls is not None and (called := RECIPIENT.search(header)):
                yield from self._start_call(calls, called[1])
                yield from self._read_object()
                self._drop(len(self._held))
            else:
                yield from self._read_text("content", MESSAGE_END)
        if self.reasoning_end is None:
            self.reasoning_end = self._num_read

    def _read_reasoning(self) -> Steps:
        marks = self._form.reasoning
        if marks is None:
            return
        if not self._form.is_reasoning:
            while not self._is_over and marks.open.startswith(self._held.lstrip()[: len(marks.open)]):
                if self._held.lstrip().startswith(marks.open):
                    break
                yield None
            if not self._held.lstrip().startswith(marks.open):
                if self._held.strip() and self._cut_at(marks.open) < len(self._held):
                    self._drop(len(self._held))
                return
            self._drop(self._held.index(marks.open) + len(marks.open))
        yield from self._skip_space()
        yield from self._read_text("reasoning", marks.close)
        self.reasoning_end = self._num_read
        yield from self._skip_space()

    def _read_text(self, kind: Literal["reasoning", "content"], end: str) -> Steps:
        """Up to ``end``, which is dropped with the space before it, or all that comes."""
        place = -1
        while not self._is_over or self._held:
            place = self._find(end) if end else -1
            if place >= 0:
                sure = len(self._held[:place].rstrip())
            elif self._is_over:
                cut = self._cut_at(end)
                sure = len(self._held[:cut].rstrip()) if cut < len(self._held) else cut
            else:
                sure = self._num_sure(end)
                sure = len(self._held[:sure].rstrip()) if end else sure
            if sure:
                yield TextPart(kind, self._take(sure))
            if place >= 0:
                self._drop(place - sure + len(end))
                return
            if self._is_over:
                self._drop(len(self._held))
            else:
                yield None

    def _read_call(self, calls: CallFormat) -> Steps:
        while (place := self._held.find(calls.before_arguments)) < 0:
            if self._is_over:
                return
            yield None
        name = self._take(place)
        self._drop(len(calls.before_arguments))
        yield from self._start_call(calls, name)
        if calls.arguments == "json":
            yield from self._read_object()
            return
        while (place := self._find(calls.end)) < 0 and not self._is_over:
            yield None
        self.is_in_call = place < 0
        text = self._take(place if place >= 0 else self._num_sure(calls.end))
        if calls.arguments == "tags":
            yield Arguments(tagged_as_json(text, self._form.schemas.get(name, {})))
        else:
            yield Arguments(quoted_as_json(text, calls.quote, is_complete=place >= 0))

    def _start_call(self, calls: CallFormat, name: str) -> Steps:
        self.num_calls += 1
        self.is_in_call = True
        yield CallStart(calls.new_call_id(), name)

    def _read_object(self) -> Steps:
        """Reads the text of a JSON object, to its end."""
        depth, is_string, is_escaped = 0, False, False
        while True:
            for place, character in enumerate(self._held):
                if is_escaped:
                    is_escaped = False
                elif is_string:
                    is_escaped, is_string = character == "\\", character != '"'
                elif character == '"':
                    is_string = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                    if depth == 0:
                        self.is_in_call = False
                        yield Arguments(self._take(place + 1))
                        return
            if self._held:
                yield Arguments(self._take(len(self._held)))
            if self._is_over:
                return
            yield None

    def _skip_space(self) -> Steps:
        while not self._held.strip() and not self._is_over:
            yield None
        self._drop(len(self._held) - len(self._held.lstrip()))

    def _await(self, length: int) -> Steps:
        while len(self._held) < length and not self._is_over:
            yield None

    def _find(self, mark: str) -> int:
        """Returns where it begins; -1 if it does not."""
        token = next((token for token in self._form.token_ids if token in mark), None)
        place = self._held.find(mark)
        if token is not None:
            end = self._num_read + mark.index(token) + len(token)
            while place >= 0 and place + end not in self._mark_ends:
                place = self._held.find(mark, place + 1)
        return place

    def _cut_at(self, mark: str) -> int:
        """Returns where a mark begins that the text's end has cut; the text's length if there is none."""
        calls = self._form.calls
        trigger = calls.trigger if calls is not None and calls.first == mark else ""
        token = next((token for token in self._form.token_ids if token in mark), None)
        for place in range(max(0, len(self._held) - len(mark) + 1), len(self._held)):
            held = self._held[place:]
            if token is not None:
                # A token comes whole, so the beginning of its text was spelled.
                end = mark.index(token) + len(token)
                is_whole = len(held) >= end and self._num_read + place + end in self._mark_ends
            else:
                is_whole = True
            whole = held + (self._cut_off or "")
            begins = mark.startswith(whole) or (self._cut_off is not None and whole.startswith(mark))
            is_decided = self._cut_off is not None or (trigger and held.startswith(trigger))
            if is_whole and begins and is_decided:
                return place
        return len(self._held)

    def _is_header_cut(self, is_first: bool) -> bool:
        """Returns whether what is held is the beginning of a header; any text after another message is."""
        if self._held.startswith("<|") or not is_first:
            return True
        headers = (HEADER_START, RECIPIENT_START)
        return self._cut_off is not None and any(header.startswith(self._held) for header in headers)

    def _num_sure(self, mark: str) -> int:
        """Characters that are no beginning of the mark."""
        return len(self._held) - longest_stop_prefix(self._held, [mark] if mark else [])

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._num_read += length
        return text

    def _drop(self, length: int) -> None:
        self._take(length)

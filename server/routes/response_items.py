"""The items of an answer of ``/v1/responses`` as its parts come, and the events that tell clients of them."""

import uuid
from collections.abc import Iterator
from typing import Any

from truedraft.server.schemas.answer import TokenOrigin
from truedraft.server.schemas.logprobs import ChatTokenLogprob
from truedraft.server.schemas.response_items import (
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
)
from truedraft.server.text.message_parser import Arguments, CallStart, Part, TextPart

# Type and fields.
Event = tuple[str, dict[str, Any]]


class OutputItems:
    """``add`` the parts, then ``close``. One item at most is open: the last one."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._texts: list[str] = []  # pieces of the last item's text or arguments

    @property
    def is_in_message(self) -> bool:
        return bool(self.items) and isinstance(self._last, OutputMessage)

    def add(
        self,
        part: Part,
        logprobs: list[ChatTokenLogprob] | None = None,
        origins: list[TokenOrigin] | None = None,
    ) -> Iterator[Event]:
        """``logprobs`` and ``origins``: of the tokens that came with a part of the content."""
        match part:
            case TextPart(kind="content"):
                if not self.is_in_message:
                    yield from self._open(_new_message())
                self._texts.append(part.text)
                fields = _more(logprobs or [], origins)
                yield "response.output_text.delta", {**self._place(), "delta": part.text, **fields}
            case TextPart():
                if not self.items or not isinstance(self._last, OutputReasoning):
                    reasoning = [ReasoningText(text="")]
                    yield from self._open(
                        OutputReasoning(id=_new_id("rs"), status="in_progress", content=reasoning)
                    )
                self._texts.append(part.text)
                yield "response.reasoning_text.delta", {**self._place(), "delta": part.text}
            case CallStart():
                yield from self._open(
                    OutputCall(
                        id=_new_id("fc"), status="in_progress", call_id=part.id, name=part.name, arguments=""
                    )
                )
            case Arguments():
                self._texts.append(part.text)
                yield "response.function_call_arguments.delta", {**self._item_place(), "delta": part.text}

    def close(
        self,
        status: ItemStatus,
        logprobs: list[ChatTokenLogprob] | None = None,
        origins: list[TokenOrigin] | None = None,
    ) -> Iterator[Event]:
        """The answer is over. An empty one is a message without text."""
        if not self.items:
            yield from self._open(_new_message())
        message = next((item for item in self.items if isinstance(item, OutputMessage)), None)
        if message is not None:
            message.content[0].logprobs = logprobs or []
            message.content[0].origins = origins
        yield from self._close(status)

    @property
    def _last(self) -> OutputItem:
        return self.items[-1]

    def _open(self, item: OutputItem) -> Iterator[Event]:
        if self.items:
            yield from self._close("completed")
        self.items.append(item)
        shown = item if isinstance(item, OutputCall) else item.model_copy(update={"content": []})
        yield "response.output_item.added", self._item_event(shown)
        if not isinstance(item, OutputCall):
            yield "response.content_part.added", {**self._place(), "part": _as_json(_text_of(item))}

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        item, text = self._last, "".join(self._texts)
        self._texts.clear()
        item.status = status
        match item:
            case OutputCall():
                item.arguments = text
                done = {"name": item.name, "arguments": item.arguments}
                yield "response.function_call_arguments.done", {**self._item_place(), **done}
            case _:
                part = _text_of(item)
                part.text = text
                fields = _more(part.logprobs, part.origins) if isinstance(part, OutputText) else {}
                yield f"response.{part.type}.done", {**self._place(), "text": part.text, **fields}
                yield "response.content_part.done", {**self._place(), "part": _as_json(part)}
        yield "response.output_item.done", self._item_event(item)

    def _item_event(self, item: OutputItem) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1, "item": _as_json(item)}

    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self._last.id, "output_index": len(self.items) - 1}

    def _place(self) -> dict[str, Any]:
        return {**self._item_place(), "content_index": 0}


def _new_message() -> OutputMessage:
    return OutputMessage(id=_new_id("msg"), status="in_progress", content=[OutputText(text="")])


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _text_of(item: OutputItem) -> OutputText | ReasoningText:
    assert not isinstance(item, OutputCall)
    return item.content[0]


def _as_json(part: OutputItem | OutputText | ReasoningText) -> dict[str, Any]:
    return part.model_dump(mode="json")


def _more(logprobs: list[ChatTokenLogprob], origins: list[TokenOrigin] | None) -> dict[str, Any]:
    """Returns a text event's further fields: the origins are there if they were asked for."""
    fields: dict[str, Any] = {"logprobs": [entry.model_dump(mode="json") for entry in logprobs]}
    return (
        fields
        if origins is None
        else fields | {"origins": [entry.model_dump(mode="json") for entry in origins]}
    )

"""Reads parts of messages that other vendors' APIs write, as text, thought, call or result.

A conversation that began elsewhere goes on: readable parts are read, traces of another server's own tools are
left out and reported, and the rest is refused by ``unsupported_fields``.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import PrivateAttr

from truedraft.server.schemas.strict import RequestPart
from truedraft.server.schemas.tools import CalledFunction, GivenCall

# Without these the conversation says the same: a later text has what came of them.
TRACES = frozenset(
    {
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "code_interpreter_call",
        "compaction_trigger",
    }
    | {"computer_call", "computer_call_output", "encrypted_reasoning", "fallback"}
    | {"file_search_call", "image_generation_call", "mcp_approval_request", "mcp_approval_response"}
    | {"mcp_list_tools", "program", "program_output", "redacted_thinking", "server_tool_use"}
    | {"text_editor_code_execution_tool_result", "tool_search_call", "tool_search_output"}
    | {"tool_search_tool_result", "web_fetch_tool_result", "web_search_call", "web_search_tool_result"}
)
THOUGHTS = ("thinking", "reasoning", "reasoning_content", "reasoning_text")
CALLS = ("tool_use", "function_call", "tool_call", "mcp_tool_use")
RESULTS = ("tool_result", "mcp_tool_result", "function_call_output")
# OpenAI's chats, its responses and Anthropic's messages have pictures in parts of these types.
PICTURES = ("image_url", "input_image", "image")
NO_PICTURES = "the model sees no pictures here; describe the image in a text part"


class PictureSource(NamedTuple):
    """Says where a picture is: in a ``data:`` URL, or at another one. ``detail`` is OpenAI's name for how
    closely it is looked at."""

    url: str
    detail: str


class OtherPart(RequestPart):
    """Any other part is parsed so that it can be read as far as it is text, or else refused by name."""

    type: str
    _place: str = PrivateAttr("")  # its path in the body, where it is a picture that may be shown

    @property
    def place(self) -> str:
        return self._place

    def put(self, place: str) -> None:
        """Lets the part be a picture that is shown, as it stands in a user's message."""
        self._place = place

    @property
    def picture(self) -> PictureSource:
        """Returns where the picture is; raises ``ValueError`` if the part does not say."""
        fields, given = self.fields, self.fields.get("image_url")
        detail = fields.get("detail", given.get("detail") if isinstance(given, dict) else None) or "auto"
        match self.type, given, fields.get("source"):
            case ("image_url" | "input_image", str(url), _) | ("image_url", {"url": str(url)}, _):
                pass
            case "image", _, {"type": "base64", "media_type": str(kind), "data": str(data)}:
                url = f"data:{kind};base64,{data}"
            case "image", _, {"type": "url", "url": str(url)}:
                pass
            case _:
                raise ValueError("no files are stored here: put the picture itself into a 'data:' URL")
        if detail not in ("auto", "low", "high", "original"):
            raise ValueError("detail is low, high or auto")
        return PictureSource(url, detail)

    @property
    def fields(self) -> dict[str, Any]:
        return self.model_extra or {}

    @property
    def text(self) -> str | None:
        """Returns the text that it holds; None if it holds none."""
        fields = self.fields
        match self.type:
            case "document" | "search_result":
                source = fields.get("source")
                inner = source if isinstance(source, dict) and self.type == "document" else fields
                body = text_inside(inner.get("data") if inner.get("type") == "text" else inner.get("content"))
                head = [fields.get("title"), fields.get("context"), None if inner is source else source]
                return body and "\n".join([text for text in head if isinstance(text, str) and text] + [body])
            case "input_json" if isinstance(fields.get("data"), dict | list):
                return json.dumps(fields["data"], ensure_ascii=False, separators=(",", ":"))
            case "tool_reference":
                return text_inside(fields.get("tool_name"))
            case _:
                return None

    @property
    def thought(self) -> str | None:
        """Returns what a model thought, which templates get apart from the content."""
        if self.type not in THOUGHTS:
            return None
        given = [
            self.fields.get(name)
            for name in ("thinking", "reasoning", "reasoning_content", "text", "summary")
        ]
        return next((text for text in map(text_inside, given) if text), "")

    @property
    def call(self) -> GivenCall | None:
        fields = self.fields
        name, written = (
            fields.get("name"),
            fields.get("input", fields.get("arguments", fields.get("args", {}))),
        )
        call_id = fields.get("call_id", fields.get("id", ""))
        if self.type not in CALLS or not isinstance(name, str) or not isinstance(call_id, str):
            return None
        arguments = written if isinstance(written, str) else json.dumps(written, ensure_ascii=False)
        return GivenCall(id=call_id, function=CalledFunction(name=name, arguments=arguments))

    @property
    def result(self) -> tuple[str, str] | None:
        """Returns the id of a call and what it returned."""
        fields = self.fields
        call_id = fields.get("tool_use_id", fields.get("call_id"))
        text = text_inside(fields.get("content", fields.get("output", "")))
        if self.type not in RESULTS or not isinstance(call_id, str) or text is None:
            return None
        return call_id, f"Error: {text}" if fields.get("is_error") is True else text

    @property
    def is_trace(self) -> bool:
        return self.type in TRACES


def text_inside(value: object) -> str | None:
    """Returns a string, or the text of all parts of a list; None where a part is no text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        return None
    texts = [
        part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        for part in value
    ]
    return "\n".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None

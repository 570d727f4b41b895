"""Parts of a message as chats write them: whole, and as deltas of a stream."""

from collections.abc import Sequence

from truedraft.server.schemas.chat import AssistantMessage, Delta
from truedraft.server.schemas.tools import FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from truedraft.server.text.message_reader import Arguments, CallStart, Part, TextPart


def whole_message(parts: Sequence[Part]) -> AssistantMessage:
    """The content is null beside calls if there is none."""
    calls: list[ToolCall] = []
    for part in parts:
        match part:
            case CallStart():
                calls.append(ToolCall(id=part.id, function=FunctionCall(name=part.name, arguments="")))
            case Arguments():
                calls[-1].function.arguments += part.text
    content = text_of("content", parts)
    return AssistantMessage(
        content=None if calls and not content else content,
        reasoning_content=text_of("reasoning", parts) or None,
        tool_calls=calls or None,
    )


def text_of(kind: str, parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart) and part.kind == kind)


class DeltaWriter:
    """Of one choice: counts its calls."""

    def __init__(self) -> None:
        self._num_calls = 0

    def delta(self, parts: Sequence[Part]) -> Delta:
        """What the parts add, with one entry for each call."""
        calls: dict[int, ToolCallDelta] = {}
        for part in parts:
            match part:
                case CallStart():
                    calls[self._num_calls] = ToolCallDelta(
                        index=self._num_calls,
                        id=part.id,
                        type="function",
                        function=FunctionDelta(name=part.name, arguments=""),
                    )
                    self._num_calls += 1
                case Arguments():
                    index = self._num_calls - 1
                    more = ToolCallDelta(index=index, function=FunctionDelta(arguments=""))
                    calls.setdefault(index, more).function.arguments += part.text
        return Delta(
            content=text_of("content", parts) or None,
            reasoning_content=text_of("reasoning", parts) or None,
            tool_calls=list(calls.values()) or None,
        )

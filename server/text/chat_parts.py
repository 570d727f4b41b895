"""Parts of a message as chats write them: whole, and as deltas of a stream."""

from collections.abc import Sequence

from truedraft.server.schemas.chat import AssistantMessage, Delta
from truedraft.server.schemas.tools import FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from truedraft.server.text.message_parser import Arguments, CallStart, Part, TextPart, joined


def whole_message(parts: Sequence[Part]) -> AssistantMessage:
    """The content is null if there are calls and no text."""
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
    """Writes the deltas of one choice, whose calls it counts."""

    def __init__(self) -> None:
        self._num_calls = 0

    def deltas(self, parts: Sequence[Part]) -> list[Delta]:
        """Returns what the parts add. A delta adds to one thing only: some clients look at one field."""
        deltas: list[Delta] = []
        for part in joined(parts):
            match part:
                case TextPart(kind="content"):
                    deltas.append(Delta(content=part.text))
                case TextPart():
                    deltas.append(Delta(reasoning_content=part.text))
                case CallStart():
                    start = FunctionDelta(name=part.name, arguments="")
                    call = ToolCallDelta(index=self._num_calls, id=part.id, type="function", function=start)
                    deltas.append(Delta(tool_calls=[call]))
                    self._num_calls += 1
                case Arguments():
                    begun = deltas[-1].get("tool_calls") if deltas else None
                    if begun is None:
                        index = self._num_calls - 1
                        more = ToolCallDelta(index=index, function=FunctionDelta(arguments=""))
                        begun = [more]
                        deltas.append(Delta(tool_calls=begun))
                    begun[0]["function"]["arguments"] += part.text
        return deltas

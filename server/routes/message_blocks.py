"""An answer of ``/v1/messages`` grows here block by block, with the events that tell clients of them."""

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from truedraft.server.schemas.messages import AnswerBlock, Text, Thought, ToolUse
from truedraft.server.text.message_parser import Arguments, CallStart, Part, TextPart

# An event is its type and its fields.
Event = tuple[str, dict[str, Any]]

# Clients give a thought back only if it has one.
SIGNATURE = "unsigned"


class MessageBlocks:
    """Takes the parts by ``add``, and the end by ``close``. One block at most is open: the last one."""

    def __init__(self, *, shows_thoughts: bool) -> None:
        self.blocks: list[AnswerBlock] = []
        self._shows_thoughts = shows_thoughts
        self._arguments = ""  # the last call's

    def add(self, part: Part) -> Iterator[Event]:
        match part:
            case TextPart(kind="content"):
                if not isinstance(self._last, Text):
                    yield from self._open(Text(text=""))
                assert isinstance(self._last, Text)
                self._last.text += part.text
                yield self._delta("text_delta", text=part.text)
            case TextPart():
                if not isinstance(self._last, Thought):
                    yield from self._open(Thought(thinking="", signature=""))
                assert isinstance(self._last, Thought)
                if self._shows_thoughts:
                    self._last.thinking += part.text
                    yield self._delta("thinking_delta", thinking=part.text)
            case CallStart():
                yield from self._open(ToolUse(id=part.id, name=part.name, input={}))
                self._arguments = ""
            case Arguments():
                self._arguments += part.text
                yield self._delta("input_json_delta", partial_json=part.text)

    def close(self) -> Iterator[Event]:
        """Ends the last block, if there is one."""
        match self._last:
            case None:
                return
            case Thought() as thought:
                thought.signature = SIGNATURE
                yield self._delta("signature_delta", signature=SIGNATURE)
            case ToolUse() as call:
                # A call that is cut has what its arguments begin with.
                call.input = from_json(self._arguments or "{}", allow_partial="trailing-strings")
        yield "content_block_stop", {"index": len(self.blocks) - 1}

    @property
    def _last(self) -> AnswerBlock | None:
        return self.blocks[-1] if self.blocks else None

    def _open(self, block: AnswerBlock) -> Iterator[Event]:
        yield from self.close()
        self.blocks.append(block)
        yield "content_block_start", {"index": len(self.blocks) - 1, "content_block": block.model_dump()}

    def _delta(self, kind: str, **fields: Any) -> Event:
        return "content_block_delta", {"index": len(self.blocks) - 1, "delta": {"type": kind, **fields}}

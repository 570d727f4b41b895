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
        self._texts: list[str] = []  # pieces of the last block's text, thought or arguments

    def add(self, part: Part) -> Iterator[Event]:
        match part:
            case TextPart(kind="content"):
                if not isinstance(self._last, Text):
                    yield from self._open(Text(text=""))
                self._texts.append(part.text)
                yield self._delta("text_delta", text=part.text)
            case TextPart():
                if not isinstance(self._last, Thought):
                    yield from self._open(Thought(thinking="", signature=""))
                if self._shows_thoughts:
                    self._texts.append(part.text)
                    yield self._delta("thinking_delta", thinking=part.text)
            case CallStart():
                yield from self._open(ToolUse(id=part.id, name=part.name, input={}))
            case Arguments():
                self._texts.append(part.text)
                yield self._delta("input_json_delta", partial_json=part.text)

    def close(self) -> Iterator[Event]:
        """Ends the last block, if there is one."""
        text = "".join(self._texts)
        self._texts.clear()
        match self._last:
            case None:
                return
            case Text() as written:
                written.text = text
            case Thought() as thought:
                thought.thinking = text
                thought.signature = SIGNATURE
                yield self._delta("signature_delta", signature=SIGNATURE)
            case ToolUse() as call:
                # A call that is cut has what its arguments begin with.
                call.input = from_json(text or "{}", allow_partial="trailing-strings")
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

"""Leaves lines of metadata out of the front of a prompt: they differ from session to session.

A prompt is computed once as far as it begins like an earlier one, so a line with a client's version or a hash
in front of the instructions would have all of them computed again. ``x-truedraft-ignored`` reports its place.
"""

import re
from typing import TypeVar

from truedraft.server.leniency import Leniency
from truedraft.server.schemas.chat import ChatRequest, Message
from truedraft.server.schemas.common import TextPart
from truedraft.server.schemas.messages import Conversation, MessagesInputMessage, TextBlock
from truedraft.server.schemas.responses import InputMessage, ResponsesRequest
from truedraft.server.schemas.strict import RequestPart
from truedraft.server.schemas.tokenize import TokenizeRequest

# Claude Code's own header, which bridges to other APIs pass on, and the values in it where they stand alone.
METADATA = re.compile(
    r"\A(?:\s*(?:x-anthropic-[a-z-]+:|(?:cch|cc_[a-z_]+)=)[^\n]*(?:\n+|\Z))+", re.IGNORECASE
)
SYSTEM_ROLES = ("system", "developer")

Content = TypeVar("Content")
Item = TypeVar("Item")


def leave_out_metadata(request: RequestPart, leniency: Leniency) -> None:
    """Changes the system's messages of a request; one that says nothing else is gone."""
    match request:
        case Conversation():
            request.system = _without(request.system, "system", leniency) or None
            request.messages = _kept(request.messages, "messages", leniency)
        case ResponsesRequest():
            request.instructions = _without(request.instructions, "instructions", leniency) or None
            if not isinstance(request.input, str):
                request.input = _kept(request.input, "input", leniency)
        case ChatRequest() | TokenizeRequest() if request.messages:
            request.messages = _kept(request.messages, "messages", leniency)


def _kept(items: list[Item], path: str, leniency: Leniency) -> list[Item]:
    kept = []
    for number, item in enumerate(items):
        if isinstance(item, Message | InputMessage | MessagesInputMessage) and item.role in SYSTEM_ROLES:
            before, item.content = item.content, _without(item.content, f"{path}.{number}.content", leniency)
            if before and not item.content:
                continue
        kept.append(item)
    return kept or items


def _without(content: Content, path: str, leniency: Leniency) -> Content:
    """Returns a text, or the parts of a content, without its leading lines of metadata."""
    if isinstance(content, str):
        text = METADATA.sub("", content, count=1)
        if text != content:
            leniency.ignore(path)
        return text  # type: ignore[return-value]
    if isinstance(content, list):
        for number, part in enumerate(content):
            if not isinstance(part, TextPart | TextBlock):
                break
            part.text = _without(part.text, f"{path}.{number}", leniency)
            if part.text:
                break
        return [part for part in content if getattr(part, "text", None) != ""]  # type: ignore[return-value]
    return content

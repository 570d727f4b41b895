"""Reads a raw event stream, and describes its chunks; shared by the tests of both endpoints."""

import json
from typing import Any, Literal

from pydantic import Field

from tests.server.running import RunningServer
from truedraft.server.schemas.answer import Answer, Choice, is_none
from truedraft.server.schemas.chat import Delta
from truedraft.server.schemas.logprobs import ChatLogprobs


class ChatChunkChoice(Choice):
    delta: Delta
    logprobs: ChatLogprobs | None = None


class ChatChunk(Answer):
    """Describes a chunk of a chat; one of a completion is a ``Completion``."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = Field(None, exclude_if=is_none)


def events(body: str) -> list[Any]:
    """Returns the JSON of every event; the stream must hold only data lines and end with [DONE]."""
    *lines, done, end = body.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(line.startswith("data: {") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def answers(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    """The chunks of a stream, or the one answer."""
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return events(response.text) if body.get("stream") else [response.json()]

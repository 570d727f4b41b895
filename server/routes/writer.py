"""Sends completions and chats: one JSON answer, or a stream of chunks."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from fastapi import Request
from fastapi.responses import Response

from truedraft.server.errors import ApiError
from truedraft.server.http.sse import DONE, PING, chunk_event, error_event
from truedraft.server.observability.request_summary import SUMMARY
from truedraft.server.routes.context import GenerationContext
from truedraft.server.routes.responding import AnswerWriter, respond_stream, respond_whole
from truedraft.server.schemas.answer import FinishReason
from truedraft.server.text.choice import ChoiceDelta

CHUNK_STREAM = "`data:` lines, each a chunk as JSON, then `data: [DONE]`."


class ChunkWriter(ABC):
    """An ``AnswerWriter`` of chunks: what completions and chats have in common on the wire."""

    end = DONE
    ping = PING
    chunk_object: ClassVar[str]  # the kind of object that a chunk says it is

    def __init__(self, context: GenerationContext) -> None:
        self._context = context
        header = context.header()
        self._header = {"id": header.pop("id"), "object": self.chunk_object, **header}

    @property
    def may_be_large(self) -> bool:
        return self._context.generation.prepared.may_be_large

    @abstractmethod
    def chunks(self) -> AsyncIterator[dict[str, Any]]: ...

    async def events(self) -> AsyncIterator[bytes]:
        async for chunk in self.chunks():
            yield chunk_event(chunk)

    def _chunk(self, choices: list[dict[str, Any]], *, is_last: bool = False, **more: Any) -> dict[str, Any]:
        """Returns a chunk. It is not a model, whose checks would cost more than all else.

        Only for a client that asked for it there is ``usage``, null until the last one.
        """
        context = self._context
        chunk = {**self._header, "choices": choices}
        if context.include_usage:
            has_usage = is_last or context.continuous_usage
            chunk["usage"] = context.generation.usage() if has_usage else None
        return chunk | _told(more)

    def _choice(self, delta: ChoiceDelta, logprobs: Any, /, **more: Any) -> dict[str, Any]:
        """Returns what a chunk has of a choice."""
        context = self._context
        return chunk_choice(
            delta.index,
            logprobs,
            delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=context.token_ids(delta.token_ids),
            origins=context.origins(delta.origins) or None,
            **more,
        )

    def failure(self, error: ApiError) -> bytes:
        return error_event(error)


def chunk_choice(
    index: int, logprobs: Any = None, finish_reason: FinishReason | None = None, **more: Any
) -> dict[str, Any]:
    return {"index": index, "logprobs": logprobs, "finish_reason": finish_reason} | _told(more)


def _told(fields: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what there is nothing to say of."""
    return {name: value for name, value in fields.items() if value is not None}


async def respond(request: Request, context: GenerationContext, writer: AnswerWriter) -> Response:
    request.scope["state"][SUMMARY] = context.generation.summary
    headers, message = context.leniency.headers(), context.generation.prepared.message
    if message is not None and message.calls is not None:
        headers["x-truedraft-tool-form"] = message.calls.name
    send = respond_stream if context.body.stream else respond_whole
    return await send(request, context.generation, writer, headers)

"""Sends completions and chats: one JSON answer, or a stream of chunks."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from fastapi import Request
from fastapi.responses import Response

from truedraft.server.errors import ApiError
from truedraft.server.http.sse import DONE, PING, chunk_event, error_event
from truedraft.server.observability.request_summary import SUMMARY
from truedraft.server.routes.context import GenerationContext
from truedraft.server.routes.responding import AnswerWriter, respond_stream, respond_whole
from truedraft.server.schemas.answer import Answer

CHUNK_STREAM = "`data:` lines, each a chunk as JSON, then `data: [DONE]`."


class ChunkWriter(ABC):
    """An ``AnswerWriter`` of chunks: what completions and chats have in common on the wire."""

    end = DONE
    ping = PING

    def __init__(self, context: GenerationContext) -> None:
        self._context = context

    @property
    def may_be_large(self) -> bool:
        return self._context.generation.prepared.may_be_large

    @abstractmethod
    def chunks(self) -> AsyncIterator[Answer]: ...

    async def events(self) -> AsyncIterator[bytes]:
        context = self._context
        async for chunk in self.chunks():
            if context.continuous_usage:
                chunk.usage = context.generation.usage()
            yield chunk_event(chunk, with_usage=self._context.include_usage)

    def failure(self, error: ApiError) -> bytes:
        return error_event(error)


async def respond(request: Request, context: GenerationContext, writer: AnswerWriter) -> Response:
    request.scope["state"][SUMMARY] = context.generation.summary
    headers, message = context.leniency.headers(), context.generation.prepared.message
    if message is not None and message.calls is not None:
        headers["x-truedraft-tool-form"] = message.calls.name
    send = respond_stream if context.body.stream else respond_whole
    return await send(request, context.generation, writer, headers)

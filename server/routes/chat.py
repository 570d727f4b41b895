"""``POST /v1/chat/completions``: check, render the chat template, submit, answer."""

from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import Response

from truedraft.server.http.openapi import answer_or_stream
from truedraft.server.http.work import in_thread_if_long
from truedraft.server.routes.checks import check_request
from truedraft.server.routes.context import GenerationContext
from truedraft.server.routes.submit import start_chat
from truedraft.server.routes.waiting import GeneratingRoute
from truedraft.server.routes.writer import CHUNK_STREAM, ChunkWriter, chunk_choice, respond
from truedraft.server.schemas.chat import (
    ChatChoice,
    ChatCompletion,
    ChatRequest,
    Delta,
)
from truedraft.server.schemas.examples import CHATS
from truedraft.server.schemas.logprobs import ChatLogprobs
from truedraft.server.services import ServicesDep
from truedraft.server.text.chat_parts import DeltaWriter, whole_message
from truedraft.server.text.choice import FinishedChoice
from truedraft.server.text.logprobs import ScoredToken, chat_logprobs

router = APIRouter(tags=["generate"], route_class=GeneratingRoute)


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation",
    response_model=None,
    responses=answer_or_stream(ChatCompletion, CHUNK_STREAM),
)
async def create_chat_completion(
    body: Annotated[ChatRequest, Body(openapi_examples=CHATS)], request: Request, services: ServicesDep
) -> Response:
    """Write the messages out by the model's chat template, and continue them."""
    leniency = await in_thread_if_long(request, check_request, body, request, services)
    context = await start_chat("chat.completions", body, request, services, leniency)
    return await respond(request, context, ChatWriter(context, body))


class ChatWriter(ChunkWriter):
    chunk_object = "chat.completion.chunk"

    def __init__(self, context: GenerationContext, body: ChatRequest) -> None:
        super().__init__(context)
        self._num_top_logprobs = body.top_logprobs or 0 if body.logprobs else None

    def whole(self, choices: list[FinishedChoice]) -> ChatCompletion:
        context = self._context
        return ChatCompletion(
            **context.header(),
            choices=[self._whole_choice(choice) for choice in choices],
            prompt_logprobs=context.prompt_logprobs(choices[0].prompt_scored),
            prompt_token_ids=self._prompt_token_ids(),
            **context.totals(),
        )

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        context = self._context
        seen: set[int] = set()
        calls: defaultdict[int, DeltaWriter] = defaultdict(DeltaWriter)
        async for delta in context.generation.deltas():
            if delta.index not in seen:
                # Sent with the first token, even if its text is still held back: clients time it.
                choice = chunk_choice(delta.index, delta=Delta(role="assistant", content=""))
                token_ids = None if seen else self._prompt_token_ids()
                yield self._chunk([choice], prompt_token_ids=token_ids)
                seen.add(delta.index)
            *earlier, last = calls[delta.index].deltas(delta.parts) or [Delta()]
            for message in earlier:
                yield self._chunk([chunk_choice(delta.index, delta=message)])
            logprobs = self._logprobs(delta.scored) if delta.scored else None
            choice = self._choice(delta, logprobs, delta=last)
            is_news = logprobs or choice.get("token_ids") or choice.get("origins")
            if delta.parts or delta.finish_reason or is_news:
                yield self._chunk([choice], **context.ending())
        if context.include_usage:
            yield self._chunk([], is_last=True, truedraft=context.report())

    def _whole_choice(self, choice: FinishedChoice) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=whole_message(choice.parts),
            logprobs=self._logprobs(choice.scored),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=self._context.token_ids(choice.token_ids),
            origins=self._context.origins(choice.origins),
        )

    def _logprobs(self, scored: list[ScoredToken]) -> ChatLogprobs | None:
        if self._num_top_logprobs is None:
            return None
        return chat_logprobs(scored, self._num_top_logprobs, self._context.model.tokenizer.vocabulary)

    def _prompt_token_ids(self) -> list[int] | None:
        return self._context.token_ids(self._context.generation.prepared.prompts[0].token_ids)

"""These routes take chats in Anthropic's form: they answer them, or count their tokens."""

from collections import deque
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import Response

from truedraft.server.errors import ApiError, InvalidRequestError
from truedraft.server.http.error_answer import messages_error
from truedraft.server.http.openapi import answer_or_stream, body_errors
from truedraft.server.http.request_id import request_id_of
from truedraft.server.http.sse import typed_event
from truedraft.server.http.work import in_thread, in_thread_if_long
from truedraft.server.leniency import Leniency
from truedraft.server.models.served import Model
from truedraft.server.routes.checks import check_fields, check_model, check_request, use_model
from truedraft.server.routes.context import GenerationContext
from truedraft.server.routes.message_blocks import MessageBlocks
from truedraft.server.routes.submit import num_input_tokens, start_chat
from truedraft.server.routes.waiting import GeneratingRoute
from truedraft.server.routes.writer import respond
from truedraft.server.schemas.examples import MESSAGES, TOKEN_COUNTS
from truedraft.server.schemas.messages import (
    MessagesAnswer,
    MessagesErrorAnswer,
    MessagesRequest,
    MessagesUsage,
    OutputDetails,
    StopReason,
    TokenCount,
    TokenCountRequest,
)
from truedraft.server.services import ServicesDep
from truedraft.server.text.choice import FinishedChoice
from truedraft.server.text.messages_as_chat import as_chat

EVENT_STREAM = (
    "Named events whose data is JSON with a `type`: `message_start`, `content_block_start`, "
    "`content_block_delta`, `content_block_stop`, `message_delta`, `message_stop`, `ping`, `error`."
)
STOP_REASONS: dict[str | None, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}

# Errors name fields of the chat that a request asks for; these are their names here.
NAMES = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "continue_final_message": "a last message of the assistant",
}

router = APIRouter(tags=["generate"], route_class=GeneratingRoute)


@router.post(
    "/v1/messages",
    summary="Answer a conversation in Anthropic's form",
    response_model=None,
    responses=answer_or_stream(MessagesAnswer, EVENT_STREAM, MessagesErrorAnswer),
)
async def create_message(
    body: Annotated[MessagesRequest, Body(openapi_examples=MESSAGES)], request: Request, services: ServicesDep
) -> Response:
    """This is the same as a chat, for clients of Anthropic's API: text, tools and reasoning as blocks. A last
    message of the assistant is continued. Errors have Anthropic's shape on this path."""
    leniency = await in_thread_if_long(request, check_request, body, request, services)
    model = await use_model(body.model, request, services)
    chat = await in_thread(request, as_chat, body, model.tokenizer, leniency)  # may try the chat template out
    try:
        context = await start_chat("messages", chat, request, services, leniency)
    except InvalidRequestError as error:
        raise _renamed(error) from error
    return await respond(request, context, MessagesWriter(context, body, request_id_of(request.scope)))


@router.post(
    "/v1/messages/count_tokens",
    summary="Count the tokens of a conversation in Anthropic's form",
    response_model=TokenCount,
    responses=body_errors(MessagesErrorAnswer),
)
async def count_tokens(
    body: Annotated[TokenCountRequest, Body(openapi_examples=TOKEN_COUNTS)],
    request: Request,
    services: ServicesDep,
) -> Response:
    """This counts the tokens that the same conversation would have as the input of `/v1/messages`."""
    check_model(body.model, request, services)
    leniency = await in_thread(request, check_fields, body, services)
    model = await use_model(body.model, request, services)
    num_tokens = await in_thread(request, _count, body, model, leniency)
    answer = TokenCount(input_tokens=num_tokens).model_dump_json()
    return Response(answer, headers=leniency.headers(), media_type="application/json")


def _count(body: TokenCountRequest, model: Model, leniency: Leniency) -> int:
    return num_input_tokens(as_chat(body, model.tokenizer, leniency), model, leniency)


def _renamed(error: InvalidRequestError) -> InvalidRequestError:
    """Returns the same error in the words of the request."""
    for name, ours in NAMES.items():
        error.message = error.message.replace(name, ours)
    return error


class MessagesWriter:
    end = b""
    ping = typed_event({"type": "ping"})

    def __init__(self, context: GenerationContext, body: MessagesRequest, request_id: str) -> None:
        self._context = context
        self._request_id = request_id
        is_hidden = body.thinking is not None and body.thinking.display == "omitted"
        self._blocks = MessageBlocks(shows_thoughts=not is_hidden)

    @property
    def may_be_large(self) -> bool:
        return self._context.generation.prepared.may_be_large

    def whole(self, choices: list[FinishedChoice]) -> MessagesAnswer:
        (choice,) = choices
        for part in choice.parts:
            deque(self._blocks.add(part), maxlen=0)
        deque(self._blocks.close(), maxlen=0)
        return self._answer(content=self._blocks.blocks, **_stop(choice), truedraft=self._context.report())

    async def events(self) -> AsyncIterator[bytes]:
        choice, has_started = FinishedChoice(0), False
        async for delta in self._context.generation.deltas():
            if not has_started:
                has_started = True
                started = self._answer(content=[], stop_reason=None, stop_sequence=None)
                yield _event("message_start", message=started.model_dump())
                yield self.ping
            choice.add(delta)
            for part in delta.parts:
                for kind, fields in self._blocks.add(part):
                    yield _event(kind, **fields)
        for kind, fields in self._blocks.close():
            yield _event(kind, **fields)
        report = self._context.report()
        more = {} if report is None else {"truedraft": report.model_dump()}
        yield _event("message_delta", delta=_stop(choice), usage=self._usage().model_dump(), **more)
        yield _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return typed_event(messages_error(error, error.status, self._request_id))

    def _answer(self, **fields: Any) -> MessagesAnswer:
        return MessagesAnswer(
            id=self._context.generation.prepared.id,
            model=self._context.body.model,
            usage=self._usage(),
            **fields,
        )

    def _usage(self) -> MessagesUsage:
        usage = self._context.generation.usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        details = usage.completion_tokens_details
        thinking = OutputDetails(
            thinking_tokens=details.reasoning_tokens, thinking_budget_spent=details.thinking_budget_spent
        )
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - num_cached,
            cache_read_input_tokens=num_cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=thinking,
        )


def _stop(choice: FinishedChoice) -> dict[str, Any]:
    """Returns why it ends. A stop token of the request's own is an end like the model's."""
    sequence = choice.stop_reason if isinstance(choice.stop_reason, str) else None
    reason = STOP_REASONS.get(choice.finish_reason, "end_turn" if sequence is None else "stop_sequence")
    return {"stop_reason": reason, "stop_sequence": sequence if reason == "stop_sequence" else None}


def _event(kind: str, **fields: Any) -> bytes:
    return typed_event({"type": kind, **fields})

"""``POST /v1/responses``: OpenAI's newer endpoint, as far as it is text in and text out, nothing stored."""

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import Response

from truedraft.server.errors import ApiError
from truedraft.server.generation.prepared_request import MEMORY_PER_VALUE, SMALL_ANSWER
from truedraft.server.http.openapi import BODY_ERRORS, answer_or_stream
from truedraft.server.http.sse import PING, typed_event
from truedraft.server.http.work import SHORT_BODY, in_thread, in_thread_if_long
from truedraft.server.routes.checks import check_request, use_model
from truedraft.server.routes.context import GenerationContext
from truedraft.server.routes.response_items import Event, OutputItems
from truedraft.server.routes.submit import num_input_tokens, start_chat
from truedraft.server.routes.waiting import GeneratingRoute
from truedraft.server.routes.writer import respond
from truedraft.server.schemas.answer import TokenOrigin
from truedraft.server.schemas.examples import RESPONSES
from truedraft.server.schemas.logprobs import ChatTokenLogprob
from truedraft.server.schemas.responses import (
    FailureDetails,
    IncompleteDetails,
    InputTokens,
    InputTokensDetails,
    OutputTokensDetails,
    ReasoningOptions,
    ResponsesAnswer,
    ResponsesRequest,
    ResponsesUsage,
    Status,
)
from truedraft.server.schemas.structured import TextOptions
from truedraft.server.services import ServicesDep
from truedraft.server.text.choice import FinishedChoice
from truedraft.server.text.logprobs import ScoredToken, chat_logprobs
from truedraft.server.text.message_parser import TextPart

EVENT_STREAM = (
    "Named events whose data is JSON with a `type`, from `response.created` to `response.completed`, "
    "`response.incomplete` or `response.failed`. There is no `[DONE]`."
)

# Values of an answer up to which its last events are written at once; each value is in four of them.
FEW_VALUES = SMALL_ANSWER // 10

router = APIRouter(tags=["generate"], route_class=GeneratingRoute)


@router.post(
    "/v1/responses",
    summary="Answer a text or a conversation",
    response_model=None,
    responses=answer_or_stream(ResponsesAnswer, EVENT_STREAM),
)
async def create_response(
    body: Annotated[ResponsesRequest, Body(openapi_examples=RESPONSES)],
    request: Request,
    services: ServicesDep,
) -> Response:
    """OpenAI's newer endpoint, as far as it is text in and text out. Nothing is stored: the client keeps the
    conversation, and `previous_response_id`, `conversation` and `background` are refused."""
    leniency = await in_thread_if_long(request, check_request, body, request, services)
    context = await start_chat("responses", body, request, services, leniency)
    writer = ResponsesWriter(context, body, len(await request.body()))
    return await respond(request, context, writer)


@router.post(
    "/v1/responses/input_tokens",
    summary="Count the tokens of a conversation",
    response_model=InputTokens,
    responses=BODY_ERRORS,
)
async def count_input_tokens(
    body: Annotated[ResponsesRequest, Body(openapi_examples=RESPONSES)],
    request: Request,
    services: ServicesDep,
) -> Response:
    """This counts the tokens that the same request would have as the input of `/v1/responses`."""
    leniency = await in_thread_if_long(request, check_request, body, request, services)
    model = await use_model(body.model, request, services)
    num_tokens = await in_thread(request, num_input_tokens, body, model, leniency)
    answer = InputTokens(input_tokens=num_tokens).model_dump_json()
    return Response(answer, headers=leniency.headers(), media_type="application/json")


class ResponsesWriter:
    end = b""
    ping = PING

    def __init__(self, context: GenerationContext, body: ResponsesRequest, body_size: int) -> None:
        self._context = context
        self._body = body
        self._body_size = body_size  # in bytes: the answer repeats parts of it
        self._num_events = 0

    @property
    def may_be_large(self) -> bool:
        return self._context.generation.prepared.may_be_large or self._body_size > SHORT_BODY

    def whole(self, choices: list[FinishedChoice]) -> ResponsesAnswer:
        (choice,) = choices
        items = OutputItems()
        for part in choice.parts:
            exhaust(items.add(part))
        exhaust(self._close(items, choice))
        return self._finished(choice, items)

    async def events(self) -> AsyncIterator[bytes]:
        choice, items = FinishedChoice(0), OutputItems()
        scored: list[ScoredToken] = []  # tokens whose text is out, not yet reported
        origins: list[TokenOrigin] = []
        async for delta in self._context.generation.deltas():
            if self._num_events == 0:
                yield await self._written(self._started, 0)
            choice.add(delta)
            scored += delta.scored
            origins += delta.origins
            parts = delta.parts
            if (scored or origins) and not parts and items.is_in_message:
                parts = [TextPart("content", "")]
            for part in parts:
                for kind, fields in items.add(
                    part, self._logprobs(scored), self._context.origins(list(origins))
                ):
                    yield self._event(kind, **fields)
                if isinstance(part, TextPart) and part.kind == "content":
                    scored.clear()
                    origins.clear()
        num_values = len(choice.token_ids) + len(choice.origins)
        num_values += len(choice.scored) * ((self._body.top_logprobs or 0) + 1)
        yield await self._written(partial(self._ended, choice, items), num_values)

    async def _written(self, write: Callable[[], bytes], num_values: int) -> bytes:
        """Writes what repeats the request or all that was said, in a thread if that may take long."""
        context = self._context
        if self._body_size <= SHORT_BODY and num_values <= FEW_VALUES:
            return write()
        weight = self._body_size + MEMORY_PER_VALUE * num_values
        key = context.generation.prepared.key
        return await context.services.work.run(weight, key, write, may_refuse=False)

    def _started(self) -> bytes:
        started = self._answer("in_progress").model_dump(mode="json")
        return b"".join(
            self._event(kind, response=started) for kind in ("response.created", "response.in_progress")
        )

    def _ended(self, choice: FinishedChoice, items: OutputItems) -> bytes:
        events = [self._event(kind, **fields) for kind, fields in self._close(items, choice)]
        answer = self._finished(choice, items)
        ended = self._event(f"response.{answer.status}", response=answer.model_dump(mode="json"))
        return b"".join([*events, ended])

    def failure(self, error: ApiError) -> bytes:
        failed = self._answer("failed", error=FailureDetails(message=error.message))
        return self._event("response.failed", response=failed.model_dump(mode="json"))

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = typed_event({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return event

    def _close(self, items: OutputItems, choice: FinishedChoice) -> Iterator[Event]:
        return items.close(
            "incomplete" if choice.finish_reason == "length" else "completed",
            self._logprobs(choice.scored),
            self._context.origins(choice.origins),
        )

    def _finished(self, choice: FinishedChoice, items: OutputItems) -> ResponsesAnswer:
        is_complete = choice.finish_reason != "length"
        usage = self._context.generation.usage()
        return self._answer(
            "completed" if is_complete else "incomplete",
            incomplete_details=None if is_complete else IncompleteDetails(),
            output=items.items,
            usage=ResponsesUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(
                    cached_tokens=usage.prompt_tokens_details.cached_tokens
                ),
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputTokensDetails(
                    reasoning_tokens=usage.completion_tokens_details.reasoning_tokens,
                    thinking_budget_spent=usage.completion_tokens_details.thinking_budget_spent,
                ),
                total_tokens=usage.total_tokens,
            ),
            truedraft=self._context.report(),
        )

    def _answer(self, status: Status, **fields: Any) -> ResponsesAnswer:
        """Returns what every answer repeats of the request, and ``fields``."""
        body = self._body
        params = self._context.generation.prepared.params  # with the defaults filled in
        return ResponsesAnswer(
            id=self._context.generation.prepared.id,
            created_at=self._context.created,
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=body.model,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=params.temperature,
            text=TextOptions(format=body.text.format) if body.text is not None else TextOptions(),
            reasoning=ReasoningOptions(effort=body.reasoning.effort if body.reasoning is not None else None),
            tool_choice=body.tool_choice or "auto",
            tools=body.functions,
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            user=body.user,
            **{"output": [], **fields},
        )

    def _logprobs(self, scored: list[ScoredToken]) -> list[ChatTokenLogprob]:
        if not self._body.wants_logprobs:
            return []
        vocabulary = self._context.model.tokenizer.vocabulary
        return chat_logprobs(scored, self._body.top_logprobs or 0, vocabulary).content


def exhaust(events: Iterator[Event]) -> None:
    """Runs the events for their effect on the items."""
    deque(events, maxlen=0)

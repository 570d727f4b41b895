"""``POST /v1/responses``: OpenAI's newer endpoint, as far as it is text in and text out, nothing stored."""

import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import Response

from server.errors import ApiError
from server.http.auth import api_key_of
from server.http.json_route import JsonRoute, in_thread_if_long
from server.http.openapi import answer_or_stream
from server.http.sse import typed_event
from server.routes.checks import check_request, check_room, prompt_limits
from server.routes.context import GenerationContext
from server.routes.submit import start_generation
from server.routes.writer import respond
from server.schemas.answer import TokenOrigin
from server.schemas.examples import RESPONSES
from server.schemas.logprobs import ChatTokenLogprob
from server.schemas.responses import (
    FailureDetails,
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    ResponsesAnswer,
    ResponsesRequest,
    ResponsesUsage,
    Status,
)
from server.schemas.structured import TextOptions
from server.services import ServicesDep
from server.text.choice import FinishedChoice
from server.text.grammar import structured_grammar
from server.text.logprobs import ScoredToken, chat_logprobs
from server.text.prompt import chat_prompt

EVENT_STREAM = (
    "Named events whose data is JSON with a `type`, from `response.created` to `response.completed`, "
    "`response.incomplete` or `response.failed`. There is no `[DONE]`."
)

router = APIRouter(tags=["generate"], route_class=JsonRoute)


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
    conversation, and `previous_response_id`, `conversation`, `store: true` and `background` are refused."""
    headers = check_request(body, services)
    model, key = services.model(), api_key_of(request.scope)
    check_room(body, 1, services, key)
    limits = prompt_limits(services, model.worker)
    prompt = await in_thread_if_long(request, chat_prompt, body, model.tokenizer, limits)
    grammar = await structured_grammar(body, services.settings)
    context = start_generation("responses", body, [prompt], model, services, key, grammar=grammar)
    return await respond(request, context, ResponsesWriter(context, body), headers)


class ResponsesWriter:
    end = b""

    def __init__(self, context: GenerationContext, body: ResponsesRequest) -> None:
        self._context = context
        self._body = body
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._num_events = 0

    def whole(self, choices: list[FinishedChoice]) -> ResponsesAnswer:
        return self._finished(choices[0])

    async def events(self) -> AsyncIterator[bytes]:
        choice = FinishedChoice(0)
        async for delta in self._context.generation.deltas():
            if self._num_events == 0:
                for event in self._opening():
                    yield event
            choice.add(delta)
            if delta.text or delta.scored or delta.origins:
                yield self._text_event(
                    "delta",
                    delta=delta.text,
                    logprobs=_as_json(self._logprobs(delta.scored)),
                    **_origins_as_json(self._context.origins(delta.origins)),
                )
        for event in self._closing(choice):
            yield event

    def failure(self, error: ApiError) -> bytes:
        failed = self._answer("failed", error=FailureDetails(message=error.message))
        return self._event("response.failed", response=failed.model_dump(mode="json"))

    def _opening(self) -> list[bytes]:
        started = self._answer("in_progress").model_dump(mode="json")
        item = self._item("in_progress", []).model_dump(mode="json")
        return [
            self._event("response.created", response=started),
            self._event("response.in_progress", response=started),
            self._event("response.output_item.added", output_index=0, item=item),
            self._part_event("added", OutputText(text="")),
        ]

    def _closing(self, choice: FinishedChoice) -> list[bytes]:
        answer = self._finished(choice)
        (item,) = answer.output
        (part,) = item.content
        return [
            self._text_event(
                "done",
                text=part.text,
                logprobs=_as_json(part.logprobs),
                **_origins_as_json(part.origins),
            ),
            self._part_event("done", part),
            self._event("response.output_item.done", output_index=0, item=item.model_dump(mode="json")),
            self._event(f"response.{answer.status}", response=answer.model_dump(mode="json")),
        ]

    def _text_event(self, what: str, **fields: Any) -> bytes:
        return self._event(f"response.output_text.{what}", **self._place(), **fields)

    def _part_event(self, what: str, part: OutputText) -> bytes:
        return self._event(
            f"response.content_part.{what}", **self._place(), part=part.model_dump(mode="json")
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = typed_event({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return event

    def _finished(self, choice: FinishedChoice) -> ResponsesAnswer:
        is_complete = choice.finish_reason == "stop"
        part = OutputText(
            text=choice.text,
            logprobs=self._logprobs(choice.scored),
            origins=self._context.origins(choice.origins),
        )
        usage = self._context.generation.usage()
        return self._answer(
            "completed" if is_complete else "incomplete",
            incomplete_details=None if is_complete else IncompleteDetails(),
            output=[self._item("completed" if is_complete else "incomplete", [part])],
            usage=ResponsesUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(
                    cached_tokens=usage.prompt_tokens_details.cached_tokens
                ),
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
            ),
            foretoken=self._context.report(),
        )

    def _item(self, status: Any, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(id=self._item_id, status=status, content=content)

    def _answer(self, status: Status, **fields: Any) -> ResponsesAnswer:
        """What every answer repeats of the request, and ``fields``."""
        body, asked = self._body, self._body.model_extra or {}
        params = self._context.generation.job.params  # with the defaults filled in
        return ResponsesAnswer(
            id=self._context.generation.job.id,
            created_at=self._context.created,
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=body.model,
            parallel_tool_calls=asked.get("parallel_tool_calls") is not False,
            temperature=params.temperature,
            text=body.text or TextOptions(),
            tool_choice=asked.get("tool_choice") or "auto",
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


def _origins_as_json(origins: list[TokenOrigin] | None) -> dict[str, Any]:
    """A field of an event, or none."""
    return {} if origins is None else {"origins": [entry.model_dump(mode="json") for entry in origins]}


def _as_json(logprobs: list[ChatTokenLogprob]) -> list[dict[str, Any]]:
    return [entry.model_dump(mode="json") for entry in logprobs]

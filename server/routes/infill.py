"""``POST /infill``: llama.cpp's endpoint of editors; a completion with another request and answer."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import Response

from truedraft.server.errors import ApiError
from truedraft.server.generation.sampling_params import longest_request
from truedraft.server.http.auth import api_key_of
from truedraft.server.http.openapi import answer_or_stream
from truedraft.server.http.sse import PING, data_event, error_event
from truedraft.server.http.work import in_thread, in_thread_if_long
from truedraft.server.models.served import Model
from truedraft.server.routes.checks import check_fields, check_model, check_room, prompt_limits, use_model
from truedraft.server.routes.context import GenerationContext
from truedraft.server.routes.submit import start_generation
from truedraft.server.routes.waiting import GeneratingRoute
from truedraft.server.routes.writer import respond
from truedraft.server.schemas.completion import CompletionRequest
from truedraft.server.schemas.examples import INFILL
from truedraft.server.schemas.infill import InfillAnswer, InfillRequest
from truedraft.server.services import ServicesDep
from truedraft.server.text.choice import FinishedChoice
from truedraft.server.text.infill import Extra, infill_tokens
from truedraft.server.text.prompt import TokenPrompt, check_characters, check_length

router = APIRouter(tags=["generate"], route_class=GeneratingRoute)

EVENT_STREAM = "`data:` lines, each a part of the answer as JSON; the last one has `stop: true`."
# Fields that are those of a completion.
SAME = {*InfillRequest.model_fields} & {*CompletionRequest.model_fields} - {"model", "prompt", "suffix"}


@router.post(
    "/infill",
    summary="Fill a gap, as llama.cpp does",
    response_model=None,
    responses=answer_or_stream(InfillAnswer, EVENT_STREAM),
)
async def infill(
    body: Annotated[InfillRequest, Body(openapi_examples=INFILL)], request: Request, services: ServicesDep
) -> Response:
    """Fills the gap between two texts, for models with tokens that do so; others are refused. `suffix` on
    `/v1/completions` is the same in OpenAI's shape."""
    served = check_model(body.model, request, services)
    leniency = await in_thread_if_long(request, check_fields, body, services)
    model = await use_model(body.model, request, services)
    prompt = await in_thread(request, _prompt, body, model)
    room = max(0, longest_request(model.worker) - len(prompt.token_ids))
    asked = -1 if body.n_predict is None else body.n_predict
    completion = CompletionRequest(
        model=served.name,
        prompt=prompt.token_ids,
        # Without room for a token the context is too short, which is said of it.
        max_tokens=max(1, room) if asked < 0 else asked,
        **{name: getattr(body, name) for name in SAME},
    )
    check_room(completion, 1, model, api_key_of(request.scope))
    context = start_generation("completions", completion, [prompt], model, services, request, leniency)
    return await respond(request, context, InfillWriter(context))


def _prompt(body: InfillRequest, model: Model) -> TokenPrompt:
    texts = [body.input_prefix or "", body.input_suffix or "", body.prompt or ""]
    extra = [Extra(each.filename or "", each.text) for each in body.input_extra or []]
    num_characters = sum(map(len, texts)) + sum(len(part) for each in extra for part in each)
    limits = prompt_limits(model)
    check_characters(num_characters, limits, "input_prefix")
    before, after, begun = texts
    check_length(before, model.tokenizer, limits, "input_prefix")
    check_length(after, model.tokenizer, limits, "input_suffix")
    ids = infill_tokens(model.tokenizer, before, after, param="input_suffix", extra=extra, begun=begun)
    return TokenPrompt(ids, "", model.tokenizer.ending(ids))


class InfillWriter:
    end = b""
    ping = PING

    def __init__(self, context: GenerationContext) -> None:
        self._context = context

    @property
    def may_be_large(self) -> bool:
        return self._context.generation.prepared.may_be_large

    def whole(self, choices: list[FinishedChoice]) -> InfillAnswer:
        (choice,) = choices
        return self._part(choice.text, choice.token_ids, **_stop(choice))

    async def events(self) -> AsyncIterator[bytes]:
        choice = FinishedChoice(0)
        async for delta in self._context.generation.deltas():
            choice.add(delta)
            yield data_event(self._part(delta.text, delta.token_ids, stop=False))
        yield data_event(self._part("", [], **_stop(choice)))

    def failure(self, error: ApiError) -> bytes:
        return error_event(error)

    def _part(self, content: str, tokens: list[int], **fields: Any) -> InfillAnswer:
        usage = self._context.generation.usage()
        return InfillAnswer(
            content=content,
            tokens=tokens,
            model=self._context.body.model,
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
            tokens_cached=usage.prompt_tokens_details.cached_tokens,
            **fields,
        )


def _stop(choice: FinishedChoice) -> dict[str, Any]:
    word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
    kind = "limit" if choice.finish_reason == "length" else "word" if word else "eos"
    return {"stop": True, "stop_type": kind, "stopping_word": word}

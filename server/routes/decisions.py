"""``POST /v1/decisions``: how probable the answers to questions are; nothing is written."""

from typing import Annotated

from fastapi import APIRouter, Body, Request
from fastapi.responses import Response

from truedraft.server.errors import InvalidRequestError, UnsupportedParameterError
from truedraft.server.generation.scoring import Scoring
from truedraft.server.http.auth import api_key_of
from truedraft.server.http.json_route import JsonRoute
from truedraft.server.http.large_json import write_json
from truedraft.server.http.openapi import GENERATION_ERRORS
from truedraft.server.http.work import in_thread, in_thread_if_long, while_wanted
from truedraft.server.observability.request_summary import SUMMARY
from truedraft.server.routes.checks import check_fields, check_model, prompt_limits, use_model
from truedraft.server.routes.submit import cache_salt
from truedraft.server.schemas.decisions import (
    AnyQuestion,
    ChoiceQuestion,
    Decision,
    DecisionInputDetails,
    DecisionRequest,
    DecisionUsage,
    PredicateQuestion,
)
from truedraft.server.schemas.examples import DECISIONS
from truedraft.server.services import ServicesDep
from truedraft.server.settings import Settings
from truedraft.server.text.decisions import answers, ask

router = APIRouter(tags=["generate"], route_class=JsonRoute)


@router.post(
    "/v1/decisions",
    summary="Tell how probable answers are",
    response_model=Decision,
    responses=GENERATION_ERRORS,
)
async def create_decision(
    body: Annotated[DecisionRequest, Body(openapi_examples=DECISIONS)],
    request: Request,
    services: ServicesDep,
) -> Response:
    """Asks questions about one input, which is computed once, and returns the probability of each label: that
    of all of its tokens as the model's answer, as a share of all labels' of the question."""
    check_model(body.model, request, services)
    leniency = await in_thread_if_long(request, check_fields, body, services)
    model, key = await use_model(body.model, request, services), api_key_of(request.scope)
    settings = model.settings
    _check_size(body.questions, settings)
    if model.worker.encoder_decoder is not None:
        raise UnsupportedParameterError("This model's encoder reads the input: use /v1/chat/completions.")
    model.engine.check_room(1, key=key)
    asked = await in_thread(request, ask, body, model.tokenizer, prompt_limits(model))
    scoring = Scoring(
        asked,
        model.engine,
        model.metrics,
        key=key,
        cache_salt=cache_salt(body.cache_salt, key, settings),
        cache_prompt=settings.prefix_caching and body.cache_prompt is not False,
        adapter=model.adapter,
    )
    request.scope["state"][SUMMARY] = scoring.summary
    logprobs = await while_wanted(request, scoring.run())
    num_tokens = scoring.num_prompt_tokens
    decision = Decision(
        model=body.model,
        answers=[*answers(body.questions, logprobs)],
        usage=DecisionUsage(
            input_tokens=num_tokens,
            input_tokens_details=DecisionInputDetails(cached_tokens=scoring.num_cached_tokens),
            total_tokens=num_tokens,
        ),
    )
    return Response(write_json(decision), headers=leniency.headers(), media_type="application/json")


def _check_size(questions: list[AnyQuestion], settings: Settings) -> None:
    held = (
        (len(questions), "questions", "max_questions"),
        (sum(map(_num_labels, questions)), "labels in all questions", "max_labels"),
    )
    for number, what, limit in held:
        most = getattr(settings, limit)
        if number > most:
            raise InvalidRequestError(
                f"There are {number} {what}, but at most {most} are allowed ({limit}).", param="questions"
            )


def _num_labels(question: AnyQuestion) -> int:
    if isinstance(question, PredicateQuestion):
        return 2
    return len(question.choices if isinstance(question, ChoiceQuestion) else question.levels)

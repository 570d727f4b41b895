"""``POST /tokenize`` and ``POST /detokenize``: what the model's tokenizer makes of a prompt, and back."""

from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from truedraft.server.errors import InvalidRequestError
from truedraft.server.generation.sampling_params import longest_request
from truedraft.server.http.json_route import JsonRoute
from truedraft.server.http.large_json import write_json
from truedraft.server.http.openapi import BODY_ERRORS
from truedraft.server.http.work import in_thread
from truedraft.server.leniency import Leniency
from truedraft.server.models.served import Model
from truedraft.server.routes.checks import ANY_TASK, check_fields, check_model, prompt_limits, use_model
from truedraft.server.schemas.chat import TemplateFields
from truedraft.server.schemas.examples import DETOKENIZE, TOKENIZE
from truedraft.server.schemas.tokenize import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from truedraft.server.services import ServicesDep
from truedraft.server.text.pictures import placed, shown
from truedraft.server.text.prompt import (
    PromptLimits,
    check_characters,
    check_token_ids,
    render_chat,
    template_options,
)
from truedraft.server.text.tokenizer import Tokenizer

router = APIRouter(tags=["tokenize"], route_class=JsonRoute)


@router.post(
    "/tokenize",
    summary="Tokenize a text or messages",
    response_model=TokenizeAnswer,
    responses=BODY_ERRORS,
)
async def tokenize(
    body: Annotated[TokenizeRequest, Body(openapi_examples=TOKENIZE)],
    request: Request,
    services: ServicesDep,
) -> Response:
    """Returns the token ids that completions or chats would give to the model."""
    check_model(body.model, request, services)
    _check_forms(body)
    leniency = await in_thread(request, check_fields, body, services)
    model = await use_model(body.model, request, services, ANY_TASK)
    answer = await in_thread(request, _answer, body, model, leniency)
    return Response(answer, headers=leniency.headers(), media_type="application/json")


@router.post(
    "/detokenize", summary="Turn token ids into text", response_model=DetokenizeAnswer, responses=BODY_ERRORS
)
async def detokenize(
    body: Annotated[DetokenizeRequest, Body(openapi_examples=DETOKENIZE)],
    request: Request,
    services: ServicesDep,
) -> Response:
    """Returns the text of token ids, special tokens included."""
    check_model(body.model, request, services)
    leniency = check_fields(body, services)
    model = await use_model(body.model, request, services, ANY_TASK)

    def decode() -> bytes:
        check_token_ids(body.tokens, model.worker.vocab_size, "tokens")
        return write_json(
            DetokenizeAnswer(prompt=model.tokenizer.decode(body.tokens, skip_special_tokens=False))
        )

    content = await in_thread(request, decode)
    return Response(content, headers=leniency.headers(), media_type="application/json")


def _check_forms(body: TokenizeRequest) -> None:
    if body.prompt is None and body.messages is None:
        raise InvalidRequestError(
            "Give a prompt or messages.", param="prompt", code="missing_required_parameter"
        )
    if body.prompt is not None and body.messages is not None:
        raise InvalidRequestError("Give either a prompt or messages, not both.", param="messages")
    for name in TemplateFields.model_fields:
        if body.messages is None and getattr(body, name) is not None:
            raise InvalidRequestError(f"{name} is only allowed with messages.", param=name)


def _answer(body: TokenizeRequest, model: Model, leniency: Leniency) -> bytes:
    token_ids = _encode(body, model.tokenizer, prompt_limits(model), leniency)
    text_of = model.tokenizer.vocabulary.text_of
    return write_json(
        TokenizeAnswer(
            count=len(token_ids),
            max_model_len=longest_request(model.worker),
            tokens=token_ids,
            token_strs=[text_of(token_id) for token_id in token_ids] if body.return_token_strs else None,
        )
    )


def _encode(
    body: TokenizeRequest, tokenizer: Tokenizer, limits: PromptLimits, leniency: Leniency
) -> list[int]:
    if body.messages is None:
        check_characters(len(body.prompt or ""), limits, "prompt")
        return tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    pictures = shown(body.messages, limits.sight)
    text = render_chat(
        body.messages,
        tokenizer,
        param="messages",
        options=template_options(body, tokenizer, leniency),
        pictures=pictures,
        sight=limits.sight,
    )
    check_characters(len(text), limits, "messages")
    token_ids = tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
    if pictures and limits.sight is not None:
        token_ids, _ = placed(token_ids, pictures, limits.sight.facts, "messages")
    return token_ids

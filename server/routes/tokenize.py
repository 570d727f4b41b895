"""``POST /tokenize`` and ``POST /detokenize``: what the model's tokenizer makes of a prompt, and back."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Body, Response

from server.errors import InvalidRequestError
from server.openapi import BODY_ERRORS
from server.parameters import check_messages
from server.prompt import check_token_ids, render_chat
from server.routes.common import JsonRoute, check_model, ignored_header
from server.sampling_params import longest_request
from server.schemas.examples import DETOKENIZE, TOKENIZE
from server.schemas.tokenize import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from server.services import ServicesDep
from server.tokenizer import Tokenizer

router = APIRouter(tags=["tokenize"], route_class=JsonRoute)


@router.post("/tokenize", summary="Text or messages to token ids", responses=BODY_ERRORS)
async def tokenize(
    body: Annotated[TokenizeRequest, Body(openapi_examples=TOKENIZE)],
    response: Response,
    services: ServicesDep,
) -> TokenizeAnswer:
    """The token ids that completions or chats would give to the model."""
    if body.model is not None:
        check_model(body.model, services)
    _check_forms(body)
    ignored = check_messages(body.messages or [], strict=services.settings.strict_parameters)
    response.headers.update(ignored_header(ignored))
    model = services.model()
    token_ids = await asyncio.to_thread(_encode, body, model.tokenizer)
    text_of = model.tokenizer.vocabulary.text_of
    return TokenizeAnswer(
        count=len(token_ids),
        max_model_len=longest_request(model.worker),
        tokens=token_ids,
        token_strs=[text_of(token_id) for token_id in token_ids] if body.return_token_strs else None,
    )


@router.post("/detokenize", summary="Token ids to text", responses=BODY_ERRORS)
async def detokenize(
    body: Annotated[DetokenizeRequest, Body(openapi_examples=DETOKENIZE)], services: ServicesDep
) -> DetokenizeAnswer:
    """The text of token ids, special tokens included."""
    if body.model is not None:
        check_model(body.model, services)
    model = services.model()
    check_token_ids(body.tokens, model.worker.vocab_size, "tokens")
    return DetokenizeAnswer(
        prompt=await asyncio.to_thread(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
    )


def _check_forms(body: TokenizeRequest) -> None:
    if body.prompt is None and body.messages is None:
        raise InvalidRequestError(
            "Give a prompt or messages.", param="prompt", code="missing_required_parameter"
        )
    if body.prompt is not None and body.messages is not None:
        raise InvalidRequestError("Give either a prompt or messages, not both.", param="messages")
    if body.messages is None and body.add_generation_prompt is not None:
        raise InvalidRequestError(
            "add_generation_prompt is only allowed with messages.", param="add_generation_prompt"
        )


def _encode(body: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    if body.messages is None:
        return tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    text = render_chat(
        body.messages,
        tokenizer,
        param="messages",
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    return tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))

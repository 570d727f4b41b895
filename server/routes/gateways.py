"""What gateways ask of a server that was made for vLLM or SageMaker: prompts as token ids, load, probes."""

import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from truedraft.engine.parameters import PARAMETERS
from truedraft.server.errors import ClientDisconnectedError, InvalidRequestError
from truedraft.server.http.json_body import parse_json
from truedraft.server.http.json_route import JsonRoute
from truedraft.server.http.large_json import write_json
from truedraft.server.http.openapi import BODY_ERRORS
from truedraft.server.http.work import in_thread, in_thread_if_long
from truedraft.server.leniency import Leniency
from truedraft.server.models.served import Model
from truedraft.server.routes import ops
from truedraft.server.routes.checks import check_request, prompt_limits, use_model
from truedraft.server.schemas.chat import ChatRequest
from truedraft.server.schemas.completion import CompletionRequest
from truedraft.server.schemas.examples import CHATS, COMPLETIONS
from truedraft.server.schemas.operate import Health, Readiness
from truedraft.server.services import ServicesDep
from truedraft.server.text.prompt import TokenPrompt, chat_prompt, completion_prompts

router = APIRouter(tags=["gateways"])
renders = APIRouter(route_class=JsonRoute)

SAMPLING = {"n", "stop", *PARAMETERS}


class Rendered(BaseModel):
    """One prompt as the model would get it."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any] = Field(
        description="What the request says of sampling, and nothing else."
    )


class ServerLoad(BaseModel):
    server_load: int = Field(description="Requests that have been taken and are not answered yet.")


@renders.post(
    "/v1/completions/render",
    summary="Show a completion's prompts as token ids",
    response_model=list[Rendered],
    responses=BODY_ERRORS,
)
async def render_completion(
    body: Annotated[CompletionRequest, Body(openapi_examples=COMPLETIONS)],
    request: Request,
    services: ServicesDep,
) -> Response:
    """Returns the token ids of each prompt of a completion, without computing anything."""
    leniency = await in_thread_if_long(request, check_request, body, request, services)
    model = await use_model(body.model, request, services)

    def render() -> bytes:
        prompts = completion_prompts(body, model.tokenizer, prompt_limits(model))
        return write_json([_rendered("cmpl", body, model, prompt) for prompt in prompts])

    return _answer(await in_thread(request, render), leniency)


@renders.post(
    "/v1/chat/completions/render",
    summary="Show a conversation as token ids",
    response_model=Rendered,
    responses=BODY_ERRORS,
)
async def render_chat_completion(
    body: Annotated[ChatRequest, Body(openapi_examples=CHATS)], request: Request, services: ServicesDep
) -> Response:
    """Returns the token ids of a conversation as the chat template writes it, without computing anything."""
    leniency = await in_thread_if_long(request, check_request, body, request, services)
    model = await use_model(body.model, request, services)

    def render() -> bytes:
        prompt = chat_prompt(body, model.tokenizer, prompt_limits(model), leniency)
        return write_json(_rendered("chatcmpl", body, model, prompt))

    return _answer(await in_thread(request, render), leniency)


def _rendered(
    prefix: str, body: CompletionRequest | ChatRequest, model: Model, prompt: TokenPrompt
) -> Rendered:
    return Rendered(
        request_id=f"{prefix}-{uuid.uuid4().hex}",
        model=model.name,
        token_ids=prompt.token_ids,
        sampling_params=body.model_dump(include=SAMPLING, exclude_none=True),
    )


def _answer(content: bytes, leniency: Leniency) -> Response:
    return Response(content, headers=leniency.headers(), media_type="application/json")


@router.get("/load", summary="Load")
async def load(services: ServicesDep) -> ServerLoad:
    """Counts unfinished requests, as vLLM does with its load tracking."""
    return ServerLoad(server_load=services.models.num_requests)


@router.get("/v1/health", summary="Liveness, for gateways that only reach /v1")
async def health(services: ServicesDep) -> Health:
    """Answers as ``/health``."""
    return await ops.health(services)


@router.get("/ping", summary="Readiness, for SageMaker", response_model=Readiness, responses=ops.NOT_READY)
async def ping(services: ServicesDep) -> JSONResponse:
    """Answers as ``/ready``."""
    return await ops.ready(services)


class Invocations:
    """Hands the body of ``POST /invocations`` to the route of chats if it has messages, else to that of
    completions: SageMaker knows no other path."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            content = await request.body()
        except ClientDisconnect as error:
            raise ClientDisconnectedError("The client closed the connection.") from error
        body = await in_thread_if_long(request, parse_json, content)
        if not isinstance(body, dict) or not {"messages", "prompt"} & body.keys():
            raise InvalidRequestError(
                "Give messages, as for /v1/chat/completions, or a prompt, as for /v1/completions.",
                code="missing_required_parameter",
            )
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        unread = [content]

        async def receive_again() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await receive()

        below_root = scope.get("root_path", "") + path
        handed_on = {**scope, "path": below_root, "raw_path": below_root.encode()}
        await request.app.router(handed_on, receive_again, send)


router.include_router(renders)
router.routes.append(Route("/invocations", Invocations(), methods=["POST"], include_in_schema=False))

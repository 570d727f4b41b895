"""These routes load and unload models, let them sleep, and tell what becomes of them.

``/models/load`` and ``/models/unload`` are llama.cpp's, the others vLLM's but ``/prefix_cache/clear``, which
lets a model forget what requests have left for others.
"""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Body, Query, Request
from fastapi.responses import Response

from truedraft.server.errors import ErrorAnswer, InvalidRequestError, PermissionDeniedError
from truedraft.server.http.json_route import JsonRoute
from truedraft.server.http.openapi import BODY_ERRORS, Responses
from truedraft.server.http.sse import EventStreamResponse, data_event
from truedraft.server.http.work import while_wanted
from truedraft.server.models.served import ServedModel
from truedraft.server.routes.checks import check_model, operated_model, rights_of, use_model
from truedraft.server.routes.models import model_status
from truedraft.server.routes.responding import PING_SECONDS
from truedraft.server.schemas.models import (
    LoadAdapter,
    ModelCommand,
    ModelEvent,
    SleepStatus,
    Success,
    UnloadAdapter,
)
from truedraft.server.services import Services, ServicesDep

# A loading worker names its stages without a message to whoever waits for news.
LOOK_SECONDS = 0.5
COMMANDS: Responses = BODY_ERRORS | {
    403: {"model": ErrorAnswer, "description": "The key has no right to operate models."},
    409: {"model": ErrorAnswer, "description": "Requests use the model for longer than `drain_timeout`."},
}
QUERIES: Responses = {status: answer for status, answer in COMMANDS.items() if status not in (413, 415)}

router = APIRouter(tags=["models"])
commands = APIRouter(tags=["models"], route_class=JsonRoute)

Name = Annotated[str | None, Query(description="Name of the model; it may be left out if there is one.")]


@commands.post("/models/load", summary="Load a model", responses=COMMANDS)
async def load_model(
    body: Annotated[ModelCommand, Body()], request: Request, services: ServicesDep
) -> Success:
    """Answers once the model is loaded; `GET /models/events` tells how far it is meanwhile."""
    await _load(operated_model(body.model, request, services), request, services)
    return Success()


@commands.post("/models/unload", summary="Unload a model", responses=COMMANDS)
async def unload_model(
    body: Annotated[ModelCommand, Body()], request: Request, services: ServicesDep
) -> Success:
    """Answers once the memory is free. What the model is answering is finished before; a request that names
    it later loads it again."""
    await services.models.unload(operated_model(body.model, request, services))
    return Success()


@commands.post("/v1/load_lora_adapter", summary="Load a LoRA adapter", responses=COMMANDS)
async def load_lora_adapter(
    body: Annotated[LoadAdapter, Body()], request: Request, services: ServicesDep
) -> Success:
    """Answers once requests can name the adapter in `model`. What runs with one that is replaced is finished
    with that."""
    served = _adaptable(body.base_model_name, request, services)
    model = await use_model(served.name, request, services)

    def taken() -> set[str]:
        others = {name for each in services.models for name in each.adapters.names if each is not served}
        return others.union(*(each.settings.served_names for each in services.models))

    loading = served.adapters.load(
        body.lora_name, body.lora_path, model.engine, taken, replaces=body.load_inplace
    )
    await loading  # whoever has asked may leave: the workers have it then
    return Success()


@commands.post("/v1/unload_lora_adapter", summary="Unload a LoRA adapter", responses=COMMANDS)
async def unload_lora_adapter(
    body: Annotated[UnloadAdapter, Body()], request: Request, services: ServicesDep
) -> Success:
    """Answers at once: no request gets the adapter any more, and those that have it are finished."""
    served = _adaptable(body.lora_name, request, services)
    name = served.adapters.own_name(body.lora_name)
    if name is None:
        raise InvalidRequestError(f"'{body.lora_name}' is a model: use /models/unload.", param="lora_name")
    model = await use_model(body.lora_name, request, services)  # a key may have rights to the adapter alone
    served.adapters.unload(name, model.engine, model.worker)
    return Success()


@router.get(
    "/models/events",
    summary="Watch the models",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}}, "default": {"model": ErrorAnswer}},
)
async def watch_models(request: Request, services: ServicesDep) -> Response:
    """Streams what each model is at: all of them, then every change, with bytes while one is fetched."""
    models = services.models.allowed(rights_of(request, services).models)
    return EventStreamResponse(_events(models, services), lambda: None, {}, ping_seconds=PING_SECONDS)


@router.post("/sleep", summary="Free a model's memory", responses=QUERIES)
async def sleep(
    request: Request,
    services: ServicesDep,
    model: Name = None,
    level: Annotated[int, Query(ge=1, le=2, description="1 or 2: both free all of it.")] = 1,
) -> Success:
    """Ends the model's workers once they have answered what they have. Requests get 503 until `/wake_up`."""
    await services.models.unload(operated_model(model, request, services), "sleeping")
    return Success()


@router.post("/wake_up", summary="Load a model that sleeps", responses=QUERIES)
async def wake_up(
    request: Request,
    services: ServicesDep,
    model: Name = None,
    tags: Annotated[list[str] | None, Query(description="Must be left out.")] = None,
) -> Success:
    """Answers once the model is loaded again."""
    if tags:
        raise InvalidRequestError(
            "A model wakes up as a whole: leave 'tags' out.", param="tags", code="unsupported_parameter"
        )
    await _load(operated_model(model, request, services), request, services)
    return Success()


@router.post("/prefix_cache/clear", summary="Forget prefixes", responses=QUERIES)
async def clear_prefix_cache(request: Request, services: ServicesDep, model: Name = None) -> Success:
    """Answers once nothing that requests have left in the prefix cache is found any more, in memory or in
    `prefix_cache_dir`. A model that is not loaded is loaded for it. Requests that are running go on."""
    operated_model(model, request, services)
    used = await use_model(model, request, services)
    await used.engine.clear_prefixes()
    return Success()


@router.get("/is_sleeping", summary="Whether a model sleeps", responses=QUERIES)
async def is_sleeping(request: Request, services: ServicesDep, model: Name = None) -> SleepStatus:
    """Answers true from `/sleep` to `/wake_up`."""
    asked = check_model(model, request, services)
    return SleepStatus(is_sleeping=asked.condition.status == "sleeping")


def _adaptable(name: str | None, request: Request, services: Services) -> ServedModel:
    """Returns the model whose adapters may be loaded and unloaded by this request."""
    model = operated_model(name, request, services, by_adapter=True)
    if not model.settings.allow_lora_updating:
        raise PermissionDeniedError(
            "This server does not load LoRA adapters while it runs (setting allow_lora_updating)."
        )
    return model


async def _load(model: ServedModel, request: Request, services: Services) -> None:
    await while_wanted(request, services.models.load(model))


async def _events(models: list[ServedModel], services: Services) -> AsyncIterator[bytes]:
    told: dict[str, ModelEvent] = {}
    while not services.is_draining:
        for model in models:
            event = ModelEvent(model=model.name, status=model_status(model))
            if told.get(model.name) != event:
                told[model.name] = event
                yield data_event(event)
        await services.models.news(LOOK_SECONDS)

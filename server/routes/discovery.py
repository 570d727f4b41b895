"""Clients of Ollama and llama.cpp find the model by these; all of them only read."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Body, Request

from truedraft.server.errors import ErrorAnswer
from truedraft.server.generation.sampling_params import longest_request
from truedraft.server.http.json_route import JsonRoute
from truedraft.server.http.openapi import BODY_ERRORS
from truedraft.server.models.served import ServedModel
from truedraft.server.routes.checks import ANY_TASK, check_fields, check_model, rights_of, use_model
from truedraft.server.schemas.discovery import (
    OllamaDetails,
    OllamaModel,
    OllamaShow,
    OllamaTags,
    OllamaVersion,
    Props,
    PropsSettings,
    ShowRequest,
)
from truedraft.server.schemas.examples import SHOW
from truedraft.server.services import Services, ServicesDep
from truedraft.server.version import package_version

router = APIRouter(tags=["models"])


@router.get("/api/version", summary="Version, as Ollama tells it")
async def ollama_version() -> OllamaVersion:
    """Returns this server's own version."""
    return OllamaVersion(version=package_version())


@router.get("/api/tags", summary="List the models, as Ollama does")
async def ollama_tags(request: Request, services: ServicesDep) -> OllamaTags:
    """Returns the served names. Requests go to `/v1`: Ollama's own endpoints for them are not served."""
    models = services.models
    names = models.names_for(rights_of(request, services).models)
    return OllamaTags(models=[_tag(name, models.find(name), services) for name in names])


async def ollama_show(
    body: Annotated[ShowRequest, Body(openapi_examples=SHOW)], request: Request, services: ServicesDep
) -> OllamaShow:
    """Returns the chat template, the context's length and what the model can do."""
    name = body.name if body.model is None else body.model
    served = check_model(name, request, services)
    check_fields(body, services)
    model = await use_model(name, request, services, ANY_TASK)
    templates = model.tokenizer.templates
    generates = model.worker.task == "generate"
    can = {
        "completion": generates,
        "vision": model.worker.vision is not None,
        "tools": generates and bool(templates.source),
        "thinking": generates and templates.reasoning_marks is not None,
        "insert": generates and {"fim_pre", "fim_suf", "fim_mid"} <= model.tokenizer.fill_ids.keys(),
        "embedding": model.worker.task == "embed",
    }
    recommended = model.worker.default_sampling
    return OllamaShow(
        parameters="\n".join(f"{key} {value:g}" for key, value in recommended.items()),
        template=templates.source,
        details=_details(served),
        model_info={
            "general.architecture": "general",
            "general.basename": model.settings.public_target,
            "general.context_length": longest_request(model.worker),
        },
        capabilities=[each for each, has in can.items() if has],
        modified_at=_started(services),
    )


# This route alone has a body.
router.add_api_route(
    "/api/show",
    ollama_show,
    methods=["POST"],
    summary="Describe a model, as Ollama does",
    responses=BODY_ERRORS,
    route_class_override=JsonRoute,
)


@router.get(
    "/props",
    summary="Describe the server, as llama.cpp does",
    responses={503: {"model": ErrorAnswer, "description": "Loading."}, "default": {"model": ErrorAnswer}},
)
async def llama_props(request: Request, services: ServicesDep) -> Props:
    """Returns the context's length, the chat template and how many sequences run at the same time."""
    model = await use_model(None, request, services, ANY_TASK)
    worker = model.worker
    settings = PropsSettings(n_ctx=longest_request(worker), params=worker.default_sampling)
    return Props(
        default_generation_settings=settings,
        total_slots=worker.max_num_sequences,
        model_alias=model.name,
        model_path=model.settings.public_target,
        chat_template=model.tokenizer.templates.source,
        modalities={"vision": worker.vision is not None, "audio": False},
        build_info=f"truedraft {package_version()}",
    )


def _tag(name: str, model: ServedModel, services: Services) -> OllamaModel:
    return OllamaModel(
        name=name,
        model=name,
        modified_at=_started(services),
        size=model.worker.weight_bytes if model.worker else 0,
        digest=model.fingerprint or "",
        details=_details(model),
    )


def _details(model: ServedModel) -> OllamaDetails:
    weights = model.worker.weights if model.worker else []
    is_gguf = model.settings.public_target.lower().endswith(".gguf")
    return OllamaDetails(
        format="gguf" if is_gguf else "safetensors", quantization_level=weights[0] if weights else ""
    )


def _started(services: Services) -> str:
    return datetime.fromtimestamp(services.started, UTC).isoformat()

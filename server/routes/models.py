"""``GET /v1/models`` and ``GET /v1/models/{id}``: the served names."""

from fastapi import APIRouter, HTTPException, Request

from truedraft.server.errors import ErrorAnswer
from truedraft.server.generation.sampling_params import longest_request
from truedraft.server.models.served import ServedModel
from truedraft.server.routes.checks import check_model, rights_of
from truedraft.server.schemas.models import WORDS, ModelCard, ModelList, ModelStatus
from truedraft.server.services import Services, ServicesDep
from truedraft.server.settings import public_name

router = APIRouter(tags=["models"])


@router.get("/v1/models", summary="List the model's names")
async def list_models(request: Request, services: ServicesDep) -> ModelList:
    """Returns the served names that the request's key may use, with what each model is at if there are
    several."""
    names = services.models.names_for(rights_of(request, services).models)
    return ModelList(data=[_card(name, services) for name in names])


# Hub ids hold a slash, so the id is the rest of the path.
@router.get(
    "/v1/models/{model_id:path}",
    summary="Look up a model",
    responses={
        404: {"model": ErrorAnswer, "description": "Unknown model."},
        "default": {"model": ErrorAnswer},
    },
)
async def get_model(model_id: str, request: Request, services: ServicesDep) -> ModelCard:
    """Returns the model, if it is served by this name."""
    if not model_id:  # a list with a slash after it
        raise HTTPException(404)
    check_model(model_id, request, services)
    return _card(model_id, services)


def _card(name: str, services: Services) -> ModelCard:
    model = services.models.find(name)
    worker, tokenizer = model.worker, model.tokenizer
    templates = tokenizer.templates if tokenizer is not None else None
    adapter = model.adapters.own_name(name)
    return ModelCard(
        id=name,
        created=services.started,
        root=model.settings.public_target if adapter is None else public_name(model.adapters.path(adapter)),
        parent=None if adapter is None else model.name,
        max_model_len=longest_request(worker) if worker else None,
        tool_form=templates.call_format.name if templates is not None and templates.source else None,
        status=model_status(model) if services.models.are_several else None,
    )


def model_status(model: ServedModel) -> ModelStatus:
    condition, progress = model.condition, model.progress
    return ModelStatus(
        value=WORDS.get(condition.status, condition.status),
        reason=condition.reason or None,
        bytes=progress.done if progress else None,
        total_bytes=progress.total if progress else None,
        stage=model.stage or None if condition.status == "loading" else None,
    )

"""``GET /v1/models`` and ``GET /v1/models/{id}``: the one served name."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from server.errors import ErrorAnswer, ModelNotFoundError
from server.services import Services, ServicesDep

router = APIRouter(tags=["models"])


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "foretoken"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.get("/v1/models", summary="List the model")
async def list_models(services: ServicesDep) -> ModelList:
    """A list of one."""
    return ModelList(data=[_card(services)])


# Hub ids hold a slash, so the id is the rest of the path.
@router.get(
    "/v1/models/{model_id:path}",
    summary="Look a model up",
    responses={
        404: {"model": ErrorAnswer, "description": "Unknown model."},
        "default": {"model": ErrorAnswer},
    },
)
async def get_model(model_id: str, services: ServicesDep) -> ModelCard:
    """The model, if it is the served one."""
    card = _card(services)
    if model_id != card.id:
        raise ModelNotFoundError(f"The model '{model_id}' does not exist; this server has '{card.id}'.")
    return card


def _card(services: Services) -> ModelCard:
    return ModelCard(id=services.settings.served_model_name, created=services.started)

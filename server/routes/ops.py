"""Operators and probes ask these: ``/health``, ``/ready``, ``/metrics``, ``/version``, ``/speculation``."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder

from truedraft.server.errors import ErrorAnswer, InvalidRequestError, NotReadyError
from truedraft.server.http.openapi import Responses
from truedraft.server.observability.speculation_status import speculation_status
from truedraft.server.routes.checks import check_model
from truedraft.server.schemas.operate import Health, Readiness, SpeculationStatus, Version, WorkerHealth
from truedraft.server.services import ServicesDep
from truedraft.server.settings import public_name
from truedraft.server.version import package_version

router = APIRouter(tags=["operate"])

ModelName = Annotated[str | None, Query(description="Name of one model of several.")]
NOT_READY: Responses = {
    404: {"model": ErrorAnswer, "description": "Unknown model."},
    503: {"model": Readiness, "description": "Fetching, loading, restarting, draining or failed."},
    "default": {"model": ErrorAnswer},
}
WorkerNumber = Annotated[int, Query(ge=0, description="Number of the worker that is asked, from 0.")]


@router.get("/health", summary="Liveness")
async def health(services: ServicesDep) -> Health:
    """Answers 200 while this process lives, whatever its workers do; the body has the state of each."""
    return Health(
        workers=[
            WorkerHealth(
                model=model.name if services.models.are_several else None,
                worker=number,
                status=worker.state.status,
                reason=None if worker.state.status == "ready" else worker.state.reason,
                device=worker.state.worker.device if worker.state.worker else None,
                sequences=model.engine.num_sequences(number) if model.engine else 0,
            )
            for model in services.models
            for number, worker in enumerate(model.workers)
        ]
    )


@router.get(
    "/ready",
    summary="Readiness",
    response_model=Readiness,
    responses=NOT_READY,
)
async def ready(services: ServicesDep, model: ModelName = None) -> JSONResponse:
    """Answers 200 only when a request can be taken; else 503 with the reason. Of several models all count
    that are loaded at start, or the one that is named."""
    asked = services.models.loaded_at_start if model is None else [services.models.find(model)]
    condition = services.not_ready(asked)
    if condition is None:
        return JSONResponse({"status": "ready"})
    body = {"status": condition.status, "reason": condition.reason}
    return JSONResponse(body, NotReadyError.status, {"retry-after": str(NotReadyError.retry_after)})


@router.get(
    "/version",
    summary="Version",
    responses={
        404: {"model": ErrorAnswer, "description": "Unknown model."},
        "default": {"model": ErrorAnswer},
    },
)
async def version(services: ServicesDep, model: ModelName = None) -> Version:
    """Returns the version, the models, and what computes them: of the model that is named, or the first."""
    served = services.models.first if model is None else services.models.find(model)
    settings, worker = served.settings, served.worker
    return Version(
        version=package_version(),
        model=settings.model_name,
        target=settings.public_target,
        draft=public_name(drafter) if (drafter := worker.draft if worker else settings.draft) else None,
        device=worker.device if worker else None,
        dtype=worker.dtype if worker else None,
        forward=worker.forward if worker else None,
        weights=worker.weights if worker else None,
        system_fingerprint=served.fingerprint,
    )


@router.get(
    "/speculation",
    summary="Speculation status",
    responses={
        400: {"model": ErrorAnswer, "description": "No such worker, or several models and no name."},
        404: {"model": ErrorAnswer, "description": "Unknown model."},
        "default": {"model": ErrorAnswer},
    },
)
async def speculation(
    request: Request, services: ServicesDep, worker: WorkerNumber = 0, model: ModelName = None
) -> SpeculationStatus:
    """Tells who drafts, how much is accepted at which position, what it gains, and why it is on or off."""
    served = check_model(model, request, services)
    workers = served.workers
    if worker >= served.settings.num_workers:
        number = served.settings.num_workers
        raise InvalidRequestError(f"There are {number} workers, numbered from 0.", param="worker")
    if not workers:
        return speculation_status(served.settings, None, None, {})
    asked = workers[worker]
    return speculation_status(served.settings, asked.state.worker, asked.stats, asked.speculation)


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}},
)
async def metrics(request: Request, services: ServicesDep) -> Response:
    """Returns Prometheus' text format, or OpenMetrics for a client that accepts it."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(services.metrics.exposed), media_type=content_type)

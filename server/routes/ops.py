"""Operators and probes ask these: ``/health``, ``/ready``, ``/metrics``, ``/version``, ``/speculation``."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder

from truedraft.server.errors import ErrorAnswer, InvalidRequestError, NotReadyError
from truedraft.server.http.openapi import Responses
from truedraft.server.observability.speculation_status import speculation_status
from truedraft.server.schemas.operate import Health, Readiness, SpeculationStatus, Version, WorkerHealth
from truedraft.server.services import ServicesDep
from truedraft.server.settings import public_name
from truedraft.server.version import package_version

router = APIRouter(tags=["operate"])

NOT_READY: Responses = {503: {"model": Readiness, "description": "Loading, restarting, draining or failed."}}
WorkerNumber = Annotated[int, Query(ge=0, description="Number of the worker that is asked, from 0.")]


@router.get("/health", summary="Liveness")
async def health(services: ServicesDep) -> Health:
    """Answers 200 while this process lives, whatever its workers do; the body has the state of each."""
    engine = services.models.first.engine
    return Health(
        workers=[
            WorkerHealth(
                worker=number,
                status=worker.state.status,
                reason=None if worker.state.status == "ready" else worker.state.reason,
                device=worker.state.worker.device if worker.state.worker else None,
                sequences=engine.num_sequences(number),
            )
            for number, worker in enumerate(engine.workers)
        ]
    )


@router.get(
    "/ready",
    summary="Readiness",
    response_model=Readiness,
    responses=NOT_READY,
)
async def ready(services: ServicesDep) -> JSONResponse:
    """Answers 200 only when a request can be taken; else 503 with the reason."""
    model = services.models.first
    reason = services.not_ready_reason(model)
    if reason is None:
        return JSONResponse({"status": "ready"})
    body = {"status": services.status(model), "reason": reason}
    return JSONResponse(body, NotReadyError.status, {"retry-after": str(NotReadyError.retry_after)})


@router.get("/version", summary="Version")
async def version(services: ServicesDep) -> Version:
    """Returns the version, the models, and what computes them."""
    served = services.models.first
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
        400: {"model": ErrorAnswer, "description": "No such worker."},
        "default": {"model": ErrorAnswer},
    },
)
async def speculation(services: ServicesDep, worker: WorkerNumber = 0) -> SpeculationStatus:
    """Tells who drafts, how much is accepted at which position, what it gains, and why it is on or off."""
    served = services.models.first
    workers = served.engine.workers
    if worker >= len(workers):
        raise InvalidRequestError(f"There are {len(workers)} workers, numbered from 0.", param="worker")
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

"""What operators and probes ask: ``/health``, ``/ready``, ``/metrics``, ``/version``, ``/speculation``."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder

from server.errors import NotReadyError
from server.schemas.operate import Health, Readiness, SpeculationState, Version
from server.services import ServicesDep
from server.settings import public_name
from server.speculation_state import speculation_state
from server.version import package_version

router = APIRouter(tags=["operate"])


@router.get("/health", summary="Liveness")
async def health() -> Health:
    """200 while this process lives, whatever the worker does."""
    return Health()


@router.get(
    "/ready",
    summary="Readiness",
    response_model=Readiness,
    responses={503: {"model": Readiness, "description": "Loading, restarting, draining or failed."}},
)
async def ready(services: ServicesDep) -> JSONResponse:
    """200 only when a request can be taken; else 503 with the reason."""
    reason = services.not_ready_reason()
    if reason is None:
        return JSONResponse({"status": "ready"})
    body = {"status": services.status, "reason": reason}
    return JSONResponse(body, NotReadyError.status, {"retry-after": str(NotReadyError.retry_after)})


@router.get("/version", summary="Version")
async def version(services: ServicesDep) -> Version:
    """Version, models, device and dtype."""
    settings, worker = services.settings, services.engine.state.worker
    return Version(
        version=package_version(),
        model=settings.model_name,
        target=settings.public_target,
        draft=public_name(settings.draft) if settings.draft else None,
        device=worker.device if worker else None,
        dtype=worker.dtype if worker else None,
    )


@router.get("/speculation", summary="Speculation status")
async def speculation(services: ServicesDep) -> SpeculationState:
    """Who drafts, how much is accepted at which position, what it gains, and why it is on or off."""
    engine = services.engine
    return speculation_state(services.settings, engine.state.worker, engine.stats, engine.speculation)


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}},
)
async def metrics(request: Request, services: ServicesDep) -> Response:
    """Prometheus text, or OpenMetrics for a client that accepts it."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(services.metrics.exposed), media_type=content_type)

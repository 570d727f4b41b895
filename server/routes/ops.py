"""What operators and probes ask: ``/health``, ``/ready``, ``/metrics``, ``/version``, ``/speculation``."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder

from server.errors import NotReadyError
from server.services import ServicesDep
from server.version import package_version

router = APIRouter(tags=["operate"])


@router.get("/health")
async def health() -> dict[str, str]:
    """200 while this process lives, whatever the worker does."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(services: ServicesDep) -> JSONResponse:
    """200 only when a request can be taken; else 503 with the reason."""
    reason = services.not_ready_reason()
    if reason is None:
        return JSONResponse({"status": "ready"})
    body = {"status": services.status, "reason": reason}
    return JSONResponse(body, NotReadyError.status, {"retry-after": str(NotReadyError.retry_after)})


@router.get("/version")
async def version(services: ServicesDep) -> dict[str, str | None]:
    """What runs here. Device and dtype are null until the models are loaded."""
    settings, worker = services.settings, services.engine.state.worker
    return {
        "name": "foretoken",
        "version": package_version(),
        "model": settings.served_model_name,
        "target": settings.target,
        "draft": settings.draft,
        "device": worker.device if worker else None,
        "dtype": worker.dtype if worker else None,
    }


@router.get("/speculation")
async def speculation(services: ServicesDep) -> dict[str, Any]:
    """Who drafts and how verdicts are made; how many tokens are drafted, by which costs, and why."""
    settings, worker = services.settings, services.engine.state.worker
    return {
        "method": worker.method if worker else None,
        "methods": worker.methods if worker else None,
        "num_speculative_tokens": settings.num_speculative_tokens,
        "verification": settings.verification,
        **services.engine.speculation,
    }


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, services: ServicesDep) -> Response:
    """Prometheus text, or OpenMetrics for a client that accepts it."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(services.metrics.registry), media_type=content_type)

"""Puts the HTTP application together: services, middleware, error handlers, routes.

``create_app`` is the only place that knows all of them. ``server.cli.launch`` runs what it returns; tests do
too, with workers of their own.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from truedraft.server.errors import kinds_of_errors
from truedraft.server.http.allowed_hosts import AllowedHostsMiddleware, allowed_hosts
from truedraft.server.http.at_end import AtEndMiddleware
from truedraft.server.http.auth import KeyAuthMiddleware
from truedraft.server.http.body_limit import BodyLimitMiddleware, HeldBodies
from truedraft.server.http.error_handlers import install_error_handlers
from truedraft.server.http.openapi import DESCRIPTION, TAGS, install_openapi
from truedraft.server.http.request_id import RequestIdMiddleware
from truedraft.server.http.work import Work
from truedraft.server.models.registry import Models
from truedraft.server.observability import tracing
from truedraft.server.observability.access_log import AccessLogMiddleware
from truedraft.server.observability.metrics import Metrics
from truedraft.server.observability.otel import traces_are_exported
from truedraft.server.observability.tracing import TracingMiddleware
from truedraft.server.routes import (
    chat,
    completions,
    decisions,
    discovery,
    embeddings,
    gateways,
    infill,
    load_models,
    messages,
    models,
    ops,
    page,
    rerank,
    responses,
    tokenize,
)
from truedraft.server.services import Services
from truedraft.server.settings import Settings
from truedraft.server.version import package_version


def create_app(settings: Settings, served: Models, metrics: Metrics) -> FastAPI:
    services = Services(settings, served, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await services.start()
        try:
            yield
        finally:
            await services.stop()

    app = FastAPI(
        title="Truedraft",
        summary="OpenAI-compatible inference with exact speculative sampling.",
        description=DESCRIPTION,
        openapi_tags=TAGS,
        version=package_version(),
        lifespan=lifespan,
        openapi_url=None,  # see install_openapi
        # FastAPI's own pages load their scripts from elsewhere; routes/page.py has one that does not.
        docs_url=None,
        redoc_url=None,
        # A redirect names the scheme that this process sees, which behind a proxy is the wrong one.
        redirect_slashes=False,
    )
    app.state.services = services
    app.state.work = services.work
    app.state.picture_work = services.picture_work
    routes = (
        completions,
        chat,
        responses,
        messages,
        decisions,
        infill,
        embeddings,
        rerank,
        tokenize,
        discovery,
        models,
        load_models,
        gateways,
        ops,
        page,
    )
    for router in (load_models.commands, *(route.router for route in routes)):
        app.include_router(router)
        _add_series(router, metrics)
    install_error_handlers(app, metrics.count_error)
    install_openapi(app, settings)
    _add_middleware(app, settings, metrics, services.work)
    return app


def _add_series(router: APIRouter, metrics: Metrics) -> None:
    """Makes the series of all answers that the routes may give, before the first one."""
    statuses = {200, 500, *(kind.status for kind in kinds_of_errors())}
    for route in router.routes:
        if isinstance(route, APIRoute):
            metrics.server.add_route(
                route.path, statuses if "POST" in (route.methods or ()) else (200, 500, 503)
            )


def _add_middleware(app: FastAPI, settings: Settings, metrics: Metrics, work: Work) -> None:
    """Innermost first: a preflight must pass CORS without a key, and every answer gets a request id."""
    app.add_middleware(AtEndMiddleware)
    held = HeldBodies(settings.max_held_bodies)
    metrics.server.held_bytes.set_function(lambda: held.num_bytes)
    app.add_middleware(
        BodyLimitMiddleware,
        settings=settings,
        count_error=metrics.count_error,
        held=held,
        num_abandoned=work.num_abandoned,
    )
    if settings.api_keys:
        keys = [key.get_secret_value() for key in settings.api_keys]
        app.add_middleware(KeyAuthMiddleware, api_keys=keys, count_error=metrics.count_error)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,  # a page of these origins may call a server of its user's network
            expose_headers=[
                "x-request-id",
                "request-id",
                "x-truedraft-ignored",
                "x-truedraft-adjusted",
                "x-truedraft-tool-form",
                "retry-after",
            ],
        )
    if hosts := allowed_hosts(settings):
        app.add_middleware(AllowedHostsMiddleware, hosts=hosts, count_error=metrics.count_error)
    app.add_middleware(
        RequestIdMiddleware,
        root_path=settings.root_path,
        count_error=metrics.count_error,
        count_answer=metrics.count_answer,
    )
    app.add_middleware(AccessLogMiddleware, observe_stage=metrics.observe_stage)
    if settings.otel and traces_are_exported(os.environ):
        app.add_middleware(TracingMiddleware, provider=tracing.make_provider(), model=settings.model_name)

"""Truedraft as a deployment of Ray Serve, for several machines; needs ``pip install '.[ray]'`` in a checkout.

    serve deploy deploy/ray_serve.yaml
    serve run truedraft.server.ray_serve:app target=./my-model draft=./my-small-model

Each replica is the application of ``truedraft serve`` with workers of its own. Ray's proxies are the server:
they listen, distribute requests, and let a replica finish its requests before it is removed.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from prometheus_client import disable_created_metrics
from ray import serve

from truedraft.server.cli.launch import check_models, make_app
from truedraft.server.observability.logs import configure_logging
from truedraft.server.settings import Settings

# Settings of tasks that Ray takes over.
OF_THE_PROXY = {"config", "host", "port", "uds", "root_path", "ssl_certfile", "ssl_keyfile", "drain_timeout"}


def app(args: dict[str, Any]) -> serve.Application:
    """Is what ``import_path`` names; ``args`` are settings of ``truedraft serve``."""
    return deployment(args).bind()


def deployment(args: dict[str, Any]) -> serve.Deployment:
    """Takes other options than those of ``serve run``: ``deployment(args).options(...).bind()``."""
    _settings(args)  # a mistake is found here, before any replica starts

    def build() -> FastAPI:
        return make_replica(_settings(args))

    @serve.deployment
    @serve.ingress(build)
    class Truedraft:
        app: FastAPI  # set by ``serve.ingress``

        def check_health(self) -> None:
            """Called by Ray, which replaces a replica that raises."""
            state = self.app.state.services.models.first.condition
            if state.status == "failed":
                raise RuntimeError(state.reason)

    return Truedraft


def make_replica(settings: Settings) -> FastAPI:
    """Returns the application; its start-up ends when a worker is ready."""
    configure_logging(settings.log_level, settings.log_format)
    disable_created_metrics()  # type: ignore[no-untyped-call]
    for own in settings.of_models():
        check_models(own)
    application = make_app(settings)
    lifespan = application.router.lifespan_context

    @asynccontextmanager
    async def until_ready(_: FastAPI) -> AsyncIterator[None]:
        async with lifespan(application):
            await application.state.services.models.wait_until_ready()
            yield

    application.router.lifespan_context = until_ready
    return application


def _settings(args: dict[str, Any]) -> Settings:
    settings = Settings(**{"allowed_hosts": ["*"], **args})  # whom Ray lets in is asked by what name it likes
    if wrong := sorted(OF_THE_PROXY & settings.model_fields_set):
        raise ValueError(f"Set in Ray Serve's own configuration, not here: {', '.join(wrong)}")
    return settings

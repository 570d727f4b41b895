"""What every route needs, in one object: settings, engine, tokenizer, metrics, and whether they are ready.

Built by ``server.app``; routes get it through ``ServicesDep``.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from engine.messages import Ready
from server.config import Settings
from server.engine_client import EngineClient
from server.errors import NotReadyError
from server.metrics import Metrics
from server.tokenizer import Tokenizer

TokenizerLoader = Callable[[], Tokenizer]


class TokenizerFailedError(Exception):
    """The tokenizer could not be loaded, so the server cannot start."""


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model as the front end sees it."""

    tokenizer: Tokenizer
    worker: Ready


class Services:
    def __init__(
        self, settings: Settings, engine: EngineClient, metrics: Metrics, load_tokenizer: TokenizerLoader
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = metrics
        self.started = int(time.time())
        self._load_tokenizer = load_tokenizer
        self._tokenizer: asyncio.Task[Tokenizer] | None = None
        self._is_draining = False

    async def start(self) -> None:
        """Begin to load both; returns at once, so that the port opens before the models are there."""
        self._tokenizer = asyncio.create_task(asyncio.to_thread(self._load_tokenizer))
        await self.engine.start()

    async def stop(self) -> None:
        await self.engine.stop()
        if self._tokenizer is not None:
            await asyncio.gather(self._tokenizer, return_exceptions=True)

    async def wait_until_ready(self) -> Ready:
        """Wait for the first load; raise ``WorkerFailedError`` or ``TokenizerFailedError``."""
        assert self._tokenizer is not None
        try:
            await asyncio.shield(self._tokenizer)
        except Exception as error:
            raise TokenizerFailedError(f"The tokenizer could not be loaded: {error}") from error
        return await self.engine.wait_until_ready()

    def drain(self) -> None:
        """Take no more requests; those that are running go on."""
        self._is_draining = True

    @property
    def status(self) -> str:
        """One word for ``/ready``."""
        if self._is_draining:
            return "draining"
        return "loading" if self._is_loading else self.engine.state.status

    @property
    def _is_loading(self) -> bool:
        """The engine may be ready before the tokenizer."""
        is_waiting = self._tokenizer is None or not self._tokenizer.done()
        return is_waiting and self.engine.state.status == "ready"

    def not_ready_reason(self) -> str | None:
        """Why a request cannot be taken now; None if it can."""
        state = self.engine.state
        if self._is_draining:
            return "The server is draining: it finishes what is running and takes no more requests."
        if state.status != "ready":
            return state.reason
        if self._tokenizer is None or not self._tokenizer.done():
            return "The tokenizer is loading."
        if error := self._tokenizer.exception():
            return f"The tokenizer could not be loaded: {error}"
        return None

    def model(self) -> Model:
        """The loaded model, or ``NotReadyError``."""
        reason = self.not_ready_reason()
        worker = self.engine.state.worker
        if reason is not None or worker is None or self._tokenizer is None:
            raise NotReadyError(reason or "The models are loading.")
        return Model(self._tokenizer.result(), worker)


def get_services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


async def _provide_services(request: Request) -> Services:
    """A coroutine, because FastAPI sends every plain function through a thread, for each request."""
    return get_services(request)


ServicesDep = Annotated[Services, Depends(_provide_services)]

"""One object has what every route needs: settings, models, metrics, and whether a request can be taken.

Built by ``server.app``; routes get it through ``ServicesDep``.
"""

import time
from collections.abc import Iterable
from functools import partial
from typing import Annotated

from fastapi import Depends, Request

from truedraft.server.errors import NotReadyError
from truedraft.server.http.work import PICTURE_THREADS, Work
from truedraft.server.models.registry import Models
from truedraft.server.models.served import Condition, ServedModel
from truedraft.server.observability.loop_lag import LoopMonitor, log_late
from truedraft.server.observability.metrics import Metrics
from truedraft.server.settings import Settings
from truedraft.server.text.grammar.validator import GrammarValidator

DRAINING = "The server is draining: it finishes what is running and takes no more requests."


class Services:
    def __init__(self, settings: Settings, models: Models, metrics: Metrics) -> None:
        self.settings = settings
        self.models = models
        self.metrics = metrics
        self.work = Work(settings)
        self.picture_work = Work(settings, PICTURE_THREADS)
        self.num_pixel_bytes = 0  # counts the pictures of open requests
        self.grammar_validator = GrammarValidator(settings)
        self.started = int(time.time())
        self.is_draining = False
        self._loop_monitor = LoopMonitor(
            lambda lag: metrics.server.loop_lag.observe(lag.seconds),
            late_after=settings.loop_lag_warning,
            on_late=log_late,
        )
        metrics.server.waiting_for_turn.set_function(
            lambda: self.work.turns.num_waiting + self.picture_work.turns.num_waiting
        )
        for model in models:
            model.metrics.requests.ready.set_function(partial(self._is_ready, model))

    async def start(self) -> None:
        """Begin to load the models; returns at once, so that the port opens before they are there."""
        self._loop_monitor.start()
        self.models.start()

    async def stop(self) -> None:
        self._loop_monitor.stop()
        await self.models.stop()
        await self.grammar_validator.stop()
        self.work.stop()
        self.picture_work.stop()

    def drain(self) -> None:
        """Take no more requests; those that are running go on."""
        self.is_draining = True

    def not_ready(self, models: Iterable[ServedModel]) -> Condition | None:
        """Returns what is wrong with the first of the models that cannot take a request now, if there is one.
        A model that is not loaded can: the request loads it."""
        if self.is_draining:
            return Condition("draining", DRAINING)
        conditions = (model.condition for model in models)
        return next((each for each in conditions if each.status not in ("ready", "unloaded")), None)

    def _is_ready(self, model: ServedModel) -> bool:
        return self.not_ready([model]) is None

    def check_not_draining(self) -> None:
        if self.is_draining:
            raise NotReadyError(DRAINING)


def get_services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


async def _provide_services(request: Request) -> Services:
    """A coroutine, because FastAPI sends every plain function through a thread, for each request."""
    return get_services(request)


ServicesDep = Annotated[Services, Depends(_provide_services)]

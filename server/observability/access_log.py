"""Logs one line per HTTP request when its answer is complete: status, time, and what was generated.

What operators' machines ask every few seconds, and the page's files, are logged at the level "debug" only.
"""

import logging
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Receive, Scope, Send

from truedraft.server.observability.request_summary import SUMMARY
from truedraft.server.observability.status_recorder import StatusRecorder
from truedraft.server.stages import ARRIVED, Stage, Stages, measuring

logger = logging.getLogger("truedraft.access")

QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/speculation"})
QUIET_FOLDER = "/page/"


class AccessLogMiddleware:
    """Wraps all other middleware, and so sees its answers, too. ``observe_stage`` is told how long each stage
    of a request took."""

    def __init__(self, app: ASGIApp, observe_stage: Callable[[Stage, float], None]) -> None:
        self._app = app
        self._observe_stage = observe_stage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        stages = Stages(state.get(ARRIVED), self._observe_stage)
        answer = StatusRecorder(send)
        try:
            with measuring(stages):
                await self._app(scope, receive, answer)
        finally:
            status = answer.status
            is_quiet = status in (200, 304, 503) and _is_quiet(scope["path"])
            generated = state[SUMMARY]().log_fields() if SUMMARY in state else {}
            level = logging.DEBUG if is_quiet else logging.WARNING if "code" in generated else logging.INFO
            if logger.isEnabledFor(level):
                _log(level, scope, status, stages, generated)


def _is_quiet(path: str) -> bool:
    return path in QUIET_PATHS or path.startswith(QUIET_FOLDER)


def _log(level: int, scope: Scope, status: int, stages: Stages, generated: dict[str, Any]) -> None:
    seconds = time.perf_counter() - stages.arrived
    client = scope.get("client")
    # Clients write the path, and proxies the client: either may look like a log line of ours, unless quoted.
    request = {
        "client": quote(client[0], safe=":.") if client else "-",
        "method": scope["method"],
        "path": quote(scope["path"]),
    }
    fields = {**request, "status": status, "seconds": round(seconds, 6)}
    fields |= {**stages.log_fields(), **generated}
    line = " ".join(map(str, (*request.values(), status)))
    rest = " ".join(
        f"{name}={value}" for name, value in fields.items() if name not in request | {"status": 0}
    )
    logger.log(level, "%s %s", line, rest, extra={"fields": fields})

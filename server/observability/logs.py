"""Logging of the server process: a line per event on stderr, as text or JSON, each with its request's id."""

import json
import logging
import logging.config
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

NO_REQUEST = "-"

# The id of the request that is being served; set by ``server.http.request_id``.
current_request_id: ContextVar[str] = ContextVar("request_id", default=NO_REQUEST)


class WithRequestId(logging.Filter):
    """Gives every record the id."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = current_request_id.get()
        return True


class JsonFormatter(logging.Formatter):
    """Writes an object a line. A record's ``fields`` (``extra={"fields": {...}}``) become its keys."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": getattr(record, "request_id", NO_REQUEST),
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True, default=str)


TEXT = "%(asctime)s %(levelname)s %(name)s [%(request_id)s]: %(message)s"


def configure_logging(level: str, style: str = "text") -> None:
    """``level`` is that of the least severe message shown, such as "info"; ``style`` is "text" or "json"."""
    formatter = {"()": JsonFormatter} if style == "json" else {"format": TEXT}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": formatter},
            "filters": {"request_id": {"()": WithRequestId}},
            "handlers": {
                "stderr": {
                    "class": "logging.StreamHandler",
                    "formatter": "line",
                    "filters": ["request_id"],
                }
            },
            "root": {"handlers": ["stderr"], "level": "WARNING"},
            "loggers": {"truedraft": {"level": level.upper()}},
        }
    )

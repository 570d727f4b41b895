"""Logging of the server process: a line per event on stderr, as text or JSON, each with its request's id."""

import json
import logging
import logging.config
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


# Longer lines are cut.
MAX_LINE = 8000


@contextmanager
def stderr_as_entries() -> Iterator[None]:
    """Makes entries of the log of what this process, its libraries and its children print to stderr.

    The log itself goes where stderr has gone until now. What is printed goes into a pipe, whose lines a
    thread logs.
    """
    sys.stderr.flush()
    original = os.dup(2)
    read_end, write_end = os.pipe()
    os.dup2(write_end, 2)
    os.close(write_end)
    log = open(original, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    handlers = [each for each in logging.getLogger().handlers if isinstance(each, logging.StreamHandler)]
    for handler in handlers:
        handler.setStream(log)
    reader = threading.Thread(target=_log_lines, args=(read_end,), name="stderr", daemon=True)
    reader.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original, 2)  # closes the pipe, unless a child still has it
        reader.join(timeout=1.0)
        for handler in handlers:
            handler.setStream(sys.stderr)


def _log_lines(descriptor: int) -> None:
    logger = logging.getLogger("truedraft.stderr")
    with open(descriptor, errors="backslashreplace") as lines:
        while line := lines.readline(MAX_LINE):
            if line.strip():
                logger.warning("%s", line.rstrip())

"""Logging of the server process: one readable line per event, on stderr."""

import logging
import logging.config

# Asked every few seconds by machines: successes say nothing.
PROBED = frozenset({"/health", "/ready", "/metrics"})


class NoProbes(logging.Filter):
    """Leaves successful probes and scrapes out of the access log."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not isinstance(record.args, tuple) or len(record.args) < 5:
            return True
        _, _, path, _, status = record.args[:5]
        return str(path).partition("?")[0] not in PROBED or int(str(status)) not in (200, 503)


def configure_logging(level: str) -> None:
    """``level`` is that of the least severe message shown, such as "info"."""
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
            "filters": {"no_probes": {"()": NoProbes}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
            "root": {"handlers": ["stderr"], "level": "WARNING"},
            "loggers": {
                "foretoken": {"level": level.upper()},
                "uvicorn.access": {"level": level.upper(), "filters": ["no_probes"]},
            },
        }
    )

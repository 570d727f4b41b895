"""Logging of the server process: one readable line per event, on stderr."""

import logging.config


def configure_logging(level: str) -> None:
    """``level`` is that of the least severe message shown, such as "info"."""
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
            "root": {"handlers": ["stderr"], "level": "WARNING"},
            "loggers": {
                "foretoken": {"level": level.upper()},
                "uvicorn.access": {"level": level.upper()},
            },
        }
    )

"""OpenTelemetry's own variables decide whether traces are exported, and where to: by OTLP over HTTP.

The packages come with the extra ``otel`` and are imported only when they are used.
"""

from collections.abc import Mapping
from typing import Any

from truedraft.server.version import package_version

MISSING = "otel: OpenTelemetry is not installed; install it with: pip install '.[otel]' in a checkout"


class OtelError(Exception):
    """Something cannot be exported as the settings ask; the message says what to do about it."""


def traces_are_exported(environ: Mapping[str, str]) -> bool:
    """Reads ``OTEL_TRACES_EXPORTER``, ``otlp`` by default, and refuses what would not be honoured."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environ.get("OTEL_METRICS_EXPORTER", "none") not in ("", "none"):
        raise OtelError(
            "OTEL_METRICS_EXPORTER asks for metrics, but this server sends traces only: leave it out, and "
            "let the collector's Prometheus receiver read /metrics (docs/logs.md)."
        )
    exporter = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if exporter == "none":
        return False
    if exporter != "otlp":
        raise OtelError(
            f"OTEL_TRACES_EXPORTER is {exporter!r}, but this server can only export by 'otlp' or 'none'."
        )
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environ.get(name):
            if protocol != "http/protobuf":
                raise OtelError(f"{name} is {protocol!r}, but this server only speaks 'http/protobuf'.")
            break
    return True


def resource() -> Any:
    """Returns what names this server; ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` go first."""
    from opentelemetry.sdk.resources import Resource

    facts = {"service.name": "truedraft", "service.version": package_version()}
    return Resource(facts).merge(Resource.create())

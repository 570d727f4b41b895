"""OpenTelemetry's own variables decide what is exported, and where to: traces, metrics, or one of them.

Both go by OTLP over HTTP. The packages come with the extra ``otel`` and are imported only when they are used.
"""

from collections.abc import Mapping
from typing import Any, Literal

from truedraft.server.version import package_version

Signal = Literal["TRACES", "METRICS"]

MISSING = "otel: OpenTelemetry is not installed; install it with: pip install '.[otel]' in a checkout"


class OtelError(Exception):
    """Something cannot be exported as the settings ask; the message says what to do about it."""


def is_exported(signal: Signal, environ: Mapping[str, str]) -> bool:
    """Reads ``OTEL_TRACES_EXPORTER`` or ``OTEL_METRICS_EXPORTER``, which are ``otlp`` by default."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    name = f"OTEL_{signal}_EXPORTER"
    exporter = environ.get(name) or "otlp"
    if exporter == "none":
        return False
    if exporter != "otlp":
        raise OtelError(f"{name} is {exporter!r}, but this server can only export by 'otlp' or 'none'.")
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
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

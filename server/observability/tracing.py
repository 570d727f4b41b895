"""Traces of requests by OpenTelemetry (extra ``otel``): queue, prefill, rounds, with ``gen_ai`` attributes.

A request's spans are made when it has ended, from times that were taken anyway: while it runs, they cost
nothing. Where spans go is OpenTelemetry's own business: ``OTEL_EXPORTER_OTLP_ENDPOINT`` and its relatives.
"""

import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from truedraft.server.observability.otel import MISSING, OtelError, resource
from truedraft.server.observability.request_summary import SUMMARY, Summary
from truedraft.server.observability.status_recorder import StatusRecorder
from truedraft.server.version import package_version

# Others are chats.
OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/v1/score": "score",
    "/score": "score",
}
NANOSECONDS = 1e9


def make_provider(exporter: Any = None) -> Any:
    """Sends spans in batches by OTLP; ``exporter`` replaces that, and gets them one by one."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
    except ImportError as error:
        raise OtelError(MISSING) from error
    provider = TracerProvider(resource=resource())
    if exporter is None:
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    else:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


class TracingMiddleware:
    """Traces requests that generate; the client's ``traceparent`` is the parent."""

    def __init__(self, app: ASGIApp, provider: Any, model: str) -> None:
        self._app = app
        self._tracer = provider.get_tracer("truedraft", package_version())
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        started = time.time_ns()
        answer = StatusRecorder(send)
        try:
            await self._app(scope, receive, answer)
        finally:
            if SUMMARY in state:
                self._export(scope, state[SUMMARY](), started, answer.status)

    def _export(self, scope: Scope, summary: Summary, started: int, status: int) -> None:
        from opentelemetry import trace
        from opentelemetry.propagate import extract

        ended = time.time_ns()
        operation = OPERATIONS.get(scope["path"], "chat")
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=extract(dict(Headers(scope=scope))),
            kind=trace.SpanKind.SERVER,
            start_time=started,
            attributes={
                "http.request.method": scope["method"],
                "http.route": scope["path"],
                "http.response.status_code": status,
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "truedraft",
                "gen_ai.request.model": self._model,
                "gen_ai.response.id": summary.id,
                "gen_ai.response.finish_reasons": summary.finish_reasons,
                "gen_ai.usage.input_tokens": summary.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": summary.usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": summary.usage.prompt_tokens_details.cached_tokens,
                "truedraft.request_id": scope["state"]["request_id"],
            },
        )
        if status >= 500 or not {"aborted", "error"}.isdisjoint(summary.finish_reasons):
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span)
        arrived = ended - int(summary.seconds * NANOSECONDS)

        def child(name: str, begin: float, end: float, **attributes: Any) -> None:
            """``begin`` and ``end``: seconds after the arrival."""
            places = (arrived + int(seconds * NANOSECONDS) for seconds in (begin, end))
            first, last = places
            self._tracer.start_span(name, inside, start_time=first, attributes=attributes).end(last)

        if summary.first_token_seconds is not None:
            # The worker has timed the wait in its queue; the message's way is part of the prefill.
            prepared = summary.prepared_seconds
            queued = min(prepared + (summary.queue_seconds or 0.0), summary.first_token_seconds)
            counts = summary.speculation
            child("prepare", 0.0, prepared)
            child("queue", prepared, queued)
            child("prefill", queued, summary.first_token_seconds)
            child(
                "rounds",
                summary.first_token_seconds,
                summary.seconds,
                **{
                    "truedraft.rounds": summary.num_rounds,
                    "truedraft.drafted_tokens": counts.drafted,
                    "truedraft.accepted_tokens": counts.accepted,
                },
            )
        span.end(ended)

"""Sends what ``/metrics`` shows by OTLP, every ``OTEL_METRIC_EXPORT_INTERVAL`` milliseconds (extra ``otel``).

The registry is read in the event loop, like ``/metrics``; a thread sends what was read. Names are those of
Prometheus, where a counter's ``_total`` is no part of its name.
"""

import asyncio
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from truedraft.server.observability.otel import OtelError, resource
from truedraft.server.version import package_version

DEFAULT_INTERVAL = "60000"
# The last reading may take this long to be sent, when the server ends.
LAST_SECONDS = 1.0

CUMULATIVE = AggregationTemporality.CUMULATIVE


class MetricsExport:
    """Runs for as long as it is entered; ``exporter`` replaces the one that sends by HTTP."""

    def __init__(self, registry: Collector, exporter: MetricExporter | None = None) -> None:
        check_temporality(os.environ)
        self._interval = interval_seconds(os.environ)
        self._registry = registry
        self._exporter = exporter or OTLPMetricExporter()
        self._resource = resource()
        self._scope = InstrumentationScope("truedraft", package_version())
        self._started = time.time_ns()
        self._readings: SimpleQueue[MetricsData | None] = SimpleQueue()
        self._thread = Thread(target=self._send, name="otlp-metrics", daemon=True)
        self._reading: asyncio.Task[None] | None = None
        self._has_ended = False

    async def __aenter__(self) -> None:
        self._thread.start()
        self._reading = asyncio.create_task(self._read_often())

    async def __aexit__(self, *_: object) -> None:
        assert self._reading is not None
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading
        self._readings.put(self._read())
        self._readings.put(None)
        await asyncio.to_thread(self._thread.join, LAST_SECONDS)
        self._has_ended = True
        self._exporter.shutdown()

    async def _read_often(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            if self._readings.empty():  # a slow receiver misses readings: the next one has all totals
                self._readings.put(self._read())

    def _read(self) -> MetricsData:
        metrics = list(converted(self._registry.collect(), self._started, time.time_ns()))
        scope = ScopeMetrics(self._scope, metrics, schema_url="")
        return MetricsData([ResourceMetrics(self._resource, [scope], schema_url="")])

    def _send(self) -> None:
        while (reading := self._readings.get()) is not None and not self._has_ended:
            self._exporter.export(reading)  # logs its failures, and raises none


def interval_seconds(environ: Mapping[str, str]) -> float:
    text = environ.get("OTEL_METRIC_EXPORT_INTERVAL") or DEFAULT_INTERVAL
    with suppress(ValueError):
        if (milliseconds := float(text)) > 0:
            return milliseconds / 1000
    raise OtelError(f"OTEL_METRIC_EXPORT_INTERVAL is {text!r}; it has to be a number of milliseconds.")


def check_temporality(environ: Mapping[str, str]) -> None:
    """Refuses what a registry of totals cannot give."""
    name = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
    asked = environ.get(name) or "cumulative"
    if asked.lower() != "cumulative":
        raise OtelError(
            f"{name} is {asked!r}, but this server sends totals: use 'cumulative', and the collector's "
            "processor 'cumulativetodelta' where growth is wanted."
        )


def converted(families: Iterable[Family], started: int, now: int) -> Iterator[Metric]:
    """Yields each family that has samples; counters count from ``started``."""

    def points(samples: Iterable[Sample]) -> list[NumberDataPoint]:
        return [
            NumberDataPoint(sample.labels, started, now, sample.value)
            for sample in samples
            if not math.isnan(sample.value)
        ]

    for family in families:
        name = family.name
        data: Sum | Histogram | Gauge
        match family.type:
            case "counter":
                totals = [sample for sample in family.samples if sample.name.endswith("_total")]
                data = Sum(points(totals), CUMULATIVE, is_monotonic=True)
            case "histogram":
                data = Histogram(list(_histogram_points(family.samples, started, now)), CUMULATIVE)
            case _:
                name = next((sample.name for sample in family.samples), name)  # an info's ends with _info
                data = Gauge(points(family.samples))
        if data.data_points:
            yield Metric(name, family.documentation, "", data)


def _histogram_points(samples: Sequence[Sample], started: int, now: int) -> Iterator[HistogramDataPoint]:
    """Yields a point for each set of labels; Prometheus' buckets contain the smaller ones, OTLP's do not."""
    series: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for sample in samples:
        labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
        found = series.setdefault(labels, {"bounds": [], "counts": [], "sum": 0.0})
        if sample.name.endswith("_bucket"):
            found["bounds"].append(float(sample.labels["le"]))
            found["counts"].append(int(sample.value))
        elif sample.name.endswith("_sum"):
            found["sum"] = sample.value
    for labels, found in series.items():
        counts = found["counts"]
        yield HistogramDataPoint(
            dict(labels),
            started,
            now,
            count=counts[-1],
            sum=found["sum"],
            bucket_counts=[after - before for before, after in zip([0, *counts], counts, strict=False)],
            explicit_bounds=found["bounds"][:-1],  # the last one is infinite
            min=None,  # type: ignore[arg-type]  # unknown, and optional on the wire
            max=None,  # type: ignore[arg-type]
        )

"""A receiver of OTLP gets by HTTP what /metrics shows, and OpenTelemetry's own variables are followed."""

import asyncio
import gzip
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics.export import HistogramDataPoint, MetricExporter, MetricExportResult
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import StartServer
from tests.server.running import wait_for
from truedraft.server.observability.metrics import Metrics
from truedraft.server.observability.otel import OtelError, is_exported
from truedraft.server.observability.otlp_metrics import MetricsExport, converted, interval_seconds

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Receiver(ThreadingHTTPServer):
    """Keeps the requests for metrics that it gets, as OTLP's own messages."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[ExportMetricsServiceRequest] = []
        self.paths: set[str] = set()
        self.headers: set[str | None] = set()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        assert isinstance(self.server, Receiver)
        self.server.paths.add(self.path)
        self.server.headers.add(self.headers.get("x-key"))
        self.server.requests.append(ExportMetricsServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
        yield server
        server.shutdown()
        thread.join()


def received(request: ExportMetricsServiceRequest) -> Values:
    """Returns every value of a request by Prometheus' name and labels, so that the two can be compared."""
    values: Values = {}

    def add(name: str, attributes: Any, value: float, **more: str) -> None:
        labels = {each.key: each.value.string_value for each in attributes} | more
        values[name, tuple(sorted(labels.items()))] = value

    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    for metric in scope.metrics:
        for point in metric.gauge.data_points:
            add(metric.name, point.attributes, point.as_double)
        for point in metric.sum.data_points:
            assert metric.sum.is_monotonic
            add(f"{metric.name}_total", point.attributes, point.as_double)
        for histogram in metric.histogram.data_points:
            add(f"{metric.name}_sum", histogram.attributes, histogram.sum)
            add(f"{metric.name}_count", histogram.attributes, histogram.count)
            assert sum(histogram.bucket_counts) == histogram.count
            total = 0
            bounds = [*histogram.explicit_bounds, float("inf")]
            for bound, count in zip(bounds, histogram.bucket_counts, strict=True):
                total += count
                add(f"{metric.name}_bucket", histogram.attributes, total, le=str(bound))
    return values


def shown(text: str) -> Values:
    """Returns the values of a page of metrics that are sent, too: NaN and times of creation are not."""

    def label(name: str, value: str) -> tuple[str, str]:
        return name, str(float(value)) if name == "le" else value

    return {
        (sample.name, tuple(sorted(label(*each) for each in sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not math.isnan(sample.value) and not sample.name.endswith("_created")
    }


def test_a_receiver_gets_what_metrics_shows(
    start_server: StartServer, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1000000")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with start_server(otel=True) as server:
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 8}).status_code == 200
        wait_for(lambda: "truedraft_request_success_total" in server.get("/metrics").text, "the request")
        expected = shown(server.get("/metrics").text)
    (last,) = receiver.requests  # the reading at the end
    found = received(last)
    assert receiver.paths == {"/v1/metrics"}
    assert receiver.headers == {"secret"}
    resource = {each.key: each.value.string_value for each in last.resource_metrics[0].resource.attributes}
    assert (resource["service.name"], resource["service.version"]) == ("mine", "0.1.0")
    # The worker's process has ended by then, and its last Stats may have come; readings of processes move.
    moves = {"process_", "truedraft_event_loop", "truedraft_http_requests", "truedraft_ready"}
    moves |= {"truedraft_worker_ready"}
    for key in expected:
        if not key[0].startswith(tuple(moves)):
            assert found[key] == expected[key], key
    assert found["truedraft_generation_tokens_total", (("model_name", "tiny-model"),)] == 8
    assert any(name == "process_cpu_seconds_total" for name, _ in found)


def test_readings_come_again_and_again(
    start_server: StartServer, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    with start_server(otel=True) as server:
        wait_for(lambda: len(receiver.requests) > 2, "three readings")
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 4})
    key = ("truedraft_generation_tokens_total", (("model_name", "tiny-model"),))
    totals = [received(request)[key] for request in receiver.requests]
    assert totals == sorted(totals)
    assert (totals[0], totals[-1]) == (0, 4)


def test_nothing_is_sent_unless_asked_for(
    start_server: StartServer, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    for otel in (True, False):
        with start_server(otel=otel) as server:
            server.post("/v1/completions", {"prompt": "x", "max_tokens": 4})
    assert not receiver.requests


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_TRACES_EXPORTER": "none"}, True),
        ({"OTEL_METRICS_EXPORTER": "none"}, False),
        ({"OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
        (
            {
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
            },
            True,
        ),
        ({"OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, False),
    ],
)
def test_what_is_exported(environ: dict[str, str], expected: bool) -> None:
    assert is_exported("METRICS", environ) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_METRICS_EXPORTER", "prometheus"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/json"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "1m"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, start_server: StartServer
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv(name, value)
    with pytest.raises(OtelError, match=f"{name} is '{value}'"), start_server(otel=True):
        pass


def test_every_kind_of_family_is_converted() -> None:
    registry = CollectorRegistry()
    Counter("c", "A counter.", ["x"], registry=registry).labels("1").inc(2)
    Gauge("g", "A gauge.", registry=registry).set(float("nan"))
    Gauge("h", "A gauge.", registry=registry).set(3)
    Info("i", "An info.", registry=registry).info({"a": "b"})
    histogram = Histogram("d", "A histogram.", ["x"], buckets=(1, 2), registry=registry)
    for label, value in (("1", 0.5), ("1", 0.7), ("1", 1.5), ("2", 9)):
        histogram.labels(label).observe(value)
    metrics = {metric.name: metric.data for metric in converted(registry.collect(), 1, 2)}
    assert metrics.keys() == {"c", "h", "i_info", "d"}
    counted = [
        (point.attributes, point.count, point.sum, point.bucket_counts, point.explicit_bounds)
        for point in metrics["d"].data_points
        if isinstance(point, HistogramDataPoint)
    ]
    assert counted == [({"x": "1"}, 3, 2.7, [2, 1, 0], [1, 2]), ({"x": "2"}, 1, 9.0, [0, 0, 1], [1, 2])]


class StuckExporter(MetricExporter):
    """Sends nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def export(self, *_: object, **__: object) -> MetricExportResult:
        self.may_go_on.wait()
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 0) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 0, **_: object) -> None: ...


def test_a_receiver_that_hangs_delays_no_end() -> None:
    exporter = StuckExporter()
    export = MetricsExport(Metrics().exposed, exporter)

    async def run() -> None:
        async with export:
            pass

    asyncio.run(run())
    assert export._thread.is_alive()
    exporter.may_go_on.set()
    export._thread.join()


def test_the_interval_is_in_milliseconds() -> None:
    assert interval_seconds({}) == 60
    assert interval_seconds({"OTEL_METRIC_EXPORT_INTERVAL": "2500"}) == 2.5

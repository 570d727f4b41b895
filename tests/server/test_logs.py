"""The log has a line per request with its id and figures, as text or JSON, and none of probes; and traces."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.server.conftest import StartServer
from tests.server.running import RunningServer, wait_for
from tests.server.serve_process import serve_process
from truedraft.server.observability.logs import TEXT, JsonFormatter, WithRequestId
from truedraft.server.observability.otel import OtelError, traces_are_exported
from truedraft.server.observability.tracing import make_provider

SECONDS = {"seconds", "queue_seconds", "first_token_seconds"}


class Log:
    """What the server writes, in one of its two styles."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(formatter)
        self.handler.addFilter(WithRequestId())

    def lines(self, number: int) -> list[str]:
        """Once there are ``number`` of them: the last one is written after the client has its answer."""
        wait_for(lambda: self.stream.getvalue().count("\n") >= number, f"{number} lines")
        return self.stream.getvalue().splitlines()


@pytest.fixture(params=["text", "json"])
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    found = Log(JsonFormatter() if request.param == "json" else logging.Formatter(TEXT))
    logger = logging.getLogger("truedraft")
    level = logger.level
    logger.addHandler(found.handler)
    logger.setLevel("INFO")
    yield found
    logger.removeHandler(found.handler)
    logger.setLevel(level)


def fields(line: str) -> dict[str, Any]:
    """Returns the fields of an access line."""
    if line.startswith("{"):
        return dict(json.loads(line))
    words = line.split()
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    client, method, path, status = words[5:9]
    return pairs | {
        "request_id": words[4].strip("[]:"),
        "client": client,
        "method": method,
        "path": path,
        "status": status,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_one_line_with_tokens_times_and_acceptance(server: RunningServer, log: Log, stream: bool) -> None:
    body = {"prompt": "log", "max_tokens": 8, "stream": stream}
    answer = server.post("/v1/completions", body, headers={"x-request-id": "mine"})
    (line,) = log.lines(1)
    found = fields(line)
    expected = {
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "request_id": "mine",
        "prompt_tokens": 3,
        "completion_tokens": 8,
        "drafted": 6,
        "accepted": 6,
        "finish": "length",
    }
    assert {name: str(found[name]) for name in expected} == {name: str(expected[name]) for name in expected}
    assert found["id"] in answer.text
    assert float(found["queue_seconds"]) == 0.25
    assert 0 < float(found["first_token_seconds"]) < float(found["seconds"])
    stages = [name for name in found if name in {"body_seconds", "parse_seconds", "tokenize_seconds"}]
    assert stages == ["body_seconds", "parse_seconds", "tokenize_seconds"]
    assert sum(float(found[name]) for name in stages) < float(found["first_token_seconds"])


def test_a_client_that_leaves(start_server: StartServer, log: Log) -> None:
    with start_server() as server:
        server.worker.at_most(0)
        with server.unanswered("/v1/completions", {"prompt": "x", "max_tokens": 8}):
            server.wait_for_requests(1)
        server.wait_for_requests(0)
        assert fields(log.lines(1)[0])["finish"] == "aborted"
        server.worker.go_on()


def test_probes_scrapes_and_files_are_silent(server: RunningServer, log: Log) -> None:
    for path in ("/health", "/ready", "/metrics", "/speculation", "/page/main.js"):
        assert server.get(path).status_code == 200
    server.get("/version")
    (line,) = log.lines(1)
    assert fields(line)["path"] == "/version"


def test_a_path_cannot_forge_a_line(server: RunningServer, log: Log) -> None:
    server.get("/nothing%0A2026-01-01%20ERROR%1B[31m")
    (line,) = log.lines(1)
    assert "\x1b" not in line
    assert fields(line)["path"] == "/nothing%0A2026-01-01%20ERROR%1B%5B31m"


def test_an_exception_has_the_requests_id(
    server: RunningServer, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truedraft.server.routes.ops.package_version", lambda: 1 / 0)
    assert server.get("/version", headers={"x-request-id": "broken"}).status_code == 500
    wait_for(lambda: log.stream.getvalue().count("broken") == 2, "both lines")
    assert "ZeroDivisionError" in log.stream.getvalue()


def test_traces(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(
        "truedraft.server.observability.tracing.make_provider", lambda: make_provider(exporter)
    )
    with start_server(otel=True) as server:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        body = {"prompt": "log", "max_tokens": 8}
        answer = server.post("/v1/completions", body, headers={"traceparent": parent})
        server.get("/health")
        wait_for(lambda: len(exporter.get_finished_spans()) == 5, "spans")
    spans = {span.name: span for span in exporter.get_finished_spans()}
    whole = spans["text_completion tiny-model"]
    parts = [spans[name] for name in ("prepare", "queue", "prefill", "rounds")]
    assert whole.parent is not None
    assert f"{whole.parent.trace_id:032x}" == parent.split("-")[1]
    attributes = dict(whole.attributes or {})
    assert attributes["gen_ai.response.id"] == answer.json()["id"]
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (3, 8)
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    for part in parts:
        assert part.parent is not None
        assert part.parent.span_id == whole.context.span_id
    assert [part.end_time for part in parts[:-1]] == [part.start_time for part in parts[1:]]
    assert parts[-1].end_time == whole.end_time
    assert dict(parts[-1].attributes or {}) == {
        "truedraft.rounds": 2,
        "truedraft.drafted_tokens": 6,
        "truedraft.accepted_tokens": 6,
    }


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        ({"OTEL_METRICS_EXPORTER": "none"}, True),
        ({"OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_SDK_DISABLED": "True", "OTEL_METRICS_EXPORTER": "otlp"}, False),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
    ],
)
def test_whether_traces_are_exported(environ: dict[str, str], expected: bool) -> None:
    assert traces_are_exported(environ) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_METRICS_EXPORTER", "otlp"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
    ],
)
def test_what_would_not_be_honoured_is_refused(name: str, value: str) -> None:
    with pytest.raises(OtelError, match=name):
        traces_are_exported({name: value})


def test_a_crash_is_no_clients_disconnect(start_server: StartServer, log: Log) -> None:
    with start_server() as server:
        server.worker.at_most(2)
        with server.unanswered("/v1/completions", {"prompt": "x", "max_tokens": 100, "stream": True}):
            server.wait_for_tokens(8)
            server.worker.die()
            wait_for(lambda: "/v1/completions" in log.stream.getvalue(), "its line")
        (line,) = [line for line in log.stream.getvalue().splitlines() if "/v1/completions" in line]
        found = fields(line)
        assert (found["finish"], found["code"], str(found["status"])) == ("error", "worker_lost", "200")
        assert "warning" in line.lower()
        server.worker.go_on()


def test_a_proxys_client_cannot_forge_a_line(server: RunningServer, log: Log) -> None:
    forged = "6.6.6.6 POST /v1/completions 200 seconds=0.01 id=x \x9b[31m"
    server.get("/version", headers={"x-forwarded-for": forged.encode("latin-1"), "x-request-id": "a]: b"})
    (line,) = log.lines(1)
    found = fields(line)
    assert (found["path"], found["method"]) == ("/version", "GET")
    assert "\x9b" not in line
    assert " " not in found["client"]
    assert found["request_id"].startswith("req_")


def test_json_has_nothing_else(model_folder: Path, tmp_path: Path) -> None:
    """From the first line to the last, whether it starts or not."""
    with serve_process(model_folder, tmp_path, "--log-format", "json") as serve:
        serve.process.send_signal(15)
        assert serve.wait() == 0
        messages = [json.loads(line)["message"] for line in serve.log.read_text().splitlines()]
    assert any(message.startswith("url") for message in messages)
    command = ["-m", "truedraft", "serve", "--target", "/nowhere/model", "--log-format", "json"]
    failed = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout) == (1, "")
    (line,) = failed.stderr.splitlines()
    assert "There is no file or folder" in json.loads(line)["message"]


PRINTING = """
import logging, os, subprocess, sys
from truedraft.server.observability.logs import configure_logging, stderr_as_entries
configure_logging("info", "json")
logging.getLogger("truedraft").info("first")
with stderr_as_entries():
    print("from a library", file=sys.stderr)
    os.write(2, b"from C\\n\\xff\\n")
    child = "import logging, sys; logging.warning('from a worker'); print('x' * 9000, file=sys.stderr)"
    subprocess.run([sys.executable, "-c", child], check=True)
    logging.getLogger("truedraft").info("inside")
logging.getLogger("truedraft").info("last")
"""


def test_what_is_printed_becomes_entries() -> None:
    """What Python, C and other processes print counts, and nothing is lost at the end."""
    done = subprocess.run([sys.executable, "-c", PRINTING], capture_output=True, text=True, check=True)
    entries = [json.loads(line) for line in done.stderr.splitlines()]
    printed = [entry["message"] for entry in entries if entry["logger"] == "truedraft.stderr"]
    assert printed[:4] == ["from a library", "from C", "\\xff", "WARNING:root:from a worker"]
    assert "".join(printed[4:]) == "x" * 9000
    assert {"first", "inside", "last"} <= {entry["message"] for entry in entries}

"""What anybody may send before a body, with or without a key: bounded in bytes, number and time."""

import json
import logging
import re
import resource
import socket
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import StartServer
from tests.server.running import TIMEOUT_SECONDS, RunningServer, wait_for
from tests.server.test_protocol import BODY, JSON_HEADER, completion, json_of, request, statuses, talk
from truedraft.server.http.protocol import (
    HEAD_SECONDS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    MAX_SPARE_CONNECTIONS,
)

CHUNKED = request("POST", "/v1/completions", JSON_HEADER, "Transfer-Encoding: chunked")
ENDLESS = 40 * MAX_HEAD_BYTES


def connect(server: RunningServer) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_SECONDS)


def answer_to(server: RunningServer, sent: bytes) -> str:
    """All that comes until the server closes the connection, maybe before it has read everything."""
    received = b""
    with connect(server) as connection:
        try:
            connection.sendall(sent)
            while more := connection.recv(65536):
                received += more
        except ConnectionError:
            pass
    return received.decode()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nx: " + b"a" * ENDLESS,
        b"GET /health HTTP/1.1\r\n" + b"a" * ENDLESS,
        b"GET /" + b"a" * ENDLESS,
        b"GET /health HTTP/1.1\r\n" + b"x: a\r\n" * (MAX_HEADERS + 2),
        b"GET /health HTTP/1.1\r\n" + b"x: %b\r\n" % (b"a" * 1000) * (MAX_HEAD_BYTES // 1000 + 2),
    ],
    ids=["value", "name", "path", "number", "sum"],
)
def test_heads_are_limited(server: RunningServer, sent: bytes) -> None:
    answer = answer_to(server, sent)
    if answer:  # what was not read may reset the connection before the answer is
        assert statuses(answer) == [431]
        error = json_of(answer)["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "headers_too_large")
        assert re.search("64 bytes|65536 bytes|256 headers", error["message"])
    assert server.get("/health").status_code == 200


def test_the_largest_head_is_served(server: RunningServer) -> None:
    headers = [f"x{number}: a" for number in range(MAX_HEADERS - 4)]
    assert statuses(talk(server, request("GET", "/health", *headers))) == [200, 200]
    head = request("GET", "/health")
    padding = MAX_HEAD_BYTES - len(head) - 100
    assert statuses(talk(server, request("GET", "/health", f"x: {'a' * padding}"))) == [200, 200]
    over = request("GET", "/health", f"x: {'a' * (padding + 300)}")
    assert statuses(talk(server, over, close=False)) == [431]


@pytest.mark.parametrize(
    "rest",
    [
        b"0\r\n" + b"x: " + b"a" * ENDLESS,
        b"0\r\n" + b"x: a\r\n" * (MAX_HEADERS + 2),
        b"5;" + b"a" * ENDLESS,
    ],
    ids=["trailer", "trailers", "extension"],
)
def test_what_stands_around_chunks_is_limited(server: RunningServer, rest: bytes) -> None:
    body = b"%x\r\n%b\r\n" % (len(BODY), BODY)
    assert not {200, 500} & {*statuses(answer_to(server, CHUNKED + body + rest))}
    assert server.get("/health").status_code == 200


def test_trailers_are_no_headers(server: RunningServer) -> None:
    """Trailers of a request that a proxy has let through would speak for the proxy."""
    piece = b"%x\r\n%b\r\n" % (len(BODY), BODY)
    answers = talk(server, CHUNKED + piece + b"0\r\nx-request-id: mine\r\n\r\n")
    assert statuses(answers) == [200, 200]
    assert "mine" not in answers


def test_requests_in_a_row_are_limited(start_server: StartServer) -> None:
    with start_server() as server:
        assert statuses(talk(server, request("GET", "/health") * MAX_PIPELINED)) == [200] * (
            MAX_PIPELINED + 1
        )
        server.worker.at_most(0)
        content = b'{"model": "tiny-model", "prompt": "x"}'
        length = f"Content-Length: {len(content)}"
        waiting = request("POST", "/v1/completions", JSON_HEADER, length, body=content)
        with connect(server) as connection:
            connection.sendall(waiting)
            server.wait_for_requests(1)
            connection.sendall(request("GET", "/health") * (MAX_PIPELINED + 2))
            assert connection.recv(65536) == b""  # nothing may come before the first answer
        server.wait_for_requests(0)


def test_a_request_before_others_ends_with_its_client(start_server: StartServer) -> None:
    content = b'{"model": "tiny-model", "prompt": "x"}'
    first = request("POST", "/v1/completions", JSON_HEADER, f"Content-Length: {len(content)}", body=content)
    with start_server() as server:
        server.worker.at_most(0)
        with connect(server) as connection:
            connection.sendall(first + request("GET", "/health") * 2)
            server.wait_for_requests(1)
        server.wait_for_requests(0)


@pytest.mark.parametrize(("sent", "status"), [(b"", []), (b"GET /health HTTP/1.1\r\nx: a\r\n", [408])])
def test_a_request_must_come_in_time(start_server: StartServer, sent: bytes, status: list[int]) -> None:
    with start_server() as server, connect(server) as connection:
        connection.sendall(request("GET", "/health"))
        assert connection.recv(65536)
        others = set(server.connections)
        with connect(server) as slow:
            slow.sendall(sent)
            wait_for(lambda: bool(set(server.connections) - others), "the connection")
            if sent:
                wait_for(lambda: any(each._is_in_head for each in server.connections), "a head's begin")
            server.pass_time(HEAD_SECONDS + 1)
            received = b""
            while more := slow.recv(65536):
                received += more
        assert statuses(received.decode()) == status


def test_a_stream_does_not_end_with_the_timer(start_server: StartServer) -> None:
    with start_server() as server, server.unanswered("/v1/completions", {"prompt": "x", "max_tokens": 4}):
        server.wait_for_requests(0)
        server.pass_time(HEAD_SECONDS + 1)
        assert server.metric("truedraft_requests_aborted_total", reason="disconnect") == 0


def test_connections_leave_descriptors_to_others(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("truedraft.server.http.protocol.LimitedProtocol._last_warning", float("-inf"))
    with start_server() as server:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (6, 6))
        with caplog.at_level(logging.WARNING, "truedraft.server"):
            held = [connect(server) for _ in range(3)]
            wait_for(lambda: len(server.connections) >= 3, "them")
            refused = [answer_to(server, completion()) for _ in range(3)]
            assert all(statuses(answer) == [503] for answer in refused)
            assert json.loads(refused[0].partition("\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
            assert "retry-after: 1" in refused[0]
            for connection in held:
                connection.close()
        monkeypatch.undo()
        assert [record.message[:24] for record in caplog.records if "truedraft" in record.name] == [
            "3 connections are open, "
        ]
        wait_for(lambda: server.get("/health").status_code == 200, "room")


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics?x=1"])
def test_probes_are_answered_above_the_limit(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Silent connections above the limit do not shut them out: the oldest of those gives way."""
    with start_server() as server:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (6, 6))
        held = [connect(server) for _ in range(3 + MAX_SPARE_CONNECTIONS)]
        wait_for(lambda: len(server.connections) >= len(held), "them")
        answer = answer_to(server, request("GET", path))
        assert statuses(answer) == [200]
        assert "connection: close" in answer
        oldest = held[3]
        assert statuses(oldest.recv(65536).decode()) == [503]
        for other in (request("GET", "/v1/models"), request("GET", "/healthy"), completion()):
            assert statuses(answer_to(server, other)) == [503]
        for connection in held:
            connection.close()
        monkeypatch.undo()
        wait_for(lambda: server.get("/v1/models").status_code == 200, "room")


@pytest.mark.parametrize("keys", [[], ["secret"]])
@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        (["Host: localhost"], 400, "invalid_http"),
        (["host: other"], 400, "invalid_http"),
        (["Transfer-Encoding: gzip, chunked"], 501, "unknown_transfer_coding"),
        (["Transfer-Encoding: xchunked"], 501, "unknown_transfer_coding"),
        (["Transfer-Encoding: identity"], 501, "unknown_transfer_coding"),
        (["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"], 400, "invalid_http"),
        (["Transfer-Encoding: chunked, chunked"], 400, "invalid_http"),
    ],
    ids=str,
)
def test_what_http_forbids(
    start_server: StartServer, keys: list[str], headers: list[str], status: int, code: str
) -> None:
    with start_server(api_keys=keys) as server:
        sent = request("POST", "/v1/completions", JSON_HEADER, "Authorization: Bearer secret", *headers)
        answer = answer_to(server, sent + b"0\r\n\r\n")
        assert (statuses(answer), json_of(answer)["error"]["code"]) == ([status], code)


def test_no_other_protocol_is_taken_up(server: RunningServer) -> None:
    upgrade = ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
    answers = answer_to(
        server, request("GET", "/health", *upgrade, "Sec-WebSocket-Key: eA==", "Connection: close")
    )
    assert statuses(answers) == [200]

"""Headers that no client should send, over a bare socket: an answer, never a broken server."""

import socket

import httpx
import pytest

from tests.server.running import MODEL, TIMEOUT_SECONDS, RunningServer

BODY = f'{{"model": "{MODEL}", "prompt": "x", "max_tokens": 1}}'.encode()


def exchange(server: RunningServer, request: bytes, *, is_all: bool = False) -> bytes:
    """Send bytes, and read until the server closes the connection. ``is_all`` closes this side after
    the bytes; otherwise it waits for the rest of half a request."""
    url = httpx.URL(server.url)
    received = b""
    with socket.create_connection((url.host, url.port), timeout=TIMEOUT_SECONDS) as client:
        try:
            client.sendall(request)
            if is_all:
                client.shutdown(socket.SHUT_WR)
            while data := client.recv(65536):
                received += data
        except ConnectionError:
            pass
    return received


def request(headers: bytes, body: bytes = BODY, length: bytes | None = None) -> bytes:
    length = str(len(body)).encode() if length is None else length
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: " + length + b"\r\nConnection: close\r\n" + headers + b"\r\n" + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.fixture(autouse=True)
def _goes_on(server: RunningServer) -> object:
    before = server.metric("truedraft_request_errors_total", code="internal_error")
    yield
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    assert server.metric("truedraft_request_errors_total", code="internal_error") == before


@pytest.mark.parametrize("length", [b"-1", b"abc", b"1e3", b"9" * 5000, b"\xb2", b"5, 6", b""])
def test_bad_lengths(server: RunningServer, length: bytes) -> None:
    assert status_of(exchange(server, request(b"", length=length))) in (400, 413)


def test_length_beyond_the_limit_is_not_waited_for(server: RunningServer) -> None:
    answer = exchange(server, request(b"", length=b"99999999999"))
    assert status_of(answer) == 413
    assert b'"request_too_large"' in answer


def test_two_lengths(server: RunningServer) -> None:
    assert status_of(exchange(server, request(b"Content-Length: 5\r\n"))) == 400


def test_length_and_chunks(server: RunningServer) -> None:
    assert status_of(exchange(server, request(b"Transfer-Encoding: chunked\r\n"))) == 400


@pytest.mark.parametrize("size", [10_000, 1_000_000])
def test_huge_headers(server: RunningServer, size: int) -> None:
    """Up to the protocol's limit they are as good as any; beyond it the connection ends."""
    answer = exchange(server, request(b"X-Padding: " + b"x" * size + b"\r\n"))
    assert answer == b"" or status_of(answer) in (200, 400, 431)


def test_many_headers(server: RunningServer) -> None:
    answer = exchange(server, request(b"".join(b"X-%d: 1\r\n" % number for number in range(5000))))
    assert answer == b"" or status_of(answer) in (200, 400, 431)


@pytest.mark.parametrize(
    "given",
    [b"x" * 10_000, b"\x7f", b"a\tb", "ü".encode(), b"\xff", b"", b" ", b"a\x01b", b"\x00", b"a b", b"a]:b"],
    ids=repr,
)
def test_request_ids_that_are_not_kept(server: RunningServer, given: bytes) -> None:
    answer = exchange(server, request(b"X-Request-Id: " + given + b"\r\n"))
    if status_of(answer) == 200:
        (line,) = [line for line in answer.split(b"\r\n") if line.lower().startswith(b"x-request-id:")]
        assert line.partition(b": ")[2].startswith(b"req_")
    else:  # the protocol itself forbids control characters
        assert status_of(answer) == 400


def test_request_id_that_is_kept(server: RunningServer) -> None:
    assert b"x-request-id: mine:1;2/x" in exchange(server, request(b"X-Request-Id: mine:1;2/x\r\n"))


@pytest.mark.parametrize("value", [b"Bearer " + b"x" * 10_000, b"Bearer \xff", b"Basic ====", b"Bearer", b""])
def test_keys_are_not_needed_here(server: RunningServer, value: bytes) -> None:
    assert status_of(exchange(server, request(b"Authorization: " + value + b"\r\n"))) == 200


@pytest.mark.parametrize(
    "line",
    [b"GET", b"\x16\x03\x01\x02\x00", b"POST /v1/completions HTTP/9.9\r\n\r\n", b"GET \xff HTTP/1.1\r\n\r\n"],
)
def test_not_http(server: RunningServer, line: bytes) -> None:
    answer = exchange(server, line, is_all=True)
    assert answer == b"" or status_of(answer) in (400, 404, 505)

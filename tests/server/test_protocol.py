"""HTTP/1.1 as clients other than the usual ones may speak it, over bare sockets."""

import gzip
import json
import re
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.running import MODEL, TIMEOUT_SECONDS, RunningServer

BODY = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 2}).encode()
JSON_HEADER = "Content-Type: application/json"


def request(method: str, path: str, *headers: str, body: bytes = b"", version: str = "1.1") -> bytes:
    head = [f"{method} {path} HTTP/{version}", "Host: localhost", *headers, "", ""]
    return "\r\n".join(head).encode() + body


def completion(*headers: str, version: str = "1.1", body: bytes = BODY) -> bytes:
    length = f"Content-Length: {len(body)}"
    return request("POST", "/v1/completions", JSON_HEADER, length, *headers, body=body, version=version)


def talk(server: RunningServer, *parts: bytes, close: bool = True) -> str:
    """Send the parts, the next one whenever something has come back, and read until the server closes."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_SECONDS) as connection:
        received = b""
        for number, part in enumerate(parts):
            if number:
                received += connection.recv(65536)
            connection.sendall(part)
        if close:
            connection.sendall(request("GET", "/health", "Connection: close"))
        while more := connection.recv(65536):
            received += more
    return received.decode()


def statuses(answers: str) -> list[int]:
    return [int(status) for status in re.findall(r"HTTP/1\.1 (\d{3})", answers)]


def json_of(answer: str) -> Any:
    return json.loads(answer.partition("\r\n\r\n")[2].partition("HTTP/1.1")[0])


def test_a_connection_takes_many_requests_sent_at_once(server: RunningServer) -> None:
    answers = talk(server, request("GET", "/health") + completion() + request("GET", "/v1/models"))
    assert statuses(answers) == [200, 200, 200, 200]
    order = [answers.index(mark) for mark in ('"status"', "text_completion", '"list"')]
    assert order == sorted(order)


def test_a_body_in_pieces(server: RunningServer) -> None:
    head = request("POST", "/v1/completions", JSON_HEADER, "Transfer-Encoding: chunked")
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (BODY[:7], BODY[7:]))
    assert statuses(talk(server, head + pieces + b"0\r\n\r\n")) == [200, 200]


def test_a_client_that_asks_before_it_sends_its_body(server: RunningServer) -> None:
    head = completion("Expect: 100-continue").removesuffix(BODY)
    assert statuses(talk(server, head, BODY)) == [100, 200, 200]


def test_http_1_0(server: RunningServer) -> None:
    answer = talk(server, completion(version="1.0"), close=False)
    assert statuses(answer) == [200]
    assert "transfer-encoding" not in answer.lower()
    assert json_of(answer)["object"] == "text_completion"


def test_a_compressed_body_is_refused_by_name(server: RunningServer) -> None:
    answer = talk(server, completion("Content-Encoding: gzip", body=gzip.compress(BODY)))
    assert statuses(answer) == [415, 200]
    error = json_of(answer)["error"]
    assert error["code"] == "unsupported_media_type"
    assert "Content-Encoding" in error["message"]
    assert statuses(talk(server, completion("Content-Encoding: identity"))) == [200, 200]


@pytest.mark.parametrize(
    "path", ["/v1/completions/", "//v1/completions", "/v1/v1/completions", "/completions"]
)
def test_a_path_that_is_almost_right_is_unknown(server: RunningServer, path: str) -> None:
    """Not redirected: the scheme and host in a redirect would be those behind a proxy."""
    length = f"Content-Length: {len(BODY)}"
    answer = talk(server, request("POST", path, JSON_HEADER, length, body=BODY))
    assert statuses(answer) == [404, 200]
    assert path in json_of(answer)["error"]["message"]

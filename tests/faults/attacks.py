"""What hostile clients send that is no single request: heads without end, many at once, clients that leave.

Used by ``tests.faults.hostile_inputs``. Each attack is bounded, and takes no more than seconds where it is
answered as it should be.
"""

import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.integration.conftest import Server

MODEL = "truedraft-demo"
TIMEOUT = 300
Attack = Callable[[Server], str]


def raw(server: Server, *parts: bytes, is_all: bool = True) -> str:
    """The status of what comes back, if anything does before the connection ends. A client that sends no more
    says so, unless its request is complete: for then it would have left."""
    address, received = urlsplit(server.url), b""
    with socket.create_connection((address.hostname, address.port), timeout=TIMEOUT) as connection:
        with suppress(OSError):
            for part in parts:
                connection.sendall(part)
            if is_all:
                connection.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            while len(received) < 1 << 20 and (more := connection.recv(65536)):
                received += more
    return received[9:12].decode() or "closed"


def posted(server: Server, path: str, body: dict[str, Any], timeout: float = TIMEOUT) -> str:
    try:
        answer = httpx.post(f"{server.url}{path}", json={"model": MODEL} | body, timeout=timeout)
    except httpx.TimeoutException:
        return "left"
    return str(answer.status_code)


def together(server: Server, path: str, bodies: list[dict[str, Any]], timeout: float = TIMEOUT) -> str:
    with ThreadPoolExecutor(len(bodies)) as threads:
        counts = Counter(threads.map(lambda body: posted(server, path, body, timeout), bodies))
    return " ".join(f"{number}x{status}" for status, number in sorted(counts.items()))


def checker_of(server: Server) -> int | None:
    """The process that checks grammars, a child of the server's."""
    for child in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
        if b"validator_process" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return None


def stopped_checker(server: Server) -> str:
    ask = {"prompt": "x", "max_tokens": 2}
    posted(server, "/v1/completions", ask | {"structured_outputs": {"regex": "a"}})
    if (checker := checker_of(server)) is not None:
        os.kill(checker, signal.SIGSTOP)
    bodies = [ask | {"structured_outputs": {"regex": f"a{number}"}} for number in range(3)]
    return together(server, "/v1/completions", bodies, timeout=60)


def attacks() -> Iterator[tuple[str, Attack]]:
    string = b'"' + b'\\"' * 800 + b":" * 100_001
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    complete = head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(string)
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    million = b"a" * 1_000_000
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: "
    yield (
        "a string without an end",
        lambda server: raw(server, complete + string, is_all=False),
    )
    yield "a header of 32 MB", lambda server: raw(server, get + b"x: ", *[million] * 32)
    yield "headers of 60 MB", lambda server: raw(server, get, *[b"x: " + b"a" * 995 + b"\r\n"] * 60_000)
    yield "a trailer of 30 MB", lambda server: raw(server, chunked, *[million] * 30)
    yield "200,000 requests in a row", lambda server: raw(server, *[(get + b"\r\n") * 1000] * 200)
    wide = json.loads('"\\u6f22"')
    for size in (490_000, 2_600_000):
        long = {"prompt": "a b c " * (size // 6)}
        yield (
            f"12 tokenize of {size:,} characters",
            lambda s, long=long: together(s, "/tokenize", [long] * 12),
        )  # type: ignore[misc]
        other = {"prompt": wide * size}
        yield f"3 tokenize of {size:,} CJK", lambda s, other=other: together(s, "/tokenize", [other] * 3)  # type: ignore[misc]
    bodies = [{"prompt": "a b c " * 80_000}] * 30
    yield "30 of them leave", lambda server: together(server, "/tokenize", bodies, timeout=0.5)
    texts = [f"{number:x}" for number in range(5200)]
    one = {"type": "object", "properties": {"t": {"enum": texts}}, "required": ["t"]}
    schema = {"oneOf": [{"$ref": "#/$defs/x"}] * 1000, "$defs": {"x": one}}
    asked = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"json": schema}}
    yield "4 schemas of references", lambda server: together(server, "/v1/completions", [asked] * 4)
    lexers = [
        f"start: {' | '.join(f'L{i}' for i in range(100))}\n"
        + "".join(f"L{i}: /[a-z ]*c[a-z ]{{{i + n + 1}}}/\n" for i in range(100))
        for n in range(20)
    ]
    grammars = [
        {"prompt": "x", "max_tokens": 900, "structured_outputs": {"grammar": text}} for text in lexers
    ]
    yield "20 grammars that give up", lambda server: together(server, "/v1/completions", grammars)
    echoed = {"prompt": [[7] * 1000] * 8, "n": 128, "max_tokens": 0, "echo": True, "return_token_ids": True}
    yield "an answer of 1,024 echoes", lambda server: posted(server, "/v1/completions", echoed)
    traced = {"method": "ngram", "trace": True, "num_speculative_tokens": 32}
    traces = {"prompt": "x", "n": 64, "max_tokens": 900, "ignore_eos": True, "speculation": traced}
    yield "traces of 64 choices", lambda server: posted(server, "/v1/completions", traces)
    yield "a stopped checker", stopped_checker

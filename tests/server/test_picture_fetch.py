"""Pictures by URL: from allowed hosts, at addresses of the open internet, within limits."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from truedraft.server.text import picture_fetch
from truedraft.server.text.picture_fetch import FetchError, fetched, is_public
from truedraft.server.text.picture_size import Tiles, shown_size


class Host(BaseHTTPRequestHandler):
    """Answers by the path; a number is a status, and what follows ``to`` is where it redirects to."""

    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(f"{self.headers['host']} {self.path}")
        name, _, rest = self.path.lstrip("/").partition("/")
        self.send_response(302 if name == "to" else int(name) if name.isdigit() else 200)
        if name == "to":
            self.send_header("location", rest)
        self.end_headers()
        if name not in ("to", "head"):
            self.wfile.write(b"picture" * (1 if name != "large" else 1000))

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Returns the address of pictures.test, which resolves to this machine as if that were a public one."""
    server = HTTPServer(("127.0.0.1", 0), Host)
    port = server.server_port
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Host.asked = []
    here = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
    monkeypatch.setattr(picture_fetch.socket, "getaddrinfo", lambda *_, **__: here)
    monkeypatch.setattr(picture_fetch, "is_public", lambda address: True)
    yield f"pictures.test:{port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_allowed_hosts_are_asked(host: str) -> None:
    assert fetched(f"http://{host}/a.png?size=1", ["Pictures.test"]) == b"picture"
    assert Host.asked == [f"{host} /a.png?size=1"]
    assert fetched(f"http://{host}/to/http://{host}/b", ["pictures.test"]) == b"picture"
    assert fetched(f"http://{host}/to//c", ["pictures.test"]) == b"picture"


@contextmanager
def refused(words: str) -> Iterator[None]:
    with pytest.raises(FetchError, match=words):
        yield


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("404", "answered 404"),
        ("500", "answered 500"),
        ("large", "more than"),
        ("to/http://other.test/a", "allowed_media_domains"),
        ("to/http://127.0.0.1/a", "allowed_media_domains"),
        ("to/file:///etc/passwd", "neither"),
        ("to/http://user@pictures.test/a", "user's name"),
        ("to/to/to/to/to/x", "redirects more"),
    ],
)
def test_answers_that_are_no_picture(
    host: str, path: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture_fetch, "MAX_BYTES", 1000)
    if path.startswith("to/to"):
        path = f"to/http://{host}/" * 5 + "x"
    with refused(words):
        fetched(f"http://{host}/{path}", ["pictures.test"])


@pytest.mark.parametrize(
    "url", ["ftp://pictures.test/a", "http:///a", "//pictures.test/a", "javascript:1", "http://[::1", "x" * 9]
)
def test_other_urls_are_refused(url: str) -> None:
    with refused("neither|cannot be read"):
        fetched(url, ["pictures.test"])


def test_names_of_private_addresses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allowed name may resolve to several addresses, one of them private: nothing is asked."""
    for addresses in (["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["::1"], []):
        found = [(0, 0, 0, "", (address, 80)) for address in addresses]
        monkeypatch.setattr(picture_fetch.socket, "getaddrinfo", lambda *_, found=found, **__: found)
        monkeypatch.setattr(picture_fetch.socket, "create_connection", lambda *_: pytest.fail("it was asked"))
        with refused("private network"):
            fetched("http://pictures.test/a", ["pictures.test"])


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:4700::1111", True),
        *[
            (address, False)
            for address in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.1.1")
        ],
        *[(address, False) for address in ("0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255")],
        *[(address, False) for address in ("::1", "::", "fe80::1%eth0", "fec0::1", "fc00::1", "ff02::1")],
        *[(address, False) for address in ("::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::")],
        *[(address, False) for address in ("64:ff9b::7f00:1", "64:ff9b::a00:1")],
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(address) == expected


def test_sizes_are_those_of_transformers() -> None:
    pil = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    for height, width in [
        (1, 1),
        (5, 900),
        (77, 31),
        (400, 400),
        (1000, 999),
        (13, 2600),
        (4000, 21),
        (48, 80),
    ]:
        for side, least, most in ((28, 3136, 1003520), (32, 65536, 2097152), (8, 64, 2560), (32, 1024, 1024)):
            expected = pil.smart_resize(height, width, side, least, most)
            found = shown_size(height, width, Tiles(side, least, most))
            # Where the largest number is small, transformers may round beyond it.
            is_larger = expected[0] * expected[1] > most
            assert (found == expected) != is_larger
            assert found[0] * found[1] <= most
    with pytest.raises(ValueError, match="200 times"):
        shown_size(1, 201, Tiles(32, 1024, 4096))

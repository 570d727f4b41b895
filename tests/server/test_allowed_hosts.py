"""Whom a request names in its Host header: a page whose name leads here is told off."""

from pathlib import Path

import pytest

from tests.server.conftest import StartServer
from tests.server.refusals import COMPLETIONS
from tests.server.running import MODEL, RunningServer
from tests.server.test_protocol import statuses, talk
from truedraft.server.http.allowed_hosts import AllowedHostsMiddleware, allowed_hosts
from truedraft.server.settings import Settings


def is_allowed(name: str, **settings: object) -> bool:
    hosts = allowed_hosts(Settings(**settings))
    return not hosts or AllowedHostsMiddleware(None, hosts, lambda _: None)._is_allowed(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("localhost.", 200),
        ("api.localhost:1", 200),
        ("127.0.0.1", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("10.0.0.5", 200),  # such as a port that is passed on; a page cannot have it lead elsewhere
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("127.0.0.1@evil.example", 421),
        ("evillocalhost", 421),
        ("[::1].evil.example", 200),  # is no name: what follows the bracket is a port at most
        ("", 421),
    ],
)
def test_loopback_without_keys(server: RunningServer, host: str, status: int) -> None:
    """Every path is refused: what a page may not do it may not read either."""
    headers = {"host": host, "origin": f"http://{host}"}
    response = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, headers=headers)
    assert response.status_code == status
    assert server.get("/health", headers=headers).status_code == status
    if status == 421:
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "wrong_host")
        assert "allowed_hosts" in error["message"]
        assert response.headers["x-request-id"]


def test_clients_that_name_none_or_several(server: RunningServer) -> None:
    assert statuses(talk(server, b"GET /health HTTP/1.0\r\n\r\n", close=False)) == [200]
    twice = b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    assert statuses(talk(server, twice, close=False)) in ([400], [421])


def test_who_is_asked_by_any_name(tmp_path: Path) -> None:
    assert not is_allowed("server.example")
    assert not is_allowed("server.example", host="::1")
    assert not is_allowed("server.example", host="localhost")
    assert is_allowed("server.example", host="0.0.0.0")
    assert is_allowed("server.example", api_keys=["secret"])
    assert is_allowed("server.example", uds=tmp_path / "socket")


def test_allowed_names(start_server: StartServer) -> None:
    hosts = {"allowed_hosts": ["api.example", "*.Inner.example"], "api_keys": ["secret"]}
    for host, status in (
        ("api.example", 200),
        ("API.example.:443", 200),
        ("a.inner.example", 200),
        ("inner.example", 421),
        ("localhost", 421),
        ("192.168.0.7:8000", 200),  # probes ask so
    ):
        assert is_allowed(host.partition(":")[0].lower().rstrip("."), **hosts) is (status == 200)
    assert is_allowed("any.example", allowed_hosts=["*"])
    with start_server(allowed_hosts=["api.example"], cors_origins=["*"]) as server:
        assert server.get("/v1/models", headers={"host": "api.example"}).json()["data"][0]["id"] == MODEL
        asked = {
            "host": "evil.example",
            "origin": "http://evil.example",
            "access-control-request-method": "POST",
        }
        assert server.client.options(COMPLETIONS, headers=asked).status_code == 421

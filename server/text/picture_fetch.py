"""Fetches pictures from hosts that the settings allow, and never from addresses of private networks.

A name is resolved once: what is asked is the address that was checked. Redirects are checked like URLs.
"""

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Sequence
from urllib.parse import SplitResult, urljoin, urlsplit

from truedraft.server.text.helper_process import FETCH_SECONDS

MAX_BYTES = 32 << 20
MAX_REDIRECTS = 3
PIECE = 1 << 16
MOVED = (301, 302, 303, 307, 308)


class FetchError(Exception):
    """Says why a picture was not fetched."""


def fetched(url: str, domains: Sequence[str]) -> bytes:
    """Returns what a URL has; raises ``FetchError``."""
    until = time.monotonic() + FETCH_SECONDS
    for _ in range(MAX_REDIRECTS + 1):
        parts = _checked(url, domains)
        try:
            answer = _ask(parts, until)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise FetchError(f"{parts.hostname} did not answer: {str(error)[:200]}") from error
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer)
    raise FetchError(f"{parts.hostname} redirects more than {MAX_REDIRECTS} times")


def _checked(url: str, domains: Sequence[str]) -> SplitResult:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise FetchError("its URL cannot be read") from error
    if parts.scheme not in ("http", "https") or not host:
        raise FetchError("its URL is neither a 'data:' URL nor one of http or https")
    if host.lower() not in {domain.lower() for domain in domains}:
        raise FetchError(
            f"pictures are not fetched from {host[:200]}: send them in 'data:' URLs, or add the host to "
            "allowed_media_domains"
        )
    if parts.username is not None or port == 0:
        raise FetchError("its URL has a user's name, or no port that can be asked")
    return parts


def _ask(parts: SplitResult, until: float) -> bytes | str:
    """Returns what the URL has, or where it redirects to."""
    assert parts.hostname is not None
    is_secure = parts.scheme == "https"
    connection = http.client.HTTPConnection(parts.hostname, parts.port or (443 if is_secure else 80))
    connection.sock = _connected(parts.hostname, connection.port, until, is_secure=is_secure)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        host = parts.netloc.rpartition("@")[2]
        connection.request("GET", target, headers={"host": host, "accept": "image/*"})
        answer = connection.getresponse()
        if answer.status in MOVED and (location := answer.getheader("location")):
            return location
        if answer.status != 200:
            raise FetchError(f"{parts.hostname} answered {answer.status}")
        data = bytearray()
        while piece := answer.read1(PIECE):
            data += piece
            if len(data) > MAX_BYTES:
                raise FetchError(f"it has more than {MAX_BYTES >> 20} MiB")
            if time.monotonic() > until:
                raise TimeoutError("it takes too long")
        return bytes(data)
    finally:
        connection.close()


def _connected(host: str, port: int, until: float, *, is_secure: bool) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(address[0]) for *_, address in found]
    if not addresses or not all(map(is_public, addresses)):
        raise FetchError(f"{host} has an address of a private network")
    made = socket.create_connection((addresses[0], port), max(0.1, until - time.monotonic()))
    if not is_secure:
        return made
    try:
        return ssl.create_default_context().wrap_socket(made, server_hostname=host)
    except BaseException:
        made.close()
        raise


def is_public(address: str) -> bool:
    """Tells whether an address is one of the open internet."""
    found = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(found, "ipv4_mapped", None) or getattr(found, "sixtofour", None) or found
    return all(
        each.is_global
        and not each.is_multicast
        and not each.is_reserved
        and not getattr(each, "is_site_local", False)
        for each in (found, inner)
    )

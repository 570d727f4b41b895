"""Refuses requests that name another host than this server, as pages do whose name was made to lead here.

A web page whose own name resolves to the address of this server (DNS rebinding) is of the same origin as the
server and may read every answer. The name in ``Host`` gives it away. An address cannot be made to lead
elsewhere, so addresses are fine. Installed by ``server.app``.
"""

import ipaddress
from collections.abc import Callable, Sequence
from socket import gethostname

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from truedraft.server.errors import WrongHostError
from truedraft.server.http.error_answer import error_answer
from truedraft.server.settings import Settings

# Names that nobody can buy or have a public name server answer for: those of loopback, of private networks,
# and of machines that answer for themselves on the local link.
LOOPBACK_NAMES = ("localhost", "*.localhost")
PRIVATE_NAMES = ("*.internal", "*.local", "*.home.arpa")


def allowed_hosts(settings: Settings) -> list[str]:
    """Returns the setting. Its default is names that cannot be an attacker's for a server without keys that
    only its own machine can reach, else any name, written as no names."""
    if settings.allowed_hosts:
        return settings.allowed_hosts
    is_open_to_pages = settings.uds is None and not settings.api_keys and _is_loopback(settings.host)
    return [*LOOPBACK_NAMES, *PRIVATE_NAMES, gethostname(), settings.host] if is_open_to_pages else []


class AllowedHostsMiddleware:
    """``hosts`` are names, or ``*.`` and what a name ends with."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str], count_error: Callable[[str], None]) -> None:
        self._app = app
        self._hosts = [host.lower().rstrip(".") for host in hosts]
        self._count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).getlist("host")
        # Only programs leave it out.
        if not given or (len(given) == 1 and self._is_allowed(_name_of(given[0]))):
            await self._app(scope, receive, send)
            return
        error = WrongHostError(
            f"This server is not '{', '.join(given)}' (the Host header). Add the name to allowed_hosts, or "
            "have the proxy send one that is allowed."
        )
        self._count_error("wrong_host")
        await error_answer(error, scope)(scope, receive, send)

    def _is_allowed(self, name: str) -> bool:
        if _is_address(name):
            return True
        return any(
            name == host or (host.startswith("*.") and name.endswith(host[1:])) or host == "*"
            for host in self._hosts
        )


def _name_of(host: str) -> str:
    """Returns a host as names are compared: without its port, and without an IPv6 address's brackets."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback if _is_address(host) else host == "localhost"

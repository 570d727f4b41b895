"""uvicorn's HTTP protocol with limits on what comes before a body: bytes, headers, time, requests in a row.

Anybody who reaches the port can send these, with or without a key. What goes wrong here is answered in
OpenAI's shape, without the application. Installed by ``server.cli.launch``.
"""

import asyncio
import json
import logging
import resource
import time
from collections.abc import Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from truedraft.server.errors import error_body
from truedraft.server.http.error_answer import path_below_root
from truedraft.server.stages import ARRIVED

logger = logging.getLogger("truedraft.server")

# Request line and headers of one request, and its trailers.
MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 256
# A request's headers may take this long, from the connection's begin or from their first byte.
HEAD_SECONDS = 30.0
# Requests that wait on one connection for the answer to an earlier one. Hardly any client sends two.
MAX_PIPELINED = 16
# What the parser gets at once: it does not stop in between.
PIECE_BYTES = 16 << 10
# Descriptors that connections leave to workers, helpers, files and probes.
RESERVED_DESCRIPTORS = 256
# Connections above the limit, on which only probes are answered. The oldest that has asked nothing gives way.
MAX_SPARE_CONNECTIONS = 16
PROBE_PATHS = frozenset({"/health", "/ready", "/metrics"})
SECONDS_BETWEEN_WARNINGS = 60.0


class RefusedRequestError(Exception):
    """What arrives is no request that is answered by the application."""

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after


class LimitedProtocol(HttpToolsProtocol):
    """Serves one connection. ``_head_bytes`` and ``_num_headers`` belong to the request that arrives, and
    ``_answered`` is the one whose answer is under way: requests in a row may wait between the two.
    ``_spare`` has each server's connections above the limit, the oldest first."""

    _last_warning: ClassVar[float] = float("-inf")
    _spare: ClassVar[WeakKeyDictionary[ServerState, dict["LimitedProtocol", None]]] = WeakKeyDictionary()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusal: RefusedRequestError | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._num_headers = 0
        self._is_in_head = False
        self._bytes_without_news = 0  # the beginning of a header, or of a chunk's line
        self._answered: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most, spare = max_connections(), self._spare.setdefault(self.server_state, {})
        if len(self.connections) - len(spare) > most:
            self._warn(most)
            spare[self] = None
            if len(spare) > MAX_SPARE_CONNECTIONS:
                next((each for each in spare if not each._is_answering), self)._refuse(_busy(most))
        if not self.transport.is_closing():
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._spare.get(self.server_state, {}).pop(self, None)
        super().connection_lost(exc)
        if self._answered is not None and self._is_answering:
            # uvicorn tells the request that arrived last.
            self._answered.disconnected = True
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            if self.transport.is_closing():
                return
            piece = data[start : start + PIECE_BYTES]
            self._bytes_without_news += len(piece)
            super().data_received(piece)
            if self._bytes_without_news > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(_too_large())

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        if cycle.scope["http_version"] == "1.0":
            _end_by_closing(cycle)
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][ARRIVED] = time.perf_counter()
        self._is_in_head = True
        self._bytes_without_news = self._head_bytes = self._num_headers = 0
        if self._head_timer is None:
            self._start_head_timer()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise self._refused(_too_many())
        self._count(len(name) + len(value) + len(": \r\n"))
        if self._is_in_head and (refusal := _fault_of_header(name.lower(), value, self.headers)) is not None:
            raise self._refused(refusal)
        if self._is_in_head:  # trailers, which the application would take for headers, are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._bytes_without_news = 0
        self._stop_head_timer()
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._refused(RefusedRequestError(400, "too_many_requests", "Too many pipelined requests."))
        is_spare = self in self._spare.get(self.server_state, {})
        if is_spare and not self._is_probe():
            raise self._refused(_busy(max_connections()))
        super().on_headers_complete()
        if is_spare:
            self.cycle.keep_alive = False

    def _is_probe(self) -> bool:
        path = self.url.partition(b"?")[0].decode("ascii", "replace")
        return path_below_root({"path": path, "root_path": self.root_path}) in PROBE_PATHS

    def on_body(self, body: bytes) -> None:
        self._bytes_without_news = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bytes_without_news = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for whatever stops the parser, a refusal of ours included."""
        self._refuse(self._refusal or RefusedRequestError(400, "invalid_http", msg))

    def _count(self, num_bytes: int) -> None:
        self._bytes_without_news = 0
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise self._refused(_too_large())

    def _refused(self, refusal: RefusedRequestError) -> RefusedRequestError:
        """Has to be raised where the parser calls, which turns it into an error of its own."""
        self._refusal = refusal
        return refusal

    def _refuse(self, refusal: RefusedRequestError) -> None:
        """Answer, unless an earlier request's answer is under way, and close the connection."""
        self._stop_head_timer()
        self._spare.get(self.server_state, {}).pop(self, None)
        if not self._is_answering:
            body = json.dumps(error_body(str(refusal), "invalid_request_error", None, refusal.code)).encode()
            retry = b"" if refusal.retry_after is None else b"retry-after: %d\r\n" % refusal.retry_after
            head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
            self.transport.write(
                STATUS_LINE[refusal.status] + head + retry + b"connection: close\r\n\r\n" + body
            )
        self.transport.close()

    def _warn(self, most: int) -> None:
        if self.loop.time() - LimitedProtocol._last_warning > SECONDS_BETWEEN_WARNINGS:
            LimitedProtocol._last_warning = self.loop.time()
            logger.warning(
                "%d connections are open, the most with this limit of open files (ulimit -n); more get 503.",
                most,
            )

    @property
    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self._is_answering:  # the connection is in use anyhow
            self._start_head_timer()
        elif self._is_in_head:
            late = f"The request's headers did not arrive within {HEAD_SECONDS:g} seconds."
            self._refuse(RefusedRequestError(408, "header_timeout", late))
        else:  # nothing has been asked
            self._stop_head_timer()
            self.transport.close()


def _end_by_closing(cycle: RequestResponseCycle) -> None:
    """Has an answer without a length end where the connection does: HTTP/1.0 knows no chunks."""
    cycle.chunked_encoding = False
    send = cycle.send

    async def send_as_it_is(message: Any) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))  # which uvicorn counts down
        await send(message)

    cycle.send = send_as_it_is  # type: ignore[method-assign]


def max_connections() -> int:
    """Returns as many as leave descriptors to the rest of the server, half of them where there are few."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(allowed - RESERVED_DESCRIPTORS, allowed // 2)


def _busy(most: int) -> RefusedRequestError:
    message = f"{most} connections are open, and the server takes no more. Try again later."
    return RefusedRequestError(503, "too_many_connections", message, retry_after=1)


def _fault_of_header(
    name: bytes, value: bytes, others: Sequence[tuple[bytes, bytes]]
) -> RefusedRequestError | None:
    """Returns why a request with such a header after the ``others`` is not HTTP/1.1 that is served here, by
    sections 3.2 and 6.1 of RFC 9112."""
    is_repeated = any(other == name for other, _ in others)
    if name == b"host" and is_repeated:
        return RefusedRequestError(400, "invalid_http", "The request has more than one Host header.")
    if name == b"transfer-encoding":
        if value.strip().lower() != b"chunked":
            message = "The server knows no transfer coding but chunked. Send the body as it is, or chunked."
            return RefusedRequestError(501, "unknown_transfer_coding", message)
        if is_repeated:
            return RefusedRequestError(400, "invalid_http", "The request is chunked twice.")
    return None


def _too_large() -> RefusedRequestError:
    message = f"The request's line and headers have more than {MAX_HEAD_BYTES} bytes."
    return RefusedRequestError(431, "headers_too_large", message)


def _too_many() -> RefusedRequestError:
    return RefusedRequestError(431, "headers_too_large", f"The request has more than {MAX_HEADERS} headers.")

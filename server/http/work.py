"""Shares out what requests cost the front end around the engine's work: parsing, templates, tokens, JSON.

It is done in threads of its own, in turns that are fair between API keys, and only as much at a time as fits
into memory. A request whose client has left, or whose time is over, is given up; what a thread still does for
it counts for its key until it ends. The size of a body stands for what its text takes in memory while it is
tokenized, which is far more than anything else.
"""

import asyncio
import contextvars
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from truedraft.engine.text.abandoned import abandonable
from truedraft.server.errors import ClientDisconnectedError, RequestTimeoutError
from truedraft.server.http.auth import api_key_of
from truedraft.server.settings import RequestSettings
from truedraft.server.stages import current_stages, timed
from truedraft.server.turns import Turns

# Bytes of memory for each byte of a text that is tokenized, as measured: 150 of ASCII, 220 of others.
MEMORY_PER_BYTE = 250
# Bytes of a body up to which work on it is done at once: a trip to another thread would take longer.
SHORT_BODY = 2048

# A body with one of these has pictures, whose reading takes long. In a text the quotation marks are others.
PICTURES = (b'"image_url"', b'"input_image"', b'"image"')
# So many threads wait for pictures, apart from those that do all else.
PICTURE_THREADS = 4

P = ParamSpec("P")
T = TypeVar("T")


class Work:
    """Each server has one; ``stop`` ends its threads."""

    def __init__(self, settings: RequestSettings, num_threads: int | None = None) -> None:
        self.request_timeout = settings.request_timeout
        self.num_threads = num_threads or min(32, len(os.sched_getaffinity(0)) + 4)
        self._threads = ThreadPoolExecutor(self.num_threads, "work")
        self.turns = Turns(
            "the server to read and write what others sent",
            settings.work_memory,
            self.num_threads,
            settings.max_queued_sequences,
        )
        self._num_abandoned: Counter[str] = Counter()

    def num_abandoned(self, key: str) -> int:
        """Returns how many threads work for requests of the key that have ended."""
        return self._num_abandoned[key]

    async def run(self, weight: int, key: str, work: Callable[[], T], *, may_refuse: bool = True) -> T:
        """Works in a thread, once it is its turn, which lasts for as long as the thread is busy with it.

        ``QueueFullError`` if too much waits already, unless it may not be refused: an answer is there.
        """
        stages = current_stages()
        stages.key = key
        with timed("turn"):
            turn = await self.turns.begin(weight, key, may_refuse=may_refuse, goes_on=stages.has_had_turn)
        stages.has_had_turn = True
        loop, is_abandoned = asyncio.get_running_loop(), threading.Event()
        try:
            with abandonable(is_abandoned.is_set):
                context = contextvars.copy_context()
            running: Future[T] = self._threads.submit(context.run, work)
        except BaseException:
            turn.end()
            raise
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(turn.end))
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            is_abandoned.set()
            self._num_abandoned[key] += 1
            running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._has_ended, key))
            raise

    def _has_ended(self, key: str) -> None:
        self._num_abandoned[key] -= 1

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def work_of(request: Request, *, with_pictures: bool = False) -> Work:
    work = request.app.state.picture_work if with_pictures else request.app.state.work
    assert isinstance(work, Work)
    return work


async def in_thread_if_long(request: Request, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Work on the event loop or, for a long body, in a thread, so that other requests go on meanwhile."""
    if len(await request.body()) <= SHORT_BODY:
        return work(*args, **kwargs)
    return await in_thread(request, work, *args, **kwargs)


async def in_thread(request: Request, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Work on a request's body in a thread, unless nobody waits for it any more."""
    if await request.is_disconnected():
        raise ClientDisconnectedError("The client closed the connection.")
    body = await request.body()
    key, threads = (
        api_key_of(request.scope),
        work_of(request, with_pictures=any(mark in body for mark in PICTURES)),
    )
    running = threads.run(MEMORY_PER_BYTE * len(body), key, lambda: work(*args, **kwargs))
    return await while_wanted(request, running)


async def while_wanted(request: Request, work: Awaitable[T]) -> T:
    """Await ``work``, but give it up when the client leaves or the request's time is over."""
    try:
        async with asyncio.timeout(seconds_left(request.scope)):
            return await while_connected(request, work)
    except TimeoutError:
        raise RequestTimeoutError(
            f"The request was not finished within {work_of(request).request_timeout:g} seconds."
        ) from None


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await ``work``, but give it up when the client closes the connection."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnectedError("The client closed the connection.")
    finally:
        working.cancel()
        leaving.cancel()


def start_clock(request: Request) -> None:
    """The request is there as a whole: from now on ``request_timeout`` counts."""
    timeout = work_of(request).request_timeout
    if timeout is not None:
        deadline = asyncio.get_running_loop().time() + timeout
        request.scope["state"]["deadline"] = deadline


def seconds_left(scope: Scope) -> float | None:
    """Returns the seconds until the request's timeout; None if it has no timeout."""
    deadline = scope["state"].get("deadline")
    return None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

"""Closed and open loops of requests, and how late the generator itself was.

Closed loop: N clients, each sends its next request when its last is finished. Shows throughput; a slow
server is asked less often. Open loop: requests arrive when a Poisson process says, whatever the server does.
Shows what users of a busy server see; latencies count from the moment a request was due.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle, islice

import aiohttp

from truedraft.loadtest.client import Endpoint, Reply

Prompts = Sequence[str | list[int]]
KEEP_ALIVE_SECONDS = 4.0  # less than the 5 of uvicorn, which vLLM also runs on
TICK = 0.05  # seconds; looking costs time that the server may need, where both share a machine


@dataclass
class LoadResult:
    """Holds what one load gave. ``ticks`` are the seconds by which the event loop woke up late."""

    replies: list[Reply]
    seconds: float
    ticks: list[float] = field(default_factory=list)

    @property
    def good(self) -> list[Reply]:
        return [reply for reply in self.replies if reply.error is None]

    @property
    def errors(self) -> list[str]:
        return [reply.error for reply in self.replies if reply.error is not None]

    @property
    def num_tokens(self) -> int:
        return sum(reply.num_tokens for reply in self.good)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def new_session(api_key: str, timeout: float) -> aiohttp.ClientSession:
    """Has to be called in the event loop that uses it. ``timeout``: seconds without a byte."""
    return aiohttp.ClientSession(
        headers={"authorization": f"Bearer {api_key}", "accept-encoding": "identity"},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout),
        # No limit of connections, which would be a queue outside the measurement. None is used again after
        # KEEP_ALIVE_SECONDS of rest: the server may just be closing it.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
    )


async def closed_loop(
    session: aiohttp.ClientSession, endpoint: Endpoint, prompts: Prompts, concurrency: int, num_requests: int
) -> LoadResult:
    queue = iter(islice(cycle(prompts), num_requests))
    replies: list[Reply] = []

    async def one_client() -> None:
        for prompt in queue:
            replies.append(await endpoint.send(session, prompt, due=time.perf_counter()))

    async def work() -> None:
        await asyncio.gather(*(one_client() for _ in range(min(concurrency, num_requests))))

    return await _watched(work, replies)


async def open_loop(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    prompts: Prompts,
    rate: float,
    num_requests: int,
    seed: int = 0,
) -> LoadResult:
    """``rate`` requests a second on average; the same seed gives the same arrivals."""
    replies: list[Reply] = []

    async def work() -> None:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for prompt, arrival in zip(cycle(prompts), arrivals(rate, num_requests, seed), strict=False):
                due = started + arrival
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(one(prompt, due))

    async def one(prompt: str | list[int], due: float) -> None:
        replies.append(await endpoint.send(session, prompt, due))

    return await _watched(work, replies)


def arrivals(rate: float, number: int, seed: int) -> Iterator[float]:
    """Seconds from the start of each arrival of a Poisson process."""
    gaps = random.Random(seed)
    return accumulate(gaps.expovariate(rate) for _ in range(number))


async def _watched(work: Callable[[], Awaitable[None]], replies: list[Reply]) -> LoadResult:
    ticks: list[float] = []
    watch = asyncio.create_task(_tick(ticks))
    started = time.perf_counter()
    try:
        await work()
    finally:
        watch.cancel()
    return LoadResult(replies, time.perf_counter() - started, ticks)


async def _tick(ticks: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK)
        ticks.append(time.perf_counter() - before - TICK)

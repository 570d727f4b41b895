"""Measures how long ``/health`` takes while many connections are open, and some of them stream.

    python -m tests.faults.connections [--open 1000] [--active 100] [--seconds 20]

Starts the real server with the bundled pair. The load and the probe are processes of their own. Prints
percentiles of ``/health`` with nothing else to do, with the open connections, and with the active ones too.
"""

import argparse
import asyncio
import multiprocessing
import resource
import socket
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.faults.watched import COMPLETIONS, MODEL, stall_of_health
from tests.integration.conftest import TIMEOUT_SECONDS, serving


def stream_for_ever(url: str, number: int, stop: Event) -> None:
    async def client(session: httpx.AsyncClient) -> None:
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
        while not stop.is_set():
            async with session.stream("POST", f"{url}{COMPLETIONS}", json=body) as response:
                async for _ in response.aiter_raw():
                    if stop.is_set():
                        return

    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, limits=limits) as session:
            await asyncio.gather(*(client(session) for _ in range(number)))

    asyncio.run(run())


def probe(url: str, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    taken = stall_of_health(url, lambda: time.monotonic() > deadline)
    cuts = statistics.quantiles(taken, n=100)
    return (
        f"p50 {cuts[49] * 1e3:.1f} ms, p99 {cuts[98] * 1e3:.1f} ms, "
        f"longest {max(taken) * 1e3:.1f} ms of {len(taken)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--open", type=int, default=1000)
    parser.add_argument("--active", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server, ExitStack() as stack:
        print(f"nothing else: {probe(server.url, options.seconds)}", flush=True)
        address = urlsplit(server.url)
        for _ in range(options.open):
            connection = socket.create_connection((address.hostname, address.port))
            stack.enter_context(connection).sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n")
        print(f"{options.open} open: {probe(server.url, options.seconds)}", flush=True)
        stop = spawn.Event()
        load = spawn.Process(target=stream_for_ever, args=(server.url, options.active, stop))
        load.start()
        time.sleep(3)
        print(f"{options.active} of them active: {probe(server.url, options.seconds)}", flush=True)
        stop.set()
        load.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())

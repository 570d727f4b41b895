"""``truedraft bench``: load on any running OpenAI-compatible server.

Loads are repeated alternately, so that a machine that slows down for a while slows all. It runs
in a process of its own and says how late it was itself: numbers of a generator that cannot keep up are its
own. See ``generator`` for what the two kinds of load mean.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import uvloop

from truedraft.loadtest.client import BenchmarkError, Endpoint
from truedraft.loadtest.counters import DraftCounters, read_counters
from truedraft.loadtest.generator import LoadResult, Prompts, closed_loop, new_session, open_loop
from truedraft.loadtest.machine import is_busy, machine
from truedraft.loadtest.options import BenchOptions
from truedraft.loadtest.prompts import read_prompts
from truedraft.loadtest.report import note, print_facts, print_table, save, with_progress
from truedraft.loadtest.rows import MAX_LAG_SECONDS, lag, load_row

LEGEND = (
    "Milliseconds, percentiles: first = to the first text, gap = between chunks, token = per token after the "
    "first text, all = the whole request; lag = of this generator, should be near 0"
)


@dataclass(frozen=True)
class Load:
    """Either ``concurrency`` clients or ``rate`` requests a second."""

    num_requests: int
    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests/s"
        return f"{self.concurrency} clients" if self.concurrency != 1 else "1 client"


def loads(options: BenchOptions) -> list[Load]:
    concurrency = options.concurrency
    if concurrency is None:
        concurrency = [] if options.rate else [1, 4, 16]
    closed = [Load(options.requests or 2 * number, concurrency=number) for number in concurrency]
    return closed + [Load(options.requests or 32, rate=rate) for rate in options.rate]


class Bench:
    """A connection to one server and what has been measured through it so far."""

    def __init__(self, options: BenchOptions, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        self._options, self._session = options, session
        self.endpoint = endpoint
        try:
            self.prompts: Prompts = read_prompts(options.prompts)
        except (OSError, ValueError, KeyError) as error:
            raise BenchmarkError(f"Cannot read prompts: {error}") from error
        self._results: dict[Load, list[LoadResult]] = {}
        self._drafts: dict[Load, DraftCounters | None] = {}

    async def warm_up(self) -> None:
        """Sends one request; its failure ends the benchmark before it has cost any time."""
        deadline = time.monotonic() + self._options.wait
        while True:
            result = await closed_loop(self._session, self.endpoint, self.prompts, 1, 1)
            if not result.errors:
                return
            loading = result.errors[0].startswith("HTTP 503")
            if not loading or time.monotonic() > deadline:
                raise BenchmarkError(f"The first request failed: {result.errors[0]}")
            await asyncio.sleep(0.2)

    async def run(self, load: Load) -> LoadResult:
        before = await read_counters(self._session, self.endpoint.base_url)
        repeat = len(self._results.setdefault(load, []))
        if load.rate is not None:
            result = await open_loop(
                self._session,
                self.endpoint,
                self.prompts,
                load.rate,
                load.num_requests,
                self._options.seed + repeat,
            )
        else:
            assert load.concurrency is not None
            result = await closed_loop(
                self._session, self.endpoint, self.prompts, load.concurrency, load.num_requests
            )
        self._results[load].append(result)
        after = await read_counters(self._session, self.endpoint.base_url)
        if before is not None and after is not None:
            self._drafts[load] = (self._drafts.get(load) or DraftCounters()) + (after - before)
        note(f"  {repeat + 1}/{self._options.repeats} {load.name}: {result.tokens_per_second:.1f} tokens/s")
        return result

    def rows(self) -> list[dict[str, Any]]:
        for load, results in self._results.items():
            if lag(results) > MAX_LAG_SECONDS:
                note(
                    f"WARNING: with {load.name}, this load generator was {1000 * lag(results):.0f} ms late "
                    "(99th percentile): it, or the machine, could not keep up; latencies are too high"
                )
        return [
            load_row(load.name, results, self._drafts.get(load)) for load, results in self._results.items()
        ]

    def tokens_per_second(self, load: Load) -> list[float]:
        return [result.tokens_per_second for result in self._results[load]]


async def find_model(session: aiohttp.ClientSession, base_url: str) -> str:
    try:
        async with session.get(f"{base_url}/models") as response:
            response.raise_for_status()
            return str(json.loads(await response.read())["data"][0]["id"])
    except aiohttp.ClientResponseError as error:
        raise BenchmarkError(f"{base_url}/models answered with status {error.status}") from error
    except aiohttp.ClientError as error:
        raise BenchmarkError(f"No server answers at {base_url}: {error or type(error).__name__}") from error
    except (ValueError, KeyError, IndexError) as error:
        raise BenchmarkError(f"{base_url}/models lists no model; name one with --model") from error


async def open_bench(options: BenchOptions, session: aiohttp.ClientSession) -> Bench:
    base_url = options.base_url.rstrip("/")
    if not urlsplit(base_url).path:
        base_url += "/v1"
    body = {"max_tokens": options.max_tokens, "temperature": options.temperature, **options.extra_body}
    if options.ignore_eos:
        body["ignore_eos"] = True
    model = options.model or await find_model(session, base_url)
    bench = Bench(options, session, Endpoint(base_url, model, options.chat, body))
    note(f"Warming up {model}")
    await bench.warm_up()
    return bench


async def run(options: BenchOptions) -> dict[str, Any]:
    """The whole benchmark, as the document that is shown and saved."""
    busy = is_busy()
    if busy:
        note("WARNING: the machine was busy before the load began; read latencies with care")
    async with new_session(options.key or "none", options.timeout) as session:
        bench = await open_bench(options, session)
        for load in with_progress(loads(options) * options.repeats, "Load"):
            await bench.run(load)
        return document(options, bench, busy)


def document(options: BenchOptions, bench: Bench, busy: bool) -> dict[str, Any]:
    arguments = options.model_dump(mode="json", exclude={"api_key"})
    facts = machine() | {"busy": busy, "model": bench.endpoint.model}
    return {"machine": facts, "arguments": arguments, "results": bench.rows()}


def show(document: dict[str, Any]) -> None:
    """Medians and 99th percentiles; the saved document has the 90th, too."""
    print_facts(document["machine"])
    print_table([{k: v for k, v in row.items() if "p90" not in k} for row in document["results"]], LEGEND)


def draw(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Tokens per second, and the time to the first text, by load."""
    names = [row["load"] for row in rows]
    left, right = figure.subplots(1, 2)
    left.bar(names, [row["tokens/s"] for row in rows])
    left.set_title("tokens per second")
    for percent in (50, 90, 99):
        right.plot(names, [row[f"first_p{percent}"] for row in rows], marker="o", label=f"p{percent}")
    right.set_ylim(bottom=0)
    right.set_title("milliseconds to the first text")
    right.legend()
    for axes in (left, right):
        axes.tick_params("x", rotation=30)


def main(options: BenchOptions) -> int:
    try:
        result = uvloop.run(run(options))
    except BenchmarkError as error:
        print(f"truedraft bench: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    show(result)
    save(options.save, result, lambda figure: draw(figure, result["results"]))
    return 0

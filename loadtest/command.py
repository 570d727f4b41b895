"""``foretoken bench``: load on any running OpenAI-compatible server.

Loads are repeated alternately, so that a machine that slows down for a while slows all. It runs
in a process of its own and says how late it was itself: numbers of a generator that cannot keep up are its
own. See ``generator`` for what the two kinds of load mean.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtest.client import BenchmarkError, Endpoint
from loadtest.counters import DraftCounters, read_counters
from loadtest.generator import LoadResult, Prompts, closed_loop, new_client, open_loop
from loadtest.machine import is_busy, machine
from loadtest.options import OneLineParser
from loadtest.prompts import read_prompts
from loadtest.report import note, print_facts, print_table, save, with_progress
from loadtest.rows import MAX_LAG_SECONDS, lag, load_row

LEGEND = (
    "Milliseconds, percentiles: first = to the first text, gap = between chunks, token = per token after the "
    "first text, all = the whole request; lag = of this generator, should be near 0"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"), help="default: OPENAI_API_KEY's value")
    add("--model", help="default: the first of /v1/models")
    add("--chat", action="store_true", help="chat completions instead of completions")
    add(
        *("--concurrency", "--streams"),
        type=_positive(int),
        nargs="*",
        metavar="N",
        help="closed loops of N clients (default 1 4 16)",
    )
    add(
        "--rate",
        type=_positive(float),
        nargs="*",
        default=[],
        metavar="R",
        help="open loops: R a second",
    )
    add(
        "--requests",
        type=_positive(int),
        help="of one load, once (default: 2 a client, 32 for a rate)",
    )
    add("--repeats", type=_positive(int), default=5, help="of each load, alternating (default %(default)s)")
    add("--max-tokens", type=_positive(int), default=128)
    add("--temperature", type=float, default=0.0)
    add(
        "--ignore-eos",
        action="store_true",
        help="always --max-tokens tokens; OpenAI's own API refuses it",
    )
    add("--extra-body", type=_json, default={}, metavar="JSON", help="added to every request")
    add("--prompts", type=Path, metavar="FILE", help="one a line, text or JSON; default: story openings")
    add("--seed", type=int, default=0, help="of the arrivals of open loops")
    add("--timeout", type=_positive(float), default=600.0, help="seconds without a byte")
    add("--wait", type=float, default=60.0, help="seconds for a server that is still loading")
    add("--save", type=Path, metavar="FILE.json", help="write everything there, and a picture beside it")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None


def _positive(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse


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


def loads(options: argparse.Namespace) -> list[Load]:
    concurrency = options.concurrency
    if concurrency is None:
        concurrency = [] if options.rate else [1, 4, 16]
    closed = [Load(options.requests or 2 * number, concurrency=number) for number in concurrency]
    return closed + [Load(options.requests or 32, rate=rate) for rate in options.rate]


class Bench:
    """A connection to one server and what has been measured through it so far."""

    def __init__(self, options: argparse.Namespace, client: httpx.AsyncClient, endpoint: Endpoint) -> None:
        self._options, self._client = options, client
        self.endpoint = endpoint
        try:
            self.prompts: Prompts = read_prompts(options.prompts)
        except (OSError, ValueError, KeyError) as error:
            raise BenchmarkError(f"Cannot read prompts: {error}") from error
        self._results: dict[Load, list[LoadResult]] = {}
        self._drafts: dict[Load, DraftCounters | None] = {}

    async def warm_up(self) -> None:
        """One request; its failure ends the benchmark before it has cost any time."""
        deadline = time.monotonic() + self._options.wait
        while True:
            result = await closed_loop(self._client, self.endpoint, self.prompts, 1, 1)
            if not result.errors:
                return
            loading = result.errors[0].startswith("HTTP 503")
            if not loading or time.monotonic() > deadline:
                raise BenchmarkError(f"The first request failed: {result.errors[0]}")
            await asyncio.sleep(0.2)

    async def run(self, load: Load) -> LoadResult:
        before = await read_counters(self._client, self.endpoint.base_url)
        repeat = len(self._results.setdefault(load, []))
        if load.rate is not None:
            result = await open_loop(
                self._client,
                self.endpoint,
                self.prompts,
                load.rate,
                load.num_requests,
                self._options.seed + repeat,
            )
        else:
            assert load.concurrency is not None
            result = await closed_loop(
                self._client, self.endpoint, self.prompts, load.concurrency, load.num_requests
            )
        self._results[load].append(result)
        after = await read_counters(self._client, self.endpoint.base_url)
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


async def find_model(client: httpx.AsyncClient, base_url: str) -> str:
    try:
        response = await client.get(f"{base_url}/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise BenchmarkError(f"{base_url}/models answers {error.response.status_code}") from error
    except httpx.HTTPError as error:
        raise BenchmarkError(f"No server answers at {base_url}: {error or type(error).__name__}") from error
    except (ValueError, KeyError, IndexError) as error:
        raise BenchmarkError(f"{base_url}/models lists no model; name one with --model") from error


async def open_bench(options: argparse.Namespace, client: httpx.AsyncClient) -> Bench:
    base_url = options.base_url.rstrip("/")
    body = {"max_tokens": options.max_tokens, "temperature": options.temperature, **options.extra_body}
    if options.ignore_eos:
        body["ignore_eos"] = True
    model = options.model or await find_model(client, base_url)
    bench = Bench(options, client, Endpoint(base_url, model, options.chat, body))
    note(f"Warming up {model}")
    await bench.warm_up()
    return bench


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark, as the document that is shown and saved."""
    busy = is_busy()
    if busy:
        note("WARNING: the machine was busy before the load began; read latencies with care")
    async with new_client(options.api_key, options.timeout) as client:
        bench = await open_bench(options, client)
        for load in with_progress(loads(options) * options.repeats, "Load"):
            await bench.run(load)
        return document(options, bench, busy)


def document(options: argparse.Namespace, bench: Bench, busy: bool) -> dict[str, Any]:
    arguments = {name: str(value) for name, value in vars(options).items() if name != "api_key"}
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


def main(argv: Sequence[str]) -> int:
    parser = OneLineParser(
        "foretoken bench", description="Put load on a running OpenAI-compatible server and measure it."
    )
    add_options(parser)
    options = parser.parse_args(argv)
    try:
        result = asyncio.run(run(options))
    except BenchmarkError as error:
        print(f"foretoken bench: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    show(result)
    save(options.save, result, lambda figure: draw(figure, result["results"]))
    return 0

"""What the front end costs: python -m benchmarks.front_end

Starts the real server with a worker that answers at once (``benchmarks.instant_worker``) and measures

* requests per second of a completion of 1 token, not streamed, at several concurrencies, and the front end's
  CPU time for each: parsing, tokenization, the trip to the worker and back, metrics, the answer;
* CPU time of the front end per streamed token, with many chat streams at once, one token a chunk, which is
  the worst case: a round of speculation gives several tokens to one chunk.

CPU time is the front-end process's own, user and system; neither the worker's nor the load generator's, which
are processes of their own. ``--baseline`` is another checkout, measured in alternation with this one.
"""

import argparse
import asyncio
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

from benchmarks.common import machine, note, print_table, warn_if_busy, write_json
from benchmarks.http_load import LoadError, post, run_load
from benchmarks.online import ROOT, Server, running_server, until_ready
from benchmarks.result_file import Figure, record
from truedraft.loadtest.client import BenchmarkError
from truedraft.loadtest.generator import new_session

MODEL = "truedraft-demo"

ONE_TOKEN = post(
    "/v1/completions", {"model": MODEL, "prompt": "Once upon a time, there was a fox.", "max_tokens": 1}
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 100])
    parser.add_argument("--requests", type=int, default=800, help="for each concurrency")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=80, help="of each stream")
    parser.add_argument("--tokens-per-round", type=int, default=1)
    parser.add_argument(
        "--step-seconds", type=float, default=0.05, help="pace of the worker while it streams"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--baseline", type=Path, help="another checkout, run in alternation with this one")
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--result", metavar="NAME", help="write benchmarks/results/NAME.json")
    return parser.parse_args()


class Cost(NamedTuple):
    """Holds one measurement. ``unit_microseconds`` is CPU time per request or per streamed token."""

    per_second: float
    unit_microseconds: float


class FrontEnd(NamedTuple):
    port: int
    process: psutil.Process

    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def front_end(checkout: Path, *worker_options: str) -> Iterator[FrontEnd]:
    """Starts the server of a checkout on a free port, and yields it when it is ready."""
    with running_server({}, checkout, worker=("instant_worker.py", *worker_options)) as server:
        asyncio.run(wait_until_ready(server))
        yield FrontEnd(server.port, psutil.Process(server.process_id))


async def wait_until_ready(server: Server) -> None:
    async with new_session("none", timeout=60.0) as session:
        await until_ready(session, server)


def requests_per_second(server: FrontEnd, concurrency: int, total: int) -> Cost:
    before = server.cpu_seconds()
    count = max(1, total // concurrency)
    load = asyncio.run(run_load(server.port, ONE_TOKEN, concurrency=concurrency, count=count))
    used = server.cpu_seconds() - before
    return Cost(load.num_answers / load.seconds, 1e6 * used / load.num_answers)


def streamed_tokens(server: FrontEnd, num_streams: int, num_tokens: int) -> Cost:
    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
        "max_tokens": num_tokens,
        "stream": True,
    }
    request = post("/v1/chat/completions", chat)
    before = server.cpu_seconds()
    load = asyncio.run(run_load(server.port, request, concurrency=num_streams, count=1))
    used = server.cpu_seconds() - before
    total = num_streams * num_tokens
    return Cost(total / load.seconds, 1e6 * used / total)


def measure(server: FrontEnd, arguments: argparse.Namespace) -> dict[str, Cost]:
    """Runs every scenario once."""
    costs = {}
    for concurrency in arguments.concurrency:
        name = f"1-token requests, {concurrency} at once"
        costs[name] = requests_per_second(server, concurrency, arguments.requests)
    for num_streams in arguments.streams:
        costs[f"streamed tokens, {num_streams} streams"] = streamed_tokens(
            server, num_streams, arguments.tokens
        )
    return costs


def run(checkouts: dict[str, Path], arguments: argparse.Namespace) -> dict[str, list[dict[str, Cost]]]:
    """Both servers stay up; a warm-up, then measurements in alternation."""
    runs: dict[str, list[dict[str, Cost]]] = {name: [] for name in checkouts}
    options = [
        *("--step-seconds", str(arguments.step_seconds)),
        *("--tokens-per-step", str(arguments.tokens_per_round)),
    ]
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(front_end(checkout, *options)) for name, checkout in checkouts.items()
        }
        for server in servers.values():
            requests_per_second(server, 16, 200)
            streamed_tokens(server, arguments.streams[0], 10)
        for repeat in range(arguments.repeats):
            for name, server in servers.items():
                runs[name].append(measure(server, arguments))
                note(f"  {repeat + 1}/{arguments.repeats} {name}: {runs[name][-1]}")
    return runs


def table(runs: dict[str, list[dict[str, Cost]]]) -> list[dict[str, Any]]:
    """Medians; with a baseline also the median of the ratios within each repeat."""
    rows = []
    for scenario in runs["this"][0]:
        ours = [run[scenario] for run in runs["this"]]
        row: dict[str, Any] = {
            "scenario": scenario,
            "per_s": statistics.median(cost.per_second for cost in ours),
            "CPU_us_each": statistics.median(cost.unit_microseconds for cost in ours),
        }
        if "baseline" in runs:
            pairs = list(zip(ours, (run[scenario] for run in runs["baseline"]), strict=True))
            row["baseline_per_s"] = statistics.median(base.per_second for _, base in pairs)
            row["baseline_CPU_us"] = statistics.median(base.unit_microseconds for _, base in pairs)
            row["speed_ratio"] = statistics.median(new.per_second / base.per_second for new, base in pairs)
            row["CPU_ratio"] = statistics.median(
                new.unit_microseconds / base.unit_microseconds for new, base in pairs
            )
        rows.append(row)
    return rows


def figures(runs: dict[str, list[dict[str, Cost]]]) -> list[Figure]:
    """Returns the rates and costs of each scenario, over the repeats, and the costs over a baseline's."""
    found = []
    for scenario in runs["this"][0]:
        ours = [run[scenario] for run in runs["this"]]
        costs = [cost.unit_microseconds for cost in ours]
        found.append(Figure.of(scenario, "per second", [cost.per_second for cost in ours]))
        found.append(Figure.of(scenario, "CPU time of each, µs", costs))
        if "baseline" in runs:
            before = [run[scenario].unit_microseconds for run in runs["baseline"]]
            found.append(Figure.of_ratios(scenario, "CPU time, times the baseline's", costs, before))
    return found


def main() -> None:
    arguments = parse_arguments()
    about = machine() | {"busy": warn_if_busy()}
    checkouts = {"this": ROOT} | ({"baseline": arguments.baseline.resolve()} if arguments.baseline else {})
    try:
        runs = run(checkouts, arguments)
    except (BenchmarkError, LoadError, aiohttp.ClientError) as error:
        raise SystemExit(f"benchmarks.front_end: error: {error}") from None
    rows = table(runs)
    print("  ".join(f"{key}: {value}" for key, value in about.items()))
    print_table(rows, "Front end: medians; CPU in microseconds of the front-end process for each")
    write_json(
        arguments.json,
        {"machine": about, "arguments": {k: str(v) for k, v in vars(arguments).items()}, "results": rows},
    )
    record(
        arguments.result,
        what="Front end, load generator and a worker that answers at once on the same processors",
        rows="load",
        model="bundled tokenizer, no model",
        dtype=f"{arguments.tokens_per_round} token a chunk",
        num_repeats=arguments.repeats,
        machine=about,
        figures=figures(runs),
    )


if __name__ == "__main__":
    main()

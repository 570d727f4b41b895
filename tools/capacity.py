"""Computes how many replicas a load needs, how long its requests take, and the memory of each replica.

python -m tools.capacity --throughput 1:1500 4:2000 16:2100 --tokens 128 --rate 40 --latency 0.5
python -m tools.capacity --result http-bundled --tokens 128 --rate 40 --latency 0.5

A server is a queue that all of its requests share: with n of them running it finishes X(n) / tokens requests
a second, X being the measured tokens per second of n streams. Arrivals are Poisson. See docs/scaling.md.
"""

import argparse
import math
from dataclasses import dataclass
from itertools import accumulate

from benchmarks import result_file

MAX_RUNNING = 10_000
LIBRARIES_GB = 1.0


@dataclass(frozen=True)
class Server:
    """Measured output tokens per second by streams; interpolated in between, flat beyond."""

    throughput: dict[int, float]
    prompt_seconds: float = 0.0  # one request's, while nothing else is computed

    def tokens_per_second(self, streams: int) -> float:
        known = sorted(self.throughput)
        if streams <= known[0]:
            return self.throughput[known[0]]
        if streams >= known[-1]:
            return self.throughput[known[-1]]
        above = next(n for n in known if n >= streams)
        below = known[known.index(above) - 1]
        share = (streams - below) / (above - below)
        return self.throughput[below] * (1 - share) + self.throughput[above] * share

    def requests_per_second(self, streams: int, tokens: float) -> float:
        return 1 / (tokens / self.tokens_per_second(streams) + self.prompt_seconds)


@dataclass(frozen=True)
class Load:
    utilisation: float  # a share of the throughput with as many streams as were measured
    running: float  # requests at a time, on average
    running_at_most: int  # requests at a time, 99 % of the time
    latency: float  # seconds of a whole request, on average; infinite where the load is too much


def throughput(result: str, column: str) -> dict[int, float]:
    """Returns the tokens per second by streams of one column of a file in benchmarks/results."""
    figures = result_file.load(result).figures
    return {int(figure.row): figure.median for figure in figures if figure.column == column}


def speedup(acceptance: float, draft_length: float, draft_cost: float, score_cost: float) -> float:
    """Returns the speed-up of rounds with drafts over plain ones. The costs of a drafted token and of
    scoring a round are in plain passes of the target; ``acceptance`` is a token's chance if those before it
    were accepted."""
    tokens = sum(acceptance**i for i in range(int(draft_length) + 1))
    return tokens / (draft_length * draft_cost + score_cost)


def predict(server: Server, tokens: float, rate: float) -> Load:
    """One server under ``rate`` requests per second of ``tokens`` output tokens each."""
    most = server.requests_per_second(max(server.throughput), tokens)
    if rate >= most:
        return Load(rate / most, math.inf, MAX_RUNNING, math.inf)
    # The chance of n running requests is proportional to the product of rate over departures, 1 to n.
    weights, total = [1.0], 1.0
    for n in range(1, MAX_RUNNING):
        weights.append(weights[-1] * rate / server.requests_per_second(n, tokens))
        total += weights[-1]
        if n > max(server.throughput) and weights[-1] < 1e-9 * total:
            break
    running = sum(n * weight for n, weight in enumerate(weights)) / total
    at_most = next(n for n, so_far in enumerate(accumulate(weights)) if so_far >= 0.99 * total)
    return Load(rate / most, running, at_most, running / rate)


def replicas(server: Server, tokens: float, rate: float, latency: float, utilisation: float) -> int:
    """The fewest servers, each with an equal share, that stay below both limits."""
    fewest = max(
        1, math.ceil(rate / (utilisation * server.requests_per_second(max(server.throughput), tokens)))
    )
    if predict(server, tokens, rate=1e-9).latency > latency:
        raise SystemExit("A request that is alone takes longer than that: replicas do not help.")
    while predict(server, tokens, rate / fewest).latency > latency:
        fewest += max(1, fewest // 100)
    return fewest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    measured = parser.add_mutually_exclusive_group(required=True)
    measured.add_argument("--throughput", nargs="+", metavar="STREAMS:TOKENS_PER_SECOND")
    measured.add_argument(
        "--result", metavar="NAME", help="a file of benchmarks/results with throughput by clients"
    )
    parser.add_argument("--tokens", type=float, required=True, help="output tokens of a request, on average")
    parser.add_argument("--rate", type=float, required=True, help="requests per second, of all clients")
    parser.add_argument(
        "--prompt-seconds", type=float, default=0.0, help="computing a prompt takes this long"
    )
    parser.add_argument("--latency", type=float, default=math.inf, help="mean seconds of a request, at most")
    parser.add_argument("--utilisation", type=float, default=0.7, help="of each server, at most")
    parser.add_argument(
        "--speculation",
        nargs=4,
        type=float,
        metavar=("ACCEPTANCE", "LENGTH", "DRAFT_COST", "SCORE_COST"),
        help="multiplies a throughput without drafts; truedraft check prints all four: the share of first\n"
        "drafted tokens that stand, the draft length, and the costs in plain passes",
    )
    parser.add_argument(
        "--memory",
        nargs=3,
        type=float,
        metavar=("WEIGHTS_GB", "PROMPT_TOKENS", "CACHE_BYTES"),
        help="prints a replica's memory; of both models, of a request, and of one token in both caches",
    )
    options = parser.parse_args()
    factor = 1.0
    if options.speculation:
        factor = speedup(*options.speculation)
        print(f"speed-up     {factor:.2f} of plain decoding")
    if options.result:
        points = throughput(options.result, "default, tokens/s")
    else:
        points = {int(n): float(x) for n, x in (point.split(":") for point in options.throughput)}
    server = Server({n: x * factor for n, x in points.items()}, options.prompt_seconds)
    needed = replicas(server, options.tokens, options.rate, options.latency, options.utilisation)
    load = predict(server, options.tokens, options.rate / needed)
    print(f"replicas     {needed}")
    print(f"utilisation  {load.utilisation:.2f} of each")
    print(
        f"running      {load.running:.1f} requests at a time on each, {load.running_at_most} at most in 99 %"
    )
    print(f"latency      {load.latency:.2f} s")
    if options.memory:
        weights, prompt, cache_bytes = options.memory
        each = weights + load.running_at_most * (prompt + options.tokens) * cache_bytes / 1e9 + LIBRARIES_GB
        print(f"memory       {each:.1f} GB on each, {each * needed:,.0f} GB together")


if __name__ == "__main__":
    main()

"""What the shipped defaults give through HTTP, the number of record: python -m benchmarks.defaults --pair 30m

One ``foretoken serve`` with no setting but its models. Closed loops of several numbers of clients, whose
requests come and go: streamed completions of 32 to 256 tokens; a third each greedy, at temperature 0.8, and
at 0.8 with a seed; one in ten with a penalty, log-probabilities or biases. A variant is what the requests'
``speculation`` field says: nothing (``default``), no drafts (``none``), or a fixed draft length (``k=3``), so
all variants share one server and get the same requests. In each cycle every variant has one block of load;
their order changes from cycle to cycle. Ratios are taken within a cycle, then the median over the cycles.

``--before CHECKOUT`` starts a second server from another checkout and measures its ``default`` and ``none``
in the same alternation. ``--apart`` adds controls for sharing a server: one that only ever serves
``default``, and one that has ``num_speculative_tokens`` 0.
"""

import argparse
import asyncio
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks.closed_loop import Request, Window, run_block
from benchmarks.common import (
    CpuWatch,
    machine,
    note,
    print_facts,
    print_table,
    save,
    warn_if_busy,
    warn_of_others,
)
from benchmarks.http_load import LoadError, post
from benchmarks.online import ROOT, Server, running_server
from benchmarks.pairs import BUNDLED, Pair, add_pair_options, prompt_ids, resolve_pair
from benchmarks.plots import panels
from server.load.client import BenchmarkError
from server.load.command import find_model
from server.load.counters import DraftCounters, read_counters
from server.load.generator import new_client

DEFAULT, NONE, BEFORE, APART = "default", "none", "before ", "apart "
SHORTEST, LONGEST = 32, 256  # answers, in tokens
NUM_PROMPTS = 64
SAMPLING: Sequence[Mapping[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "seed": 1},
)
# One request in ten has one of these.
EXTRAS: Sequence[Mapping[str, Any]] = (
    {"frequency_penalty": 0.5},
    {"logprobs": 2},
    {"logit_bias": {"300": 2.0, "301": -2.0, "302": -100.0}},
)
# The default policy learns while it runs.
DEFAULT_WARM_UP_FACTOR = 2.0
START_SECONDS, IDLE_SECONDS = 600.0, 60.0
_IN_WORK = re.compile(r"^foretoken_requests_(?:running|waiting) (\S+)$", re.MULTILINE)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_pair_options(parser, BUNDLED, several=True)
    parser.set_defaults(acceptance=0.85)
    add = parser.add_argument
    add("--clients", type=int, nargs="+", default=[1, 4, 16, 32])
    add("--lengths", type=int, nargs="+", help="fixed ones (default 1 2 3 5 8 if synthetic, else 1 2 3 4)")
    add("--blocks", type=int, default=6, help="of each variant: cycles (default %(default)s)")
    add("--seconds", type=float, default=8.0, help="of a block that count (default %(default)s)")
    add("--ramp-up", type=float, default=1.0, help="seconds of a block before those (default %(default)s)")
    add(
        "--warm-up",
        type=float,
        default=3.0,
        help="seconds of each variant, once for each number of clients; twice as many for 'default', whose "
        "policy learns while it runs (default %(default)s)",
    )
    add("--before", type=Path, metavar="CHECKOUT", help="another checkout, measured by turns with this one")
    add("--apart", action="store_true", help="'default' and 'none' on servers of their own too")
    add("--save", type=Path, metavar="FILE.json", help="write everything there, and a picture beside it")
    return parser.parse_args()


class Variant(NamedTuple):
    """``fields`` are added to each request."""

    name: str
    server: Server
    model: str
    fields: Mapping[str, Any]

    @property
    def is_default(self) -> bool:
        return not self.fields


class Block(NamedTuple):
    """One block of load; the counters include what was aborted when it ended."""

    window: Window
    drafts: DraftCounters


# Blocks of each variant, a cycle after the other.
Blocks = dict[str, list[Block]]


def speculation(length: int) -> dict[str, Any]:
    """The field of a request that drafts ``length`` tokens in every round, whatever the policy thinks."""
    options = {"method": "draft_model", "num_speculative_tokens": length} if length else {"method": "none"}
    return {"speculation": options}


def requests(variant: Variant, prompts: Sequence[list[int]], key: str, client: int) -> Iterator[Request]:
    """Of one client in one block: the same for every variant with the same ``key``.

    The first one is shorter, or all clients would begin and end in step.
    """
    start = random.Random(key).randrange(30)
    for number in count():
        draw = random.Random(f"{key} {client} {number}")
        turn = start + client + number
        num_tokens = draw.randint(SHORTEST, LONGEST)
        if number == 0:
            num_tokens = draw.randint(1, num_tokens)
        body = {
            "model": variant.model,
            "prompt": draw.choice(prompts),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **SAMPLING[turn % 3],
            **(draw.choice(EXTRAS) if turn % 10 == 0 else {}),
            **variant.fields,
        }
        yield Request(post("/v1/completions", body), num_tokens)


def rotated(variants: Sequence[Variant], cycle: int, num_cycles: int) -> list[Variant]:
    """The order of a cycle: each variant comes early and late, before and after each other one."""
    start = cycle * len(variants) // num_cycles
    order = [*variants[start:], *variants[:start]]
    return order[::-1] if cycle % 2 else order


class Bench:
    """Runs blocks on servers that are idle before and after."""

    def __init__(self, client: httpx.AsyncClient, prompts: Sequence[list[int]]) -> None:
        self._client = client
        self._prompts = prompts

    async def block(
        self, variant: Variant, num_clients: int, key: str, *, ramp_up: float, seconds: float
    ) -> Block:
        url = variant.server.base_url
        before = await read_counters(self._client, url) or DraftCounters()
        clients = [requests(variant, self._prompts, key, client) for client in range(num_clients)]
        window = await run_block(variant.server.port, clients, ramp_up=ramp_up, seconds=seconds)
        await self._until_idle(variant.server)
        return Block(window, (await read_counters(self._client, url) or DraftCounters()) - before)

    async def _until_idle(self, server: Server) -> None:
        """Twice idle: a request may have been between the front end and the worker."""
        deadline, num_idle = time.monotonic() + IDLE_SECONDS, 0
        while num_idle < 2:
            if time.monotonic() > deadline:
                raise BenchmarkError(f"aborted requests still run after {IDLE_SECONDS:g} seconds")
            await asyncio.sleep(0.05)
            response = await self._client.get(f"http://127.0.0.1:{server.port}/metrics")
            in_work = [float(number) for number in _IN_WORK.findall(response.text)]
            num_idle = num_idle + 1 if in_work == [0.0, 0.0] else 0


async def until_ready(client: httpx.AsyncClient, server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while (await client.get(f"http://127.0.0.1:{server.port}/ready")).status_code != 200:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"the server was not ready after {START_SECONDS:g} seconds")
        await asyncio.sleep(0.2)


async def measure(
    variants: Sequence[Variant],
    bench: Bench,
    num_clients: int,
    arguments: argparse.Namespace,
) -> Blocks:
    for variant in variants:
        seconds = arguments.warm_up * (DEFAULT_WARM_UP_FACTOR if variant.is_default else 1.0)
        await bench.block(variant, num_clients, "warm-up", ramp_up=0.0, seconds=seconds)
    blocks: Blocks = {variant.name: [] for variant in variants}
    for cycle in range(arguments.blocks):
        for variant in rotated(variants, cycle, arguments.blocks):
            block = await bench.block(
                variant, num_clients, str(cycle), ramp_up=arguments.ramp_up, seconds=arguments.seconds
            )
            blocks[variant.name].append(block)
        speeds = (f"{name} {some[-1].window.tokens_per_second:.0f}" for name, some in blocks.items())
        note(f"  {cycle + 1}/{arguments.blocks}, tokens/s: {', '.join(speeds)}")
    return blocks


async def measure_pair(pair: Pair, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of clients."""
    lengths = arguments.lengths or ([1, 2, 3, 5, 8] if pair.is_synthetic else [1, 2, 3, 4])
    models = {"target": pair.target, "draft": pair.draft}
    with ExitStack() as stack:

        def serve(checkout: Path = ROOT, **settings: Any) -> Server:
            return stack.enter_context(running_server({**models, **settings}, checkout))

        server = serve()
        served = [(DEFAULT, server, {}), (NONE, server, speculation(0))]
        served += [(f"k={length}", server, speculation(length)) for length in sorted(set(lengths) - {0})]
        if arguments.before is not None:
            server_before = serve(arguments.before)
            served += [(BEFORE + DEFAULT, server_before, {}), (BEFORE + NONE, server_before, speculation(0))]
        if arguments.apart:
            served += [(APART + DEFAULT, serve(), {})]
            served += [(APART + NONE, serve(num_speculative_tokens=0), speculation(0))]
        async with new_client("none", timeout=60.0) as client:
            variants = []
            for name, its_server, fields in served:
                await until_ready(client, its_server)
                model = await find_model(client, its_server.base_url)
                variants.append(Variant(name, its_server, model, fields))
            bench = Bench(client, prompt_ids(pair, NUM_PROMPTS, arguments.prompt_length))
            watch = CpuWatch(process_ids({variant.server for variant in variants}))
            rows = []
            for num_clients in arguments.clients:
                note(f"{pair.name}, {num_clients} clients")
                blocks = await measure(variants, bench, num_clients, arguments)
                rows.append({"pair": pair.name, "clients": num_clients, **summarise(blocks)})
            warn_of_others(watch)
            return rows


def process_ids(servers: set[Server]) -> list[int]:
    """Front ends and workers."""
    front_ends = [psutil.Process(server.process_id) for server in servers]
    return [
        process.pid
        for front_end in front_ends
        for process in (front_end, *front_end.children(recursive=True))
    ]


def summarise(blocks: Blocks) -> dict[str, Any]:
    """Medians, ratios within a cycle with their median absolute deviation, and every block."""
    speeds = {name: [block.window.tokens_per_second for block in some] for name, some in blocks.items()}
    medians = {name: statistics.median(some) for name, some in speeds.items()}
    fixed = [name for name in speeds if name == NONE or name.startswith("k=")]
    best = max(fixed, key=medians.__getitem__)
    compared = {"default/none": (DEFAULT, NONE), "default/best": (DEFAULT, best)}
    for other in (BEFORE, APART):
        if other + NONE in speeds:
            for name in (DEFAULT, NONE):
                compared[f"{name}/{other}{name}"] = (name, other + name)
            compared[f"{other}default/none"] = (other + DEFAULT, other + NONE)
    return {
        "tokens/s": medians,
        "best": best,
        "ratios": {
            title: ratio_and_spread(speeds[name], speeds[base]) for title, (name, base) in compared.items()
        },
        "acceptance": {name: acceptance(some) for name, some in blocks.items()},
        "drafted per token": {name: drafted_per_token(some) for name, some in blocks.items()},
        "finished": {name: sum(block.window.num_finished for block in some) for name, some in blocks.items()},
        "generator": max(block.window.generator_share for some in blocks.values() for block in some),
        "blocks": {
            name: [{**block.window._asdict(), **vars(block.drafts)} for block in some]
            for name, some in blocks.items()
        },
    }


def ratio_and_spread(speeds: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    ratios = [speed / base for speed, base in zip(speeds, baseline, strict=True)]
    median = statistics.median(ratios)
    return median, statistics.median(abs(ratio - median) for ratio in ratios)


def acceptance(blocks: Sequence[Block]) -> float | None:
    drafted = sum(block.drafts.draft_tokens for block in blocks)
    return sum(block.drafts.accepted_tokens for block in blocks) / drafted if drafted else None


def drafted_per_token(blocks: Sequence[Block]) -> float:
    drafted = sum(block.drafts.draft_tokens for block in blocks)
    return drafted / max(1, sum(block.window.num_tokens_of_block for block in blocks))


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    where = [{"pair": row["pair"], "clients": row["clients"]} for row in rows]

    def table(title: str, cells: Sequence[Mapping[str, Any]]) -> None:
        print_table([{**place, **some} for place, some in zip(where, cells, strict=True)], title)

    speeds = [{name: round(speed) for name, speed in row["tokens/s"].items()} for row in rows]
    table("Tokens/s, medians over the cycles", speeds)
    table(
        "Ratios within a cycle: median ± median absolute deviation",
        [
            {**{t: f"{m:.3f} ± {s:.3f}" for t, (m, s) in row["ratios"].items()}, "best": row["best"]}
            for row in rows
        ],
    )
    table("Accepted / drafted", [row["acceptance"] for row in rows])
    generators = [{"generator's share of a processor": row["generator"]} for row in rows]
    table(
        "Drafted per token",
        [row["drafted per token"] | own for row, own in zip(rows, generators, strict=True)],
    )
    to_none, to_best = (
        [row["ratios"][title][0] for row in rows] for title in ("default/none", "default/best")
    )
    print(
        f"\nlowest default/none: {min(to_none):.3f}  lowest default/best: {min(to_best):.3f}  "
        f"mean default/best: {statistics.mean(to_best):.3f}"
    )


def draw(figure: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """A panel for each pair: multiples of plain decoding by the number of clients."""
    by_pair: dict[str, dict[str, dict[float, float]]] = {}
    for row in rows:
        series = by_pair.setdefault(row["pair"], {})
        for name, speed in row["tokens/s"].items():
            series.setdefault(name, {})[row["clients"]] = speed / row["tokens/s"][NONE]
    panels(figure, by_pair, "clients", "multiple of plain decoding", highlight=DEFAULT)


def main() -> None:
    arguments = parse_arguments()
    busy = warn_if_busy()
    rows: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory() as temporary:
            work = arguments.work or Path(temporary)
            for name in ["named"] if arguments.target else arguments.pair:
                rows += asyncio.run(measure_pair(resolve_pair(arguments, name, work), arguments))
    except (BenchmarkError, LoadError, httpx.HTTPError) as error:
        raise SystemExit(f"benchmarks.defaults: error: {error}") from error
    facts = {**machine(), "busy": busy}
    print_facts(facts)
    show(rows)
    settings = {name: str(value) for name, value in vars(arguments).items()}
    save(
        arguments.save,
        {"machine": facts, "arguments": settings, "results": rows},
        lambda figure: draw(figure, rows),
    )


if __name__ == "__main__":
    main()

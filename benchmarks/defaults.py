"""What the shipped defaults give through HTTP, the number of record: python -m benchmarks.defaults --pair 30m

One ``truedraft serve`` with no setting but its models. Closed loops of several numbers of clients, whose
requests come and go (``request_mix``). A variant is what the requests' ``speculation`` field says: nothing
(``default``), no drafts (``none``), or a fixed draft length (``k=3``), so all variants share one server and
get the same requests. In each cycle every variant has one block of load; their order changes from cycle to
cycle. Ratios are taken within a cycle, then the median over the cycles. The best fixed length of a cycle is
chosen by the other cycles, so that none is the best because it was lucky in this one.

``--before CHECKOUT`` starts a second server from another checkout and measures its ``default`` and ``none``
in the same alternation. ``--apart`` adds controls for sharing a server: one that only ever serves
``default``, and one that has ``num_speculative_tokens`` 0.
With ``--no-draft``, or a ``--target`` alone, ``default`` and the fixed lengths draft with n-grams.
"""

import argparse
import asyncio
import re
import statistics
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

from benchmarks.closed_loop import Window, run_block
from benchmarks.common import (
    CpuWatch,
    machine,
    note,
    print_facts,
    print_table,
    save,
    warn_if_busy,
)
from benchmarks.http_load import LoadError
from benchmarks.online import ROOT, Server, running_server, until_ready
from benchmarks.pairs import (
    BUNDLED,
    NGRAM,
    Pair,
    add_pair_options,
    chat_prompt_ids,
    prompt_ids,
    resolve_pair,
)
from benchmarks.plots import panels
from benchmarks.request_mix import requests
from benchmarks.result_file import Figure, record
from truedraft.engine.messages import DRAFT_MODEL, EAGLE, MTP
from truedraft.engine.process.worker import keep_loaded
from truedraft.loadtest.client import BenchmarkError
from truedraft.loadtest.command import find_model
from truedraft.loadtest.counters import DraftCounters, read_counters
from truedraft.loadtest.generator import new_session
from truedraft.loadtest.machine import BUSY_SHARE

DEFAULT, NONE, BEFORE, APART = "default", "none", "before ", "apart "
BEST = "best"
NUM_PROMPTS = 64
# The default policy learns while it runs.
DEFAULT_WARM_UP_FACTOR = 2.0
IDLE_SECONDS = 60.0
# Other checkouts may use the gauges' names before they became the field's.
_IN_WORK = re.compile(r"^truedraft_(?:num_)?requests_(?:running|waiting)(?:{[^}]*})? (\S+)$", re.MULTILINE)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_pair_options(parser, BUNDLED, several=True)
    parser.set_defaults(acceptance=0.85)
    add = parser.add_argument
    add("--clients", type=int, nargs="+", default=[1, 4, 16, 32])
    add("--no-draft", action="store_true", help="the target alone, which drafts with n-grams")
    add("--chats", choices=["questions", "edits"], help="prompts through the target's chat template")
    add(
        "--lengths",
        type=int,
        nargs="+",
        help="fixed ones (default 1 2 3 5 8 if synthetic, 4 without a draft model, else 1 2 3 4)",
    )
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
    add(
        "--retries",
        type=int,
        default=2,
        help="at most, of a block during which other processes were busy (default %(default)s); '!' is shown "
        "where they were each time",
    )
    add(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="another checkout, measured in alternation with this one",
    )
    add("--apart", action="store_true", help="'default' and 'none' on servers of their own too")
    add("--save", type=Path, metavar="FILE.json", help="write everything there, and a picture next to it")
    add("--result", metavar="NAME", help="write benchmarks/results/NAME.json")
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
    """Holds one block of load; counters include what was aborted at its end. ``others`` is the share of the
    processors that other processes used."""

    window: Window
    drafts: DraftCounters
    others: float

    @property
    def is_disturbed(self) -> bool:
        return self.others > BUSY_SHARE

    def __str__(self) -> str:
        return f"{self.window.tokens_per_second:.0f}{'!' if self.is_disturbed else ''}"


# Blocks of each variant, a cycle after the other.
Blocks = dict[str, list[Block]]


def speculation(length: int, method: str = DRAFT_MODEL) -> dict[str, Any]:
    """The field of a request that drafts ``length`` tokens in every round, whatever the policy thinks."""
    options = {"method": method, "num_speculative_tokens": length} if length else {"method": "none"}
    return {"speculation": options}


def rotated(variants: Sequence[Variant], cycle: int, num_cycles: int) -> list[Variant]:
    """Returns the order of a cycle: each variant comes early and late, before and after each other one."""
    start = cycle * len(variants) // num_cycles
    order = [*variants[start:], *variants[:start]]
    return order[::-1] if cycle % 2 else order


@dataclass(frozen=True)
class Bench:
    """Runs blocks on servers that are idle before and after. ``process_ids`` are the servers'."""

    session: aiohttp.ClientSession
    prompts: Sequence[list[int]]
    process_ids: Sequence[int]

    async def block(
        self, variant: Variant, num_clients: int, key: str, *, ramp_up: float, seconds: float
    ) -> Block:
        url = variant.server.base_url
        before = await read_counters(self.session, url) or DraftCounters()
        # Another block's prompts would be in the cache, for all variants but the first.
        fields = {**variant.fields, "cache_salt": uuid.uuid4().hex}
        clients = [
            requests(variant.model, self.prompts, fields, key, client) for client in range(num_clients)
        ]
        watch = CpuWatch(self.process_ids)
        window = await run_block(variant.server.port, clients, ramp_up=ramp_up, seconds=seconds)
        others = watch.others_share() or 0.0
        await self._until_idle(variant.server)
        after = await read_counters(self.session, url) or DraftCounters()
        return Block(window, after - before, others)

    async def _until_idle(self, server: Server) -> None:
        """Twice idle: a request may have been between the front end and the worker."""
        deadline, num_idle = time.monotonic() + IDLE_SECONDS, 0
        while num_idle < 2:
            if time.monotonic() > deadline:
                raise BenchmarkError(f"aborted requests still run after {IDLE_SECONDS:g} seconds")
            await asyncio.sleep(0.05)
            async with self.session.get(f"http://127.0.0.1:{server.port}/metrics") as response:
                in_work = [float(number) for number in _IN_WORK.findall(await response.text())]
            num_idle = num_idle + 1 if in_work == [0.0, 0.0] else 0


async def measure(
    variants: Sequence[Variant], bench: Bench, num_clients: int, arguments: argparse.Namespace
) -> Blocks:
    for variant in variants:
        seconds = arguments.warm_up * (DEFAULT_WARM_UP_FACTOR if variant.is_default else 1.0)
        await bench.block(variant, num_clients, "warm-up", ramp_up=0.0, seconds=seconds)
    blocks: Blocks = {variant.name: [] for variant in variants}
    for cycle in range(arguments.blocks):
        for variant in rotated(variants, cycle, arguments.blocks):
            tries: list[Block] = []
            while len(tries) <= arguments.retries and all(block.is_disturbed for block in tries):
                block = await bench.block(
                    variant, num_clients, str(cycle), ramp_up=arguments.ramp_up, seconds=arguments.seconds
                )
                tries.append(block)
            blocks[variant.name].append(min(tries, key=attrgetter("others")))
        speeds = ", ".join(f"{name} {some[-1]}" for name, some in blocks.items())
        note(f"  {cycle + 1}/{arguments.blocks}: {speeds}")
    return blocks


async def measure_pair(pair: Pair, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of clients."""
    lengths = arguments.lengths or (
        [4] if pair.draft is None else [1, 2, 3, 5, 8] if pair.is_synthetic else [1, 2, 3, 4]
    )
    models = {"target": pair.target} | ({} if pair.draft is None else {"draft": pair.draft})
    variants: list[Variant] = []
    async with new_session("none", timeout=60.0) as session:
        with ExitStack() as stack:

            async def serve(
                named: Mapping[str, Mapping[str, Any]], checkout: Path = ROOT, **settings: Any
            ) -> None:
                """Waits until it is ready: another one that loads meanwhile would spoil its calibration."""
                server = stack.enter_context(running_server({**models, **settings}, checkout))
                await until_ready(session, server)
                model = await find_model(session, server.base_url)
                variants.extend(Variant(name, server, model, fields) for name, fields in named.items())

            fixed = {f"k={length}": speculation(length, pair.method) for length in sorted(set(lengths) - {0})}
            await serve({DEFAULT: {}, NONE: speculation(0), **fixed})
            if arguments.before is not None:
                await serve({BEFORE + DEFAULT: {}, BEFORE + NONE: speculation(0)}, arguments.before)
            if arguments.apart:
                await serve({APART + DEFAULT: {}})
                await serve({APART + NONE: speculation(0)}, num_speculative_tokens=0)
            watched = process_ids({variant.server for variant in variants})
            if arguments.chats:
                prompts = chat_prompt_ids(pair, NUM_PROMPTS, arguments.chats)
            else:
                prompts = prompt_ids(pair, NUM_PROMPTS, arguments.prompt_length)
            bench = Bench(session, prompts, watched)
            keep_loaded()
            rows = []
            for num_clients in arguments.clients:
                note(f"{pair.name}, {num_clients} clients, tokens/s")
                blocks = await measure(variants, bench, num_clients, arguments)
                rows.append({"pair": pair.name, "clients": num_clients, **summarise(blocks)})
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
    speeds[BEST] = best_by_other_cycles([speeds[name] for name in fixed])
    compared = {"default/none": (DEFAULT, NONE), "default/best": (DEFAULT, BEST)}
    for other in (BEFORE, APART):
        if other + NONE in speeds:
            for name in (DEFAULT, NONE):
                compared[f"{name}/{other}{name}"] = (name, other + name)
            compared[f"{other}default/none"] = (other + DEFAULT, other + NONE)
    return {
        "tokens/s": medians,
        "best": max(fixed, key=medians.__getitem__),
        "ratios": {
            title: ratio_and_spread(speeds[name], speeds[base]) for title, (name, base) in compared.items()
        },
        **drafting(blocks),
        "finished": {name: sum(block.window.num_finished for block in some) for name, some in blocks.items()},
        "generator": max(block.window.generator_share for some in blocks.values() for block in some),
        "blocks": {
            name: [{**block.window._asdict(), **vars(block.drafts), "others": block.others} for block in some]
            for name, some in blocks.items()
        },
    }


def best_by_other_cycles(variants: Sequence[Sequence[float]]) -> list[float]:
    """In each cycle the speed of the variant that has the highest median in the other cycles, if there are
    any. ``variants``: speeds in each cycle."""

    def speed(cycle: int) -> float:
        others = [number for number in range(len(variants[0])) if number != cycle] or [cycle]
        best = max(variants, key=lambda speeds: statistics.median(speeds[number] for number in others))
        return best[cycle]

    return [speed(cycle) for cycle in range(len(variants[0]))]


def ratio_and_spread(speeds: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    ratios = [speed / base for speed, base in zip(speeds, baseline, strict=True)]
    median = statistics.median(ratios)
    return median, statistics.median(abs(ratio - median) for ratio in ratios)


def drafting(blocks: Blocks) -> dict[str, dict[str, float | None]]:
    """Accepted to drafted tokens, and drafted tokens to all that came out, of each variant's blocks."""
    rates: dict[str, float | None] = {}
    drafted_per_token: dict[str, float | None] = {}
    for name, some in blocks.items():
        drafts = sum((block.drafts for block in some), DraftCounters())
        num_tokens = sum(block.window.num_tokens_of_block for block in some)
        rates[name] = drafts.accepted_tokens / drafts.draft_tokens if drafts.draft_tokens else None
        drafted_per_token[name] = drafts.draft_tokens / num_tokens
    return {"acceptance": rates, "drafted per token": drafted_per_token}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    where = [{"pair": row["pair"], "clients": row["clients"]} for row in rows]

    def table(title: str, cells: Sequence[Mapping[str, Any]]) -> None:
        print_table([{**place, **some} for place, some in zip(where, cells, strict=True)], title)

    def ratios(row: Mapping[str, Any]) -> dict[str, str]:
        shown = {title: f"{median:.3f} ± {spread:.3f}" for title, (median, spread) in row["ratios"].items()}
        return {**shown, "best": row["best"]}

    speeds = [{name: round(speed) for name, speed in row["tokens/s"].items()} for row in rows]
    table("Tokens/s, medians over the cycles", speeds)
    table("Ratios within a cycle: median ± median absolute deviation", [ratios(row) for row in rows])
    table("Accepted / drafted", [row["acceptance"] for row in rows])
    table("Drafted / all tokens", [row["drafted per token"] for row in rows])
    table("Of one processor", [{"load generator": row["generator"]} for row in rows])
    print_table([summary(title, rows) for title in rows[0]["ratios"]], "Over all rows")


def summary(title: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    ratios = [row["ratios"][title][0] for row in rows]
    return {"ratio": title, "lowest": f"{min(ratios):.3f}", "mean": f"{statistics.mean(ratios):.3f}"}


def draw(figure: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draws a panel for each pair: multiples of plain decoding by the number of clients."""
    by_pair: dict[str, dict[str, dict[float, float]]] = {}
    for row in rows:
        series = by_pair.setdefault(row["pair"], {})
        for name, speed in row["tokens/s"].items():
            series.setdefault(name, {})[row["clients"]] = speed / row["tokens/s"][NONE]
    panels(figure, by_pair, "clients", "multiple of plain decoding", highlight=DEFAULT)


def figures(rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Returns tokens per second by number of clients, and what default settings gain within each cycle."""
    several, found = len({row["pair"] for row in rows}) > 1, list[Figure]()
    for row in rows:
        speeds = {
            name: [block["num_tokens"] / block["seconds"] for block in blocks]
            for name, blocks in row["blocks"].items()
        }
        fixed = [speeds[name] for name in speeds if name == NONE or name.startswith("k=")]
        clients = f"{row['pair']}, {row['clients']}" if several else str(row["clients"])
        found += [
            Figure.of(clients, "default, tokens/s", speeds[DEFAULT]),
            Figure.of(clients, "no drafts, tokens/s", speeds[NONE]),
            Figure.of_ratios(clients, "default : no drafts", speeds[DEFAULT], speeds[NONE]),
            Figure.of_ratios(
                clients, "default : best fixed length", speeds[DEFAULT], best_by_other_cycles(fixed)
            ),
        ]
    return found


# What drafts, by its name in requests.
DRAFTS = {
    NGRAM: "n-grams, no draft model",
    DRAFT_MODEL: "draft model",
    EAGLE: "EAGLE-3 head",
    MTP: "MTP head",
}


def write_result(
    arguments: argparse.Namespace, pairs: Sequence[Pair], rows: Sequence[Mapping[str, Any]], facts: Any
) -> None:
    others = [block["others"] for row in rows for blocks in row["blocks"].values() for block in blocks]
    prompts = {"questions": "questions", "edits": "edits of programs"}.get(
        arguments.chats, "openings of texts"
    )
    models = []
    for pair in pairs:
        name = Path(pair.target).name.split(".")[0] if pair.name == "named" else pair.name
        is_told = len(pairs) > 1 or pair.name == "named"
        models.append(f"{name}{'' if is_told else ' pair'}, {DRAFTS[pair.method]}")
    record(
        arguments.result,
        what=f"Through HTTP, requests of 32 to 256 tokens that come and go, {prompts}",
        rows="clients" if len(pairs) == 1 else "pair, clients",
        model="; ".join(models),
        dtype="float32" if any(pair.is_synthetic for pair in pairs) else "the file's own weights",
        num_repeats=arguments.blocks,
        machine={**facts, "others": round(statistics.median(others), 3)},
        figures=figures(rows),
    )


def main() -> None:
    arguments = parse_arguments()
    busy = warn_if_busy()
    rows, pairs = list[dict[str, Any]](), list[Pair]()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            work = arguments.work or Path(temporary)
            for name in ["named"] if arguments.target else arguments.pair:
                pair = resolve_pair(arguments, name, work)
                if arguments.no_draft:
                    pair = pair._replace(draft=None)
                pairs.append(pair)
                rows += asyncio.run(measure_pair(pair, arguments))
    except (BenchmarkError, LoadError, aiohttp.ClientError) as error:
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
    write_result(arguments, pairs, rows, facts)


if __name__ == "__main__":
    main()

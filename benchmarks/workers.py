"""What several workers give on one machine: the same processors as one worker's threads, or as workers.

    python -m benchmarks.workers --clients 1 4 16 --blocks 3 --seconds 4

Servers of the bundled pair under the load of ``benchmarks.defaults``, interleaved; tokens per second.
``--result NAME`` writes benchmarks/results/NAME.json.
"""

import argparse
import asyncio
import statistics
from contextlib import ExitStack

import aiohttp

from benchmarks.common import CpuWatch, machine, warn_of_others
from benchmarks.defaults import NUM_PROMPTS, Bench, Variant, process_ids
from benchmarks.online import running_server, until_ready
from benchmarks.pairs import BUNDLED, Pair, prompt_ids
from benchmarks.result_file import Figure, record
from truedraft.engine.config import BUNDLED_PAIR
from truedraft.loadtest.command import find_model
from truedraft.loadtest.generator import new_session

VARIANTS = {
    "1 worker, 1 thread": {"num_threads": 1},
    "1 worker, 2 threads": {"num_threads": 2},
    "2 workers, 1 thread each": {"num_threads": 2, "workers": 2},
}


async def all_workers(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        async with session.get(f"{url.removesuffix('/v1')}/health") as response:
            workers = (await response.json())["workers"]
        if all(worker["status"] == "ready" for worker in workers):
            return
        await asyncio.sleep(0.2)


async def measure(arguments: argparse.Namespace) -> None:
    pair = Pair(BUNDLED, str(BUNDLED_PAIR / "target"), None)
    async with new_session("none", timeout=60.0) as session:
        with ExitStack() as stack:
            variants = []
            for name, settings in VARIANTS.items():
                server = stack.enter_context(running_server(settings))
                await until_ready(session, server)
                await all_workers(session, server.base_url)
                variants.append(Variant(name, server, await find_model(session, server.base_url), {}))
            prompts = prompt_ids(pair, NUM_PROMPTS, 32)
            watched = process_ids({variant.server for variant in variants})
            bench = Bench(session, prompts, watched)
            watch, figures = CpuWatch(watched), []
            for num_clients in arguments.clients:
                speeds: dict[str, list[float]] = {variant.name: [] for variant in variants}
                for cycle in range(-1, arguments.blocks):  # the first one warms up
                    for variant in variants:
                        block = await bench.block(
                            variant, num_clients, str(cycle), ramp_up=0.5, seconds=arguments.seconds
                        )
                        if cycle >= 0:
                            speeds[variant.name].append(block.window.tokens_per_second)
                for name, some in speeds.items():
                    each = " ".join(f"{speed:.0f}" for speed in some)
                    figures.append(Figure.of(str(num_clients), f"{name}, tokens/s", some))
                    print(f"{num_clients:>3} clients, {name:<25}{statistics.median(some):8.0f}   ({each})")
            record(
                arguments.result,
                what="Through HTTP, default settings, requests of 32 to 256 tokens that come and go",
                rows="clients",
                model="bundled pair",
                dtype="16-bit weights",
                num_repeats=arguments.blocks,
                machine=machine() | {"others": warn_of_others(watch)},
                figures=figures,
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.workers")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--result", metavar="NAME")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

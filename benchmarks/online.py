"""Load on a server: python -m benchmarks.online --concurrency 1,16 --rate 4

``truedraft bench`` with two additions for measuring Truedraft itself: ``--serve`` starts the server (in its
own process) and stops it afterwards, and ``--offline`` runs the same prompts through the engine of its worker
without the server, in alternation with the load, to show what HTTP, text and the second process cost.
"""

import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import uvloop
from pydantic import Field
from pydantic_settings import CliApp, SettingsConfigDict

from benchmarks.common import OfflineRun, note, print_table
from truedraft.engine.machine.lifeline import end_with_parent
from truedraft.loadtest.client import BenchmarkError
from truedraft.loadtest.command import Bench, Load, document, draw, loads, open_bench, show
from truedraft.loadtest.generator import new_session
from truedraft.loadtest.machine import is_busy
from truedraft.loadtest.options import BenchOptions
from truedraft.loadtest.report import save

ROOT = Path(__file__).parent.parent
START_SECONDS = 600.0
SERVER_WITH_WORKER = Path(__file__).with_name("server_with_worker.py")


class OnlineOptions(BenchOptions):
    """Truedraft itself"""

    model_config = SettingsConfigDict(cli_exit_on_error=True)

    serve: bool = Field(False, description="Start a server here instead of --base-url.")
    offline: bool = Field(False, description="Compare with the engine without a server.")
    target: str | None = Field(
        None, description="Target model of --serve and --offline. Default: the bundled pair."
    )
    draft: str | None = Field(None, description="Draft model of --serve and --offline.")
    num_speculative_tokens: str = Field("4", description="A number or auto.")
    threads: int = Field(0, description="Threads of the engine; 0: as it chooses.")
    stream_interval: float | None = Field(None, description="Setting of --serve. Default: the server's.")


def engine_settings(options: OnlineOptions) -> dict[str, Any]:
    """What server and offline engine have in common."""
    settings = {
        "num_speculative_tokens": options.num_speculative_tokens,
        "num_threads": options.threads,
        "target": options.target,
        "draft": options.draft,
        "stream_interval": options.stream_interval,
    }
    return {name: value for name, value in settings.items() if value is not None}


class Server(NamedTuple):
    port: int
    process_id: int

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


@contextmanager
def running_server(
    settings: Mapping[str, Any], checkout: Path = ROOT, worker: Sequence[str] = ()
) -> Iterator[Server]:
    """``truedraft serve`` of a checkout on a free port, once it is open; models may still be loading. It ends
    with this process, however that ends (Linux).

    ``worker``: name of another worker's script, and its arguments (``benchmarks.server_with_worker``).
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if "ngram_pool_tokens" in (checkout / "engine" / "config.py").read_text(encoding="utf-8"):
        # The same prompts come again and again: what they were answered must not help.
        settings = {"ngram_pool_tokens": 0, **settings}
    flags = [
        f"--{name.replace('_', '-')}{'' if value is True else f'={value}'}"
        for name, value in settings.items()
    ]
    command = [sys.executable, "-m", "truedraft", "serve", f"--port={port}", *flags]
    if worker:
        command = [sys.executable, str(SERVER_WITH_WORKER), f"--port={port}", *flags, "--", *worker]
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, cwd=checkout, env=environment, stdout=log, stderr=log, preexec_fn=end_with_parent
        ) as process,
    ):
        try:
            while not is_open(port):
                if process.poll() is not None:
                    log.seek(0)
                    raise BenchmarkError(f"the server did not start: {log.read().decode()[-1000:]}")
                time.sleep(0.05)
            yield Server(port, process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


async def until_ready(session: aiohttp.ClientSession, server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        async with session.get(f"http://127.0.0.1:{server.port}/ready") as response:
            if response.status == 200:
                return
        if time.monotonic() > deadline:
            raise BenchmarkError(f"the server was not ready after {START_SECONDS:g} seconds")
        await asyncio.sleep(0.2)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class OfflineEngine:
    """Is the engine of the server's worker, while no request runs."""

    def __init__(self, options: OnlineOptions, control: Listener, prompts: Sequence[str]) -> None:
        self._options = options
        self._prompts = prompts
        self._control = control.accept()

    def run(self, load: Load) -> float:
        """Tokens per second of the same requests."""
        assert load.concurrency is not None
        prompts = [self._prompts[i % len(self._prompts)] for i in range(load.num_requests)]
        options = self._options
        self._control.send(OfflineRun(prompts, options.max_tokens, options.temperature, load.concurrency))
        speed = float(self._control.recv())
        note(f"      the engine alone: {speed:.1f} tokens/s")
        return speed


async def run(options: OnlineOptions, control: Listener | None = None) -> dict[str, Any]:
    busy = is_busy()
    async with new_session(options.key or "none", options.timeout) as session:
        bench = await open_bench(options, session)
        engine = OfflineEngine(options, control, bench.prompts) if control is not None else None
        offline: dict[Load, list[float]] = {}
        planned = loads(options)
        if engine is not None:
            engine.run(planned[0])  # warm
        for _ in range(options.repeats):
            for load in planned:
                await bench.run(load)
                if engine is not None and load.concurrency is not None:
                    offline.setdefault(load, []).append(engine.run(load))
        result = document(options, bench, busy)
    result["offline"] = [comparison(bench, load, speeds) for load, speeds in offline.items()]
    return result


def comparison(bench: Bench, load: Load, offline: list[float]) -> dict[str, Any]:
    """Ratios within a repeat, then their median."""
    online = bench.tokens_per_second(load)
    return {
        "load": load.name,
        "http": statistics.median(online),
        "engine_alone": statistics.median(offline),
        "http_to_engine": statistics.median(
            ours / alone for ours, alone in zip(online, offline, strict=True)
        ),
    }


def main() -> None:
    options = CliApp.run(OnlineOptions)
    if options.offline and not (options.ignore_eos and options.serve):
        raise SystemExit("--offline needs --serve, and --ignore-eos so that both make the same tokens")
    try:
        if options.serve:
            with ExitStack() as stack:
                control, worker = None, []
                if options.offline:
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                    control = stack.enter_context(Listener(str(folder / "control"), "AF_UNIX"))
                    worker = ["measured_worker.py", "--control", str(folder / "control")]
                server = stack.enter_context(running_server(engine_settings(options), worker=worker))
                options.base_url = server.base_url
                result = uvloop.run(run(options, control))
        else:
            result = uvloop.run(run(options))
    except BenchmarkError as error:
        raise SystemExit(f"benchmarks.online: error: {error}") from error
    show(result)
    if result["offline"]:
        print_table(result["offline"], "Tokens/s through HTTP and of the engine alone, same run")
    save(options.save, result, lambda figure: draw(figure, result["results"]))


if __name__ == "__main__":
    main()

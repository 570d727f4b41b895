"""Start the server for given settings: open the port, start the worker, run until told to stop.

The one place where engine client, app and uvicorn meet. Called by ``server.cli``; prints for people.
"""

import asyncio
import gc
import socket
from collections.abc import Iterable
from pathlib import Path

import uvicorn

from engine.messages import Ready
from server.app import create_app
from server.config import Settings
from server.draining import CLOSING_SECONDS, Server, drain_when_told
from server.engine_client import WorkerClient
from server.metrics import Metrics
from server.sampling_params import longest_request
from server.services import Services
from server.version import package_version

# Who drafts, in words.
DRAFTERS = {
    "auto": "whoever is expected to give most",
    "draft_model": "the draft model",
    "ngram": "n-grams of the text so far",
}


class StartError(Exception):
    """The server cannot start; the message says what to do about it."""


def launch(settings: Settings) -> None:
    """Serve until a signal comes. Raises ``StartError`` or, if a model does not load, that error."""
    check_models(settings)
    with bind(settings.host, settings.port) as listener:
        metrics = Metrics()
        engine = WorkerClient(
            settings.engine_config(),
            metrics,
            max_queued_requests=settings.max_queued_requests,
            max_queued_tokens=settings.max_queued_tokens,
        )
        app = create_app(settings, engine, metrics)
        config = uvicorn.Config(
            app,
            log_config=None,
            lifespan="on",
            server_header=False,
            timeout_graceful_shutdown=CLOSING_SECONDS,
        )
        _say(_introduction(settings, listener))
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_serve(Server(config), listener, app.state.services))


def check_models(settings: Settings) -> None:
    """Find missing folders before anything slow starts. Hub ids are left to the worker."""
    for role, model in (("target", settings.target), ("draft", settings.draft)):
        if model is None or Path(model).is_dir():
            continue
        if Path(model).is_absolute() or model.startswith(("./", "../", "~")) or model.count("/") > 1:
            raise StartError(f"The {role} model folder {model} does not exist. Set --{role}.")


def bind(host: str, port: int) -> socket.socket:
    """Listen on the port before anything else, so that a taken one is noticed at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is spelt out because asyncio switches Nagle's algorithm off only where it can see TCP;
    # with it, every answer in two packets waits 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise StartError(
            f"Cannot listen on {host} port {port}: {error.strerror}. Choose another with --port."
        ) from error
    return listener


async def _serve(server: Server, listener: socket.socket, services: Services) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    announcing = asyncio.create_task(_announce(services, server))
    draining = asyncio.create_task(drain_when_told(server, services))
    try:
        await asyncio.wait({serving, announcing}, return_when=asyncio.FIRST_COMPLETED)
        if announcing.done() and announcing.exception() is not None:
            server.should_exit = True
        await serving
        if announcing.done():
            announcing.result()
    finally:
        announcing.cancel()
        draining.cancel()


async def _announce(services: Services, server: Server) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    _say(["Loading the models ..."])
    worker = await services.wait_until_ready()
    # What is imported and loaded stays: to look through it again would stop every stream for a while.
    gc.freeze()
    _say(capacity(services.settings, worker))


def _introduction(settings: Settings, listener: socket.socket) -> list[str]:
    """What is about to run, and where."""
    port = listener.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return [
        f"Foretoken {package_version()}",
        f"  target    {settings.target}",
        f"  draft     {settings.draft or 'none'}",
        f"  url       http://{host}:{port}/v1   (model name: {settings.served_model_name})",
    ]


def capacity(settings: Settings, worker: Ready) -> list[str]:
    """What the loaded pair can take: who drafts, and what fits into the cache."""
    longest = longest_request(worker)
    blocks_per_request = -(-longest // worker.block_size)
    num_requests = min(worker.num_target_blocks // blocks_per_request, settings.max_num_sequences)
    num_blocks, size = worker.num_target_blocks, worker.block_size
    each = " for each model" if worker.num_draft_blocks else ""
    return [
        f"Ready on {worker.device} in {worker.dtype}.",
        f"  drafting  {_drafting(settings, worker)}",
        f"  cache     {num_blocks:,} blocks of {size} tokens: {num_blocks * size:,} tokens{each}",
        f"  requests  up to {longest:,} tokens, {_together(worker)}{_what_limits(longest, worker)}; "
        f"{num_requests} of that length at once",
    ]


def _drafting(settings: Settings, worker: Ready) -> str:
    length = settings.num_speculative_tokens
    if worker.method == "none" or length == 0:
        return "nothing, unless a request asks for it" if worker.methods else "nothing"
    if length == "auto":
        return f"as many tokens a round as pays, by {DRAFTERS[worker.method]}"
    return f"{length} {'token' if length == 1 else 'tokens'} a round, by {DRAFTERS[worker.method]}"


def _together(worker: Ready) -> str:
    lengths = worker.encoder_decoder
    if lengths is None:
        return "prompt and output together"
    return f"prompts up to {lengths.max_prompt_len:,} and outputs up to {lengths.max_output_len:,}"


def _what_limits(longest: int, worker: Ready) -> str:
    if longest == worker.max_model_len:
        return ""
    return f" (the model could take {worker.max_model_len:,}: raise cache_memory)"


def _say(lines: Iterable[str]) -> None:
    print("\n".join(lines), flush=True)

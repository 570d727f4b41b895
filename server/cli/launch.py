"""Start the server for given settings: open the port, start the worker, run until a signal ends it.

The one place where engine client, app and uvicorn meet. Called by ``server.cli.main``; prints for people.
"""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from importlib.metadata import version
from itertools import repeat
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from pydantic import ByteSize

from truedraft.engine.config import EngineConfig
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.hub.fetch import Progress, Tell
from truedraft.engine.hub.fetch_bar import fetch_bar
from truedraft.engine.hub.folders import check_path, context_of
from truedraft.engine.hub.located import is_a_model, located
from truedraft.engine.hub.names import hub_name
from truedraft.engine.machine.heap import trim_heap
from truedraft.engine.machine.limits import num_cpus
from truedraft.engine.machine.openmp import THREADS_VARIABLE
from truedraft.engine.messages import EmbeddingFacts, Ready
from truedraft.engine.terminal import loading_bar
from truedraft.server.app import create_app
from truedraft.server.cli.draining import CLOSING_SECONDS, Phase, Server, drain_on_signal
from truedraft.server.generation.sampling_params import longest_request
from truedraft.server.http.protocol import LimitedProtocol
from truedraft.server.models.registry import Limits, Models
from truedraft.server.models.served import Parts, ServedModel
from truedraft.server.observability.logs import stderr_as_entries
from truedraft.server.observability.metrics import Metrics, ModelMetrics
from truedraft.server.services import Services
from truedraft.server.settings import Settings
from truedraft.server.text.tokenizer import load_tokenizer, read_apart
from truedraft.server.version import package_version
from truedraft.server.workers.open_requests import QueueLimits
from truedraft.server.workers.worker_client import WorkerClient
from truedraft.server.workers.worker_pool import WorkerPool
from truedraft.server.workers.worker_process import WorkerTimeouts

# Draft sources that the settings can name, as the start shows them.
DRAFTERS = {
    "draft_model": "the draft model",
    "eagle": "the head on the target's states",
    "mtp": "the head of the target's checkpoint",
    "assistant": "the assistant on the target's keys and values",
    "ngram": "n-grams of the text so far",
}


# Each connection is one. Shells and containers often allow 1,024 unless a process asks for more.
MAX_DESCRIPTORS = 65536


logger = logging.getLogger("truedraft.server")


BAR_SECONDS = 0.1  # between looks at what loading is at
# When loading says what it is at, after the time before: soon at first, then every half minute.
PROGRESS_SECONDS = (3, 5, 8, 14, *repeat(30, 200))


class StartError(Exception):
    """The server cannot start; the message says what to do about it."""


def launch(settings: Settings) -> int:
    """Serve until a signal comes; returns the exit code.

    Raises ``StartError`` or, if a model does not load or the worker keeps dying, that error.
    """
    for own in settings.of_models():
        check_models(own)
    check_tls(settings)
    raise_descriptor_limit()
    printed = stderr_as_entries() if settings.log_format == "json" else nullcontext()
    with printed, _listen(settings) as listener:
        _say(_introduction(settings, listener), settings.log_format)
        app = make_app(settings)
        config = http_config(app, settings)
        server = Server(config, settings.drain_timeout)
        connections = app.state.services.metrics.server.connections
        connections.set_function(lambda: len(server.server_state.connections))
        try:
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                runner.run(serve(server, listener, app.state.services))
        finally:
            server.has_ended()
    # The interpreter's last collection would take a second to walk through what transformers has imported.
    gc.freeze()
    return server.exit_code


def http_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # ours has more in it
        http=LimitedProtocol,
        ws="none",
        lifespan="on",
        server_header=False,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        timeout_graceful_shutdown=CLOSING_SECONDS,
        timeout_keep_alive=settings.keep_alive_timeout,
    )


def make_app(settings: Settings) -> FastAPI:
    """The application, which starts its workers when it starts itself."""
    of_models = settings.of_models()
    num_workers = {each.model_name: each.num_workers for each in of_models}
    metrics = Metrics(settings.metrics_prefix, num_workers)
    pinned = {number for number, entry in enumerate(settings.models) if entry.load == "always"}
    served = [
        ServedModel(
            own,
            metrics.models[own.model_name],
            partial(assemble, own, metrics.models[own.model_name]),
            partial(locate, own, with_bar=not settings.models) if has_names(own) else None,
            is_pinned=number in pinned,
        )
        for number, own in enumerate(of_models)
    ]
    limits = Limits.of(settings)
    return create_app(settings, Models(served, limits, are_several=bool(settings.models)), metrics)


def assemble(settings: Settings, metrics: ModelMetrics, located: EngineConfig) -> Parts:
    """Returns what one model consists of; ``located`` has its paths."""
    configs = settings.worker_configs(located)
    workers = [
        WorkerClient(
            config,
            observer,
            environment=thread_share(len(configs), os.environ),
            timeouts=WorkerTimeouts(settings.heartbeat_timeout, settings.step_timeout),
            max_restarts=settings.max_worker_restarts,
            on_changed_weights=settings.on_changed_weights,
        )
        for config, observer in zip(configs, metrics.workers, strict=True)
    ]
    pool = WorkerPool(workers, QueueLimits.of(settings), shares_prefixes=settings.prefix_caching)
    return Parts(pool, partial(load_tokenizer, str(located.target), settings.chat_template, read_apart))


def thread_share(num_workers: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what tells one of several workers how many processors are its own."""
    if num_workers == 1:
        return {}
    given = environ.get(THREADS_VARIABLE, "")
    num_threads = int(given) if given.isdecimal() else num_cpus()
    return {THREADS_VARIABLE: str(max(1, num_threads // num_workers))}


def check_models(settings: Settings) -> None:
    """Refuses paths without a model before anything slow starts. ``locate`` looks for names of the hub."""
    draft = settings.draft
    try:
        for model in (settings.target, draft if draft is not None and is_a_model(draft) else None):
            if model is not None and hub_name(model) is None:
                check_path(model, allow_pickle=settings.allow_pickle)
        check_device(settings.device)
        check_length(settings)
    except ModelLoadError as error:
        raise StartError(_sentence(str(error))) from error


def _sentence(message: str) -> str:
    """Begins with a capital letter, unless the first word is the name of a setting."""
    is_setting = message.partition(" ")[0] in Settings.model_fields
    return f"{message}." if is_setting else f"{message[0].upper()}{message[1:]}."


def check_device(device: str) -> None:
    """Refuses a GPU that the installed torch cannot use, without importing torch."""
    installed = version("torch")
    if device.startswith("cuda") and installed.endswith("+cpu"):
        raise ModelLoadError(f"device is {device!r}, but the installed torch, {installed}, is for CPUs alone")


def check_length(settings: Settings) -> None:
    """Refuses texts that are longer than the context of a target on this machine."""
    asked, target = settings.max_model_len, str(settings.target)
    context = None if asked is None or hub_name(target) is not None else context_of(target)
    if asked is not None and context is not None and asked > context:
        raise ModelLoadError(f"max_model_len is {asked}, the target's context only {context}")


def has_names(settings: Settings) -> bool:
    """Tells whether a model is given by a name of the hub, so that it may have to be fetched."""
    given = [str(settings.target), settings.draft]
    return any(model is not None and is_a_model(model) and hub_name(model) is not None for model in given)


def locate(settings: Settings, tell: Tell, *, with_bar: bool) -> EngineConfig:
    """Returns the engine's settings with paths of models, after fetching what is not here. ``tell`` hears of
    it, and whoever looks at the terminal or at the log."""
    lines = None if settings.log_format == "text" and with_bar else logger.info
    try:
        with fetch_bar(lines) as show:

            def tell_both(progress: Progress) -> None:
                tell(progress)
                show(progress)

            return located(settings.engine_config(), tell_both, logger.info)
    except ModelLoadError as error:
        raise StartError(_sentence(str(error))) from error


def check_tls(settings: Settings) -> None:
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A passphrase is not asked for: a server is started by machines, too.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")
    except OSError as error:  # SSLError included
        files = f"{settings.ssl_certfile} and {settings.ssl_keyfile}"
        reason = error.strerror or error
        raise StartError(f"Cannot use ssl_certfile and ssl_keyfile ({files}): {reason}.") from error


def raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _listen(settings: Settings) -> socket.socket:
    if settings.uds is not None:
        return bind_unix(settings.uds)
    listener = bind(settings.host, settings.port)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Connections inherit it. The kernel ends one whose client takes nothing of what waits for it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, settings.send_timeout * 1000)
    return listener


def bind_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _is_served(path):
            path.unlink()  # a server that was killed left it
        listener.bind(str(path))
        listener.listen()
    except OSError as error:
        listener.close()
        raise StartError(
            f"Cannot listen on {path}: {error.strerror or error}. Choose another with --uds."
        ) from error
    return listener


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(str(path)) == 0


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


async def serve(server: Server, listener: socket.socket, services: Services) -> None:
    """Serves until a signal or a failure ends it; raises what the failure was."""
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    announcing = asyncio.create_task(_announce(services, server))
    failing = asyncio.create_task(services.models.wait_until_failed())
    draining = asyncio.create_task(drain_on_signal(server, services))
    _end_with_the_terminal(server)
    try:
        await asyncio.wait({serving, announcing}, return_when=asyncio.FIRST_COMPLETED)
        if announcing.done() and announcing.exception() is None:
            await asyncio.wait({serving, failing}, return_when=asyncio.FIRST_COMPLETED)
        server.advance(Phase.CLOSING)  # one of them has failed, or serving is over anyhow
        await serving
        for task in (announcing, failing):
            if task.done() and not server.num_signals:  # after a signal, the end of the worker is no failure
                task.result()
    finally:
        others = (announcing, failing, draining)
        for task in others:
            task.cancel()
        # Cancelled tasks are no failures; gathering them keeps asyncio from reporting their exceptions.
        await asyncio.gather(*others, return_exceptions=True)


def _end_with_the_terminal(server: Server) -> None:
    """A closed terminal (SIGHUP) ends the server in order, unless it was started to survive that (nohup)."""
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.handle_exit, signal.SIGHUP, None)


async def _announce(services: Services, server: Server) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    log_format, models = services.settings.log_format, services.models
    if models.starts:
        _say(["Loading the models ..."], log_format)
    telling = asyncio.create_task(_tell_progress(services))
    try:
        await models.wait_until_ready()
    finally:
        telling.cancel()
        with suppress(asyncio.CancelledError):
            await telling  # a bar is gone before anything else is printed
    # What is imported and loaded stays: to look through it again would stop every stream for a while. What
    # that took on the way does not.
    gc.freeze()
    trim_heap()
    for model in models:
        if model.worker is not None:
            named = [f"{model.name}:"] if models.are_several else []
            _say([*named, *capacity(model.settings, model.worker)], log_format)
    if models.are_several:
        _say([f"Ready: {', '.join(models.names_for())}"], log_format)


async def _tell_progress(services: Services) -> None:
    """Says now and then what loading is at: a large model takes minutes. A terminal shows a bar. Several
    models say in the log when they are loaded."""
    if services.models.are_several:
        return
    while services.models.first.engine is None:  # a fetch is shown by whoever fetches
        await services.models.news()
    if sys.stderr.isatty() and services.settings.log_format == "text":
        await _show_progress(services)
    began = time.monotonic()
    for seconds in PROGRESS_SECONDS:
        await asyncio.sleep(seconds)
        stage = services.models.first.stage or "the engine"
        _say([f"  {time.monotonic() - began:.0f} s: loading {stage}"], services.settings.log_format)


async def _show_progress(services: Services) -> None:
    """Shows a bar until it is cancelled."""
    with loading_bar() as begin:
        shown = None
        while True:
            if (stage := services.models.first.stage) and stage != shown:
                begin(stage)
                shown = stage
            await asyncio.sleep(BAR_SECONDS)


def _introduction(settings: Settings, listener: socket.socket) -> list[str]:
    """Returns lines that say what is about to run, and where."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "http" if settings.ssl_certfile is None else "https"
    where = f"unix:{settings.uds}" if settings.uds else f"{scheme}://{host}:{listener.getsockname()[1]}"
    of_models = settings.of_models()
    models = [
        f"  model     {', '.join(own.served_names)}: {own.target}{f' with {own.draft}' if own.draft else ''}"
        for own in of_models
    ]
    if not settings.models:
        models = [f"  target    {settings.target}", f"  draft     {settings.draft or 'none'}"]
    names = ", ".join(name for own in of_models for name in own.served_names)
    return [
        f"Truedraft {package_version()}",
        *models,
        f"  url       {where}{settings.root_path}/v1   (model name: {names})",
        f"  page      {where}{settings.root_path}/",
    ]


def capacity(settings: Settings, worker: Ready) -> list[str]:
    """Returns lines that say what the loaded pair can take: what drafts, and what fits into the cache."""
    if worker.embedding is not None:
        return _vector_capacity(worker, worker.embedding)
    longest = longest_request(worker)
    blocks_per_request = -(-longest // worker.block_size)
    num_requests = min(worker.num_target_blocks // blocks_per_request, worker.max_num_sequences)
    states = []
    if worker.num_state_slots:
        num_requests = min(num_requests, worker.num_state_slots)
        size_of_one = ByteSize(worker.state_bytes).human_readable()
        states = [
            f"  states    {worker.num_state_slots:,} of {size_of_one}, records included: "
            "for what runs, and for beginnings that are kept"
        ]
    num_blocks, size = worker.num_target_blocks, worker.block_size
    each = " for each model" if worker.num_draft_blocks else ""
    way = f", {worker.forward}" if worker.forward else ""
    each_worker = f"; each of {settings.num_workers} workers:" if settings.num_workers > 1 else "."
    kept = f", in {worker.cache_dtype}" if worker.cache_dtype else ""
    threads = [f"  threads   {worker.num_threads}: {worker.thread_limit}"] if worker.thread_limit else []
    return [
        f"Ready on {worker.device} in {worker.dtype}{way}{each_worker}",
        f"  weights   {', '.join(worker.weights)}",
        *threads,
        f"  drafting  {_drafting(settings, worker)}",
        *(f"  {'' if number else 'tried':<8}  {line}" for number, line in enumerate(worker.tried)),
        f"  cache     {num_blocks:,} blocks of {size} tokens: {num_blocks * size:,} tokens{each}{kept}",
        *states,
        *_memory(worker),
        f"  requests  up to {longest:,} tokens, {_together(worker)}{_what_limits(longest, worker)}; "
        f"{num_requests} of that length at once",
    ]


def _vector_capacity(worker: Ready, facts: EmbeddingFacts) -> list[str]:
    """Returns lines on a model that does not write text."""
    made = "scores of pairs" if worker.task == "rerank" else f"vectors of {facts.size:,} numbers"
    prompts = [f"  prompts   {', '.join(facts.prompts)}"] if facts.prompts else []
    return [
        f"Ready on {worker.device} in {worker.dtype}, {worker.forward}.",
        f"  task      {worker.task}: {made}, of texts up to {worker.max_model_len:,} tokens",
        *prompts,
    ]


def _memory(worker: Ready) -> list[str]:
    """Returns a line of what the worker takes, from a worker that says it."""
    if not worker.worker_bytes:
        return []
    weights, caches, taken = (
        ByteSize(number).human_readable()
        for number in (worker.weight_bytes, worker.cache_bytes, worker.worker_bytes)
    )
    return [f"  memory    weights {weights}, caches up to {caches}; the worker has {taken} now"]


def _drafting(settings: Settings, worker: Ready) -> str:
    length = settings.num_speculative_tokens
    if worker.method == "none" or length == 0:
        return "off, unless a request asks for it" if worker.methods else "off"
    if length == "auto":
        return f"length auto; source: {_sources(worker)}"
    return f"length {length}; source: {_sources(worker)}"


def _sources(worker: Ready) -> str:
    """Returns what drafts for requests that do not choose. With ``auto`` that is whatever is there."""
    names = [source for source in DRAFTERS if worker.method in (source, "auto") and source in worker.methods]
    choice = ", by expected speed" if len(names) > 1 else ""
    return f"{' or '.join(DRAFTERS[name] for name in names) or 'none'}{choice}"


def _together(worker: Ready) -> str:
    lengths = worker.encoder_decoder
    if lengths is None:
        return "prompt and output together"
    return f"prompts up to {lengths.max_prompt_len:,} and outputs up to {lengths.max_output_len:,}"


def _what_limits(longest: int, worker: Ready) -> str:
    if longest == worker.max_model_len:
        return ""
    return f" (the model could take {worker.max_model_len:,}: raise cache_memory)"


def _say(lines: Iterable[str], log_format: str) -> None:
    """Prints for people; writes entries of the log where machines read all that the server writes."""
    if log_format == "json":
        for line in lines:
            logger.info("%s", line.strip())
        return
    try:
        print("\n".join(lines), flush=True)
    except OSError:
        # A full disk or a reader that has gone is no reason not to serve. What is left in the buffer would
        # make the exit code 120.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115

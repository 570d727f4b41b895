"""Owns the device, and runs the engine at one end of a connection: the worker process.

    python -m truedraft.engine.process.worker --socket DESCRIPTOR --config '{"target": ...}'

Between steps it drains its inbox; when idle it waits there. It leaves on ``Shutdown`` and when the front end
is gone. A model that cannot be loaded is reported to the front end, and on stderr in one line; the exit code
is then 2.
"""

import argparse
import gc
import signal
import sys
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers.utils import logging as transformers_logging

from truedraft.engine.build import build_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.runner import LaunchingRunner
from truedraft.engine.embedding.core import EmbedCore
from truedraft.engine.embedding.load import load_vectors
from truedraft.engine.embedding.task import task_of
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.machine.heap import trim_heap
from truedraft.engine.machine.limits import own_memory
from truedraft.engine.memory.pictures import PromptPictures
from truedraft.engine.messages import (
    Abort,
    AdapterLoaded,
    Cleared,
    ClearPrefixes,
    EncoderDecoderLengths,
    Failed,
    Generate,
    LoadAdapter,
    Loading,
    Method,
    Ready,
    Shutdown,
    Source,
    SpeculationState,
    StepOutput,
    Task,
    TokenOutput,
    UnloadAdapter,
    decode_to_worker,
)
from truedraft.engine.models.generation_defaults import default_sampling
from truedraft.engine.models.identity import fingerprint, weight_bytes, weight_types
from truedraft.engine.models.ranks import LeadingDecoder
from truedraft.engine.native.threads import set_num_threads, thread_limit, usual_num_threads
from truedraft.engine.parallel.group import RankLostError
from truedraft.engine.process import embed_worker
from truedraft.engine.process.connection import Connection, drain
from truedraft.engine.process.heartbeat import LOST_RANK_EXIT_CODE, Heartbeats, lost_rank
from truedraft.engine.process.outbox import Outbox

IDLE_POLL_MILLISECONDS = 1000
# The worker waits this long while a grammar is compiled, or pictures are looked at.
PREPARING_POLL_MILLISECONDS = 1
# While there is work, reports of the state of speculation are this many seconds apart.
STATE_SECONDS = 0.5


@dataclass(slots=True)
class Preparing:
    """Holds a request whose grammar is compiled, or whose pictures are looked at, while others go on, and the
    sequences that were aborted meanwhile."""

    request: Generate
    grammar: Future[Any] | None
    pictures: Future[PromptPictures] | None
    aborts: list[Abort] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return all(each is None or each.done() for each in (self.grammar, self.pictures))


class Worker:
    """Runs the loop. ``outbox`` decides which outputs are sent after a step; none stay in it when no step
    follows. Where the runner tells when the device is at work, outputs are encoded and sent meanwhile, a
    launch later."""

    def __init__(self, core: EngineCore, connection: Connection, outbox: Outbox) -> None:
        self.core = core
        self.connection = connection
        self.outbox = outbox
        self.running = True
        self.next_state = 0.0
        self.unsent: list[StepOutput | Failed] = []
        self.sends_late = isinstance(core.runner, LaunchingRunner)
        if isinstance(core.runner, LaunchingRunner):
            core.runner.when_launched = self._send_rest
        self.heartbeat = Heartbeats()
        self.is_trimmed = False  # True once the memory that passes freed has been returned to the system.
        self.preparing: dict[str, Preparing] = {}

    def run(self) -> None:
        try:
            while self.running:
                self.turn()
        finally:  # An error leaves everything that was computed before as good as ever.
            self._send_rest()
            if left := self.outbox.empty():
                self.connection.send(StepOutput(left, self.core.snapshot()))

    def turn(self) -> None:
        """Reads the messages that have come, and makes a step if there is work."""
        self.heartbeat.beat()
        self._drain_inbox()
        if self.core.has_work:
            self.is_trimmed = False
            results = self.core.step()
            self._send_rest()  # This sends them if nothing was launched.
            self._send_step(results)

    def _send_step(self, results: list[TokenOutput | Failed]) -> None:
        failures = [result for result in results if isinstance(result, Failed)]
        due = self.outbox.put([result for result in results if isinstance(result, TokenOutput)])
        if failures or not self.core.has_work:
            due += self.outbox.empty()
        if due or failures:
            self.unsent.append(StepOutput(due, self.core.snapshot()))
        self.unsent += failures
        if not (self.sends_late and self.core.has_work):
            self._send_rest()
        if not self.core.has_work or time.monotonic() > self.next_state:
            self.next_state = time.monotonic() + STATE_SECONDS
            self.connection.send(SpeculationState(self.core.speculation()))

    def _send_rest(self) -> None:
        unsent, self.unsent = self.unsent, []
        for message in unsent:
            self.connection.send(message)

    def _drain_inbox(self) -> None:
        """Handles the messages that have arrived; with nothing to do, waits for one, but not for ever."""
        timeout = PREPARING_POLL_MILLISECONDS if self.preparing else IDLE_POLL_MILLISECONDS
        if self.core.has_work:
            timeout = 0
        try:
            if drain(self.connection, timeout, self._handle):
                timeout = 0
        except EOFError:
            self.running = False
        if timeout == IDLE_POLL_MILLISECONDS and not self.is_trimmed:  # No message has come in all that time.
            self.core.free_unused()
            trim_heap()
            self.is_trimmed = True
        for begun in [*self.preparing.values()]:
            if begun.is_done:
                del self.preparing[begun.request.request_id]
                self._add(begun.request, begun.pictures)
                for abort in begun.aborts:
                    self._abort(abort)

    def _begin(self, request: Generate) -> None:
        """Adds the request, or begins to compile its grammar and to look at its pictures: other sequences go
        on meanwhile."""
        compiled, grammar = None, request.params.grammar
        try:
            pictures = self.core.admission.seeing(request)
        except RequestError as error:
            self.connection.send(Failed(request.request_id, error.code, str(error)))
            return
        if grammar is not None and self.core.has_work and self.core.admission.grammars is not None:
            compiled = self.core.admission.grammars.compile_beside(grammar)
        if compiled is None and pictures is None:
            self._add(request)
        else:
            self.preparing[request.request_id] = Preparing(request, compiled, pictures)

    def _add(self, request: Generate, pictures: Future[PromptPictures] | None = None) -> None:
        try:
            self.core.add(request, None if pictures is None else pictures.result())
        except RequestError as error:
            self.connection.send(Failed(request.request_id, error.code, str(error)))

    def _load_adapter(self, message: LoadAdapter) -> None:
        try:
            adapter = self.core.load_adapter(message.name, message.path)
        except RequestError as error:
            self.connection.send(Failed(message.request_id, error.code, str(error)))
        else:
            self.connection.send(AdapterLoaded(message.request_id, adapter))

    def _abort(self, message: Abort) -> None:
        if (begun := self.preparing.get(message.request_id)) is not None:
            begun.aborts.append(message)
            if message.index is None and begun.pictures is not None and begun.pictures.cancel():
                del self.preparing[message.request_id]
            return
        self.core.abort(message.request_id, message.index)
        self.outbox.forget(message.request_id, message.index)
        if not self.core.has_work:  # No step will follow to report what is in use now.
            self._send_rest()
            self.connection.send(StepOutput(self.outbox.empty(), self.core.snapshot()))

    def _handle(self, data: bytes) -> None:
        message = decode_to_worker(data)
        match message:
            case Generate():
                self._begin(message)
            case Abort():
                self._abort(message)
            case LoadAdapter():
                self._load_adapter(message)
            case UnloadAdapter():
                self.core.unload_adapter(message.digest)
            case ClearPrefixes():
                self.core.forget_prefixes()
                self.connection.send(Cleared())
            case Shutdown():
                self.running = False


def describe(core: EngineCore, config: EngineConfig) -> Ready:
    target_pool = core.scheduler.target_pool
    pools = target_pool, *core.scheduler.draft_pools
    limits, vision = core.admission.encoder_decoder, core.admission.vision
    runners = [core.target] if core.draft is None else [core.target, core.draft]
    assert config.target is not None
    return Ready(
        target=config.target,
        draft=core.drafter,
        device=str(core.target.device),
        dtype=str(core.target.model.arithmetic).removeprefix("torch."),
        weights=weight_types(core.target.model),
        fingerprint=fingerprint(core.target.model, config),
        vocab_size=core.target.vocab_size,
        max_model_len=core.admission.max_model_len,
        num_target_blocks=target_pool.num_blocks,
        num_draft_blocks=max((pool.num_blocks for pool in core.scheduler.draft_pools), default=0),
        block_size=target_pool.block_size,
        methods=cast(list[Source], sorted(core.admission.methods)),  # The settings decide this.
        method=cast(Method, core.admission.method),
        num_threads=torch.get_num_threads(),
        thread_limit=thread_limit(config) if core.target.device.type == "cpu" else "",
        default_sampling=default_sampling(core.target.model.generation_config)
        if config.generation_config == "auto"
        else {},
        encoder_decoder=None
        if limits is None
        else EncoderDecoderLengths(limits.max_prompt_len, limits.max_output_len, len(limits.start_ids)),
        forward=core.target.model.way,
        vision=None if vision is None else vision.facts,
        max_num_sequences=core.scheduler.max_num_sequences,
        num_state_slots=max(pool.states.num_slots if pool.states else 0 for pool in pools),
        state_bytes=sum(model.model.state_bytes_per_sequence for model in (core.target, core.draft) if model),
        cache_dtype=str(core.target.model.cache_dtype).removeprefix("torch."),
        weight_bytes=sum(weight_bytes(runner.model) for runner in runners),
        cache_bytes=sum(runner.cache.num_bytes for runner in runners),
        worker_bytes=own_memory(),
        tried=list(core.tried),
        adapters=[] if core.admission.adapters is None else list(core.admission.adapters.named),
    )


def keep_loaded() -> None:
    """Takes loaded objects out of garbage collection: to look through them again would stop every stream for
    a fifth of a second. Objects that loading left behind are collected first, and their memory is
    returned."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    trim_heap()


def _serve_vectors(config: EngineConfig, task: Task, connection: Connection, heartbeat: Heartbeats) -> int:
    """Serves a model that makes vectors or scores, until the front end ends it."""
    connection.send(Loading("the target model"))
    if config.kv_events_endpoint is not None:
        raise ModelLoadError("kv_events_endpoint is for models that can begin with any blocks of their cache")
    num_threads = config.num_threads or usual_num_threads()
    set_num_threads(num_threads)
    loaded = load_vectors(config, task)
    keep_loaded()
    heartbeat.files.watch()
    connection.send(embed_worker.describe(loaded, config, num_threads))
    core = EmbedCore(loaded, config.max_num_batched_tokens)
    embed_worker.EmbedWorker(core, connection, heartbeat).run()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m truedraft.engine.process.worker")
    parser.add_argument("--socket", required=True, type=int, help="this end of the connection: a descriptor")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    args = parser.parse_args()
    # Ctrl-C reaches the whole process group; when to leave is the front end's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    transformers_logging.disable_progress_bar()
    config = EngineConfig.model_validate_json(args.config)
    heartbeat = Heartbeats()
    connection = Connection(args.socket)
    heartbeat.start(connection)
    try:
        assert config.target is not None
        task = task_of(config.target) if config.task == "auto" else config.task
        if task != "generate":
            if config.tensor_parallel_size > 1:
                raise ModelLoadError(
                    f"tensor_parallel_size is for models that write text, not for task {task}"
                )
            return _serve_vectors(config, task, connection, heartbeat)
        core = build_engine(config, lambda stage: connection.send(Loading(stage)))
        ready = describe(core, config)
    except ModelLoadError as error:
        connection.send(Failed(request_id="", code="model_load_failed", message=str(error)))
        return 2
    except RankLostError as error:
        return _without_rank(connection, str(error))
    keep_loaded()
    heartbeat.files.watch()
    if isinstance(core.target.model, LeadingDecoder):
        heartbeat.ranks = core.target.model.followers.fault
    connection.send(ready)
    worker = Worker(core, connection, Outbox(config.stream_interval))
    worker.heartbeat = heartbeat
    if core.admission.grammars is not None:
        core.admission.grammars.preload()
    try:
        worker.run()
    except RankLostError as error:
        return _without_rank(connection, str(error))
    return 0


def _without_rank(connection: Connection, reason: str) -> int:
    """Tells why the worker cannot go on, and returns its exit code."""
    connection.send(lost_rank(reason))
    return LOST_RANK_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())

"""Runs the loop of a worker whose model makes vectors: between passes over texts it drains its inbox."""

from truedraft.engine.config import EngineConfig
from truedraft.engine.embedding.core import EmbedCore
from truedraft.engine.embedding.load import Loaded
from truedraft.engine.machine.heap import trim_heap
from truedraft.engine.machine.limits import own_memory
from truedraft.engine.messages import (
    Abort,
    Embed,
    Failed,
    Generate,
    Ready,
    Shutdown,
    decode_to_worker,
)
from truedraft.engine.models.identity import fingerprint_of
from truedraft.engine.native.threads import thread_limit
from truedraft.engine.process.connection import Connection, drain
from truedraft.engine.process.heartbeat import Heartbeats

IDLE_POLL_MILLISECONDS = 1000


class EmbedWorker:
    def __init__(self, core: EmbedCore, connection: Connection, heartbeat: Heartbeats) -> None:
        self.core = core
        self.connection = connection
        self.heartbeat = heartbeat
        self.running = True
        self.is_trimmed = False  # True once the memory that passes freed has been returned to the system.

    def run(self) -> None:
        while self.running:
            self.heartbeat.beat()
            self._drain_inbox()
            if self.core.has_work:
                self.is_trimmed = False
                for answer in self.core.step():
                    self.connection.send(answer)

    def _drain_inbox(self) -> None:
        """Handles the messages that have arrived; with nothing to do, waits for one, but not for ever."""
        timeout = 0 if self.core.has_work else IDLE_POLL_MILLISECONDS
        try:
            if drain(self.connection, timeout, self._handle):
                timeout = 0
        except EOFError:
            self.running = False
        if timeout and not self.is_trimmed:  # No message has come in all that time.
            trim_heap()
            self.is_trimmed = True

    def _handle(self, data: bytes) -> None:
        match decode_to_worker(data):
            case Embed() as request:
                self.core.add(request)
            case Generate() as request:
                words = "this worker's model does not write text"
                self.connection.send(Failed(request.request_id, "unsupported_parameter", words))
            case Abort() as abort:
                self.core.abort(abort.request_id)
            case Shutdown():
                self.running = False


def describe(loaded: Loaded, config: EngineConfig, num_threads: int) -> Ready:
    facts = loaded.model.facts
    assert config.target is not None
    described = {name: value for name, value in facts.config.to_dict().items() if name != "_name_or_path"}
    return Ready(
        target=config.target,
        draft=None,
        device=str(facts.device),
        dtype="bfloat16" if facts.bf16_linears else str(facts.dtype).removeprefix("torch."),
        vocab_size=int(facts.config.get_text_config().vocab_size),
        max_model_len=loaded.max_tokens,
        num_target_blocks=0,
        num_draft_blocks=0,
        block_size=1,
        methods=[],
        method="none",
        num_threads=num_threads,
        thread_limit=thread_limit(config) if facts.device.type == "cpu" else "",
        forward=loaded.way,
        fingerprint=fingerprint_of([loaded.task, loaded.way], described, facts.device, config),
        worker_bytes=own_memory(),
        task=loaded.task,
        embedding=loaded.facts,
    )

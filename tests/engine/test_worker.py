"""The real worker process is at the other end of a socket."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.conftest import Models
from truedraft.engine.config import EngineConfig
from truedraft.engine.messages import (
    Abort,
    Failed,
    FromWorker,
    Generate,
    Heartbeat,
    Loading,
    Ready,
    SamplingParams,
    Shutdown,
    SpeculationState,
    StepOutput,
    TokenOutput,
    ToWorker,
    decode_from_worker,
)
from truedraft.engine.process import worker as worker_process
from truedraft.engine.process.connection import Connection
from truedraft.engine.process.outbox import Outbox

# A busy machine takes its time: a process has torch to load. Only a failure takes so long.
TIMEOUT_SECONDS = 300


@dataclass
class SpawnedWorker:
    connection: Connection
    process: subprocess.Popen[str]
    arrived: list[FromWorker] = field(default_factory=list)

    def send(self, message: ToWorker) -> None:
        self.connection.send(message)

    def receive(self) -> FromWorker:
        """Returns the next message, but for those that only tell how it is and how speculation goes."""
        late = time.monotonic() + TIMEOUT_SECONDS
        while True:
            while not self.arrived:
                assert time.monotonic() < late, "the worker is silent"
                self.arrived += map(decode_from_worker, self.connection.receive(1000))
            message = self.arrived.pop(0)
            if not isinstance(message, SpeculationState | Heartbeat | Loading):
                return message

    def outputs(self) -> list[TokenOutput]:
        message = self.receive()
        assert isinstance(message, StepOutput)
        return message.outputs


@contextmanager
def spawned(config: EngineConfig) -> Iterator[SpawnedWorker]:
    """At the other end of a connection, which ends with the context."""
    ours, theirs = socket.socketpair()
    connection = Connection(ours.detach())
    command = [sys.executable, "-m", "truedraft.engine.process.worker", "--socket", str(theirs.fileno())]
    with subprocess.Popen(
        [*command, "--config", config.model_dump_json()],
        pass_fds=[theirs.fileno()],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        theirs.close()
        try:
            yield SpawnedWorker(connection, process)
        finally:
            connection.close()


@pytest.fixture(scope="module")
def worker(models: Models) -> Iterator[SpawnedWorker]:
    config = EngineConfig(target=models.target, draft=models.close_draft, device="cpu", num_threads=1)
    with spawned(config) as worker:
        ready = worker.receive()
        assert isinstance(ready, Ready)
        assert (ready.vocab_size, ready.max_model_len, ready.dtype) == (16, 256, "float32")
        yield worker
        worker.send(Shutdown())
        assert worker.process.wait(TIMEOUT_SECONDS) == 0


def test_a_request_runs_to_its_end_and_is_counted(worker: SpawnedWorker) -> None:
    params = SamplingParams(max_tokens=40, temperature=0)
    worker.send(Generate(request_id="a", prompt_token_ids=[1, 2, 3], params=params))
    tokens: list[int] = []
    finish_reason = None
    while finish_reason is None:
        message = worker.receive()
        assert isinstance(message, StepOutput)
        for output in message.outputs:
            tokens += output.token_ids
            finish_reason = output.finish_reason
    assert (len(tokens), finish_reason) == (40, "length")
    assert message.stats.num_running == 0
    assert sum(counts.num_draft_tokens for counts in message.stats.drafts.values()) == sum(
        message.stats.draft_tokens_per_position
    )
    assert message.stats.cache_usage == {"target": 0, "draft": 0}


@pytest.mark.parametrize(
    ("prompt", "code"),
    [([], "empty_prompt"), ([99], "invalid_token_id"), ([1] * 256, "context_length_exceeded")],
)
def test_what_cannot_be_served_fails_alone(worker: SpawnedWorker, prompt: list[int], code: str) -> None:
    params = SamplingParams(max_tokens=3, temperature=0)
    worker.send(Generate(request_id="bad", prompt_token_ids=prompt, params=params))
    worker.send(Generate(request_id="good", prompt_token_ids=[1], params=params))
    failed = worker.receive()
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.code) == ("bad", code)
    outputs = worker.outputs()
    while outputs[-1].finish_reason is None:
        outputs = worker.outputs()
    assert outputs[-1].request_id == "good"


def test_abort_stops_the_outputs(worker: SpawnedWorker) -> None:
    """Tried again where the worker was done before the abort came, which is for the machine to say."""
    long = SamplingParams(max_tokens=250, temperature=0)
    for attempt in range(100):
        worker.send(Generate(request_id=f"long {attempt}", prompt_token_ids=[1], params=long))
        outputs = worker.outputs()
        worker.send(Abort(f"long {attempt}"))
        # The last message has none: it tells what is in use once all is quiet.
        while outputs and outputs[0].finish_reason is None:
            outputs = worker.outputs()
        if not outputs:
            break
    else:
        pytest.fail("whatever is aborted runs to its end")
    short = SamplingParams(max_tokens=1, temperature=0)
    worker.send(Generate(request_id="next", prompt_token_ids=[1], params=short))
    outputs = worker.outputs()
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("next", "length")]


def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    with spawned(EngineConfig(target=str(tmp_path / "none"), draft="none")) as worker:
        failed = worker.receive()
        assert isinstance(failed, Failed)
        assert (failed.request_id, failed.code) == ("", "model_load_failed")
        assert "there is no file or folder" in failed.message
        _, stderr = worker.process.communicate(timeout=TIMEOUT_SECONDS)
        assert worker.process.returncode == 2
        assert stderr.strip() == ""  # the front end says it


def test_a_worker_without_its_front_end_leaves(models: Models) -> None:
    with spawned(EngineConfig(target=models.target, device="cpu", num_threads=1)) as worker:
        assert isinstance(worker.receive(), Ready)
        params = SamplingParams(max_tokens=250, temperature=0)
        worker.send(Generate(request_id="a", prompt_token_ids=[1, 2, 3], params=params))
        worker.connection.close()
        _, stderr = worker.process.communicate(timeout=TIMEOUT_SECONDS)
        assert (worker.process.returncode, stderr) == (0, "")


def test_memory_is_given_back_once_after_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not between passes, nor again and again while nothing comes."""
    trimmed: list[int] = []
    works = iter([True] * 3 + [False] * 4 + [True] + [False] * 2)
    steps: list[int] = []
    core: Any = SimpleNamespace(
        runner=None, step=lambda: steps.append(len(trimmed)), free_unused=lambda: None
    )
    worker = worker_process.Worker(core, SimpleNamespace(receive=lambda timeout: []), Outbox(1))  # type: ignore[arg-type]
    monkeypatch.setattr(worker_process, "trim_heap", lambda: trimmed.append(len(steps)))
    monkeypatch.setattr(worker, "_send_step", lambda results: None)
    for core.has_work in works:
        worker.turn()
    assert (steps, trimmed) == ([0, 0, 0, 1], [3, 4])

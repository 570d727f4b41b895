"""A real server under faults: what must be true of it after each one.

Answers are compared with those that the same server gave before anything went wrong, without drafts and one
at a time: greedy and seeded ones depend neither on drafts nor on what else is computed.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from tests.integration.conftest import TIMEOUT_SECONDS, Server, serving

MODEL = "truedraft-demo"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
# Only a failure takes so long: the restart of a worker on a busy machine is the slowest of these events.
FAULT_SECONDS = 180
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")

# Requests whose answers are known: by prompt, parameters, and how they are drafted.
STORY = {"prompt": "Once upon a time", "max_tokens": 40}
CASES: tuple[dict[str, Any], ...] = (
    STORY | {"temperature": 0},
    STORY | {"temperature": 0, "speculation": {"num_speculative_tokens": 3}},
    STORY | {"seed": 7},
    STORY | {"seed": 8, "n": 3, "temperature": 0.7},
    {"prompt": "The old man looked at the sea", "max_tokens": 90, "temperature": 0, "stop": ["."]},
    {"prompt": "The old man looked at the sea", "max_tokens": 30, "seed": 1, "top_p": 0.9, "top_k": 40},
    {"prompt": "In the morning", "max_tokens": 25, "seed": 2, "presence_penalty": 0.5, "logprobs": 2},
    {"prompt": ["One day", "The dog"], "max_tokens": 12, "temperature": 0, "logit_bias": {"5": -100}},
    {"prompt": "The cat sat. " * 60, "max_tokens": 8, "temperature": 0},
    {"prompt": "The cat sat. " * 60, "max_tokens": 50, "seed": 3, "speculation": {"method": "ngram"}},
    {"prompt": "Two birds", "max_tokens": 60, "seed": 4, "min_p": 0.05, "ignore_eos": True},
)

Texts = list[str]
PLAIN = {"speculation": {"method": "none"}}


def wait_for(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + FAULT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def texts_of(answer: dict[str, Any]) -> Texts:
    return [text_of(choice) for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


def text_of(choice: dict[str, Any]) -> str:
    """Returns the text of a completion's or a chat's choice, whole or a chunk."""
    if "text" in choice:
        return str(choice["text"])
    return (choice.get("message") or choice["delta"]).get("content") or ""


def read_stream(lines: Iterator[str], num_choices: int) -> Texts:
    """The texts of a stream that ended well; ``ServerError`` with the error event of one that did not."""
    texts = [""] * num_choices
    for line in lines:
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return texts
        if line.startswith("data: "):
            chunk = json.loads(data)
            if "error" in chunk:
                raise ServerError(chunk["error"]["code"])
            for choice in chunk["choices"]:
                texts[choice["index"]] += text_of(choice)
    raise ServerError("ended without [DONE]")


class ServerError(Exception):
    """The code of an answer that is an error."""


def children_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children]


def workers_of(pid: int) -> list[int]:
    """Returns a server's children without those that help it with text."""
    commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children_of(pid)}
    return [child for child, command in commands.items() if b"truedraft.engine.process.spawned" in command]


# The command of ``tests.integration``, with shorter pauses between restarts of the worker.
IMPATIENT = """
import sys
from functools import partial
from truedraft.server.cli import draining, launch
from truedraft.server.cli import main as cli
from truedraft.server.workers.worker_client import WorkerClient
draining.END_SECONDS = 1000.0
launch.WorkerClient = partial(WorkerClient, first_backoff_seconds=0.05)
sys.exit(cli.main(sys.argv[1:]))
"""


@dataclass
class Watched:
    server: Server
    cases: Sequence[dict[str, Any]] = CASES
    references: list[Texts] = field(default_factory=list)
    num_descriptors: int = 0

    @property
    def worker(self) -> int:
        (pid,) = workers_of(self.server.pid)
        return pid

    def ask(self, case: dict[str, Any], *, stream: bool = False) -> Texts:
        body, path = case | {"model": MODEL}, path_of(case)
        if not stream:
            answer = self.server.post(path, body).json()
            if "error" in answer:
                raise ServerError(answer["error"]["code"])
            return texts_of(answer)
        with self.server.stream(path, body) as response:
            if response.status_code != 200:
                raise ServerError(json.loads(response.read())["error"]["code"])
            return read_stream(response.iter_lines(), num_choices(case))

    def is_ready(self) -> bool:
        return self.server.get("/ready").status_code == 200

    def gauges(self) -> dict[str, float]:
        return {name: self.server.metric(f"truedraft_{name}") for name in GAUGES}

    def assert_intact(self) -> None:
        """Asserts: one worker, nothing running, all blocks free, no connection left, next answers exact."""
        wait_for(self.is_ready, lambda: "not ready")
        wait_for(lambda: not any(self.gauges().values()), lambda: f"gauges: {self.gauges()}")
        assert len(workers_of(self.server.pid)) == 1
        for case, reference in zip(self.cases[:3], self.references[:3], strict=True):
            assert self.ask(case) == reference
        wait_for(lambda: not any(self.gauges().values()), lambda: f"gauges: {self.gauges()}")
        wait_for(
            lambda: descriptors(self.server.pid) <= self.num_descriptors,
            lambda: f"{descriptors(self.server.pid)} descriptors, {self.num_descriptors} at first",
        )


def path_of(case: dict[str, Any]) -> str:
    return CHAT if "messages" in case else COMPLETIONS


def num_choices(case: dict[str, Any]) -> int:
    prompt = case.get("prompt")
    return (len(prompt) if isinstance(prompt, list) else 1) * int(case.get("n", 1))


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@contextmanager
def watched(folder: Path, *settings: str, cases: Sequence[dict[str, Any]] = CASES) -> Iterator[Watched]:
    """The server, which leaves no process and no file behind when it ends."""
    with (
        tempfile.TemporaryDirectory() as temporary,
        # torch makes a folder of its own when it is imported, and leaves it.
        patch.dict(os.environ, {"TMPDIR": temporary, "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch")}),
    ):
        with serving(folder, *settings, program=IMPATIENT) as server:
            watch = Watched(server, cases)
            watch.references = [watch.ask(case | PLAIN) for case in cases]
            time.sleep(0.2)
            watch.num_descriptors = descriptors(server.pid)
            workers = children_of(server.pid)
            yield watch
            workers += children_of(server.pid)
        wait_for(lambda: not any(map(is_alive, workers)), lambda: "a worker outlives the server")
        assert not (left := list(Path(temporary).iterdir())), f"files are left: {left}"


def stall_of_health(url: str, stop: Callable[[], bool]) -> list[float]:
    """Seconds of each ``/health``, one after the other over one connection, until ``stop``."""
    seconds = []
    with httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as client:
        while not stop():
            started = time.perf_counter()
            client.get("/health").raise_for_status()
            seconds.append(time.perf_counter() - started)
            time.sleep(0.005)
    return seconds

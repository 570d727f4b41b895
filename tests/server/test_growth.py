"""Requests cost what they weigh: a field that is eight times as large takes at most that much more work, and
never holds the event loop. So does an answer that is eight times as long.

Every field of every route is tried, with every shape that its declaration allows. Work is processor time of
this process, without that of the client's own thread: how busy the machine is does not matter much, and what
grows with the square is far over the bound.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.server.growing_requests import OF_VECTORS, Case, answers, cases
from tests.server.running import RunningServer, run_server
from truedraft.server.observability.loop_lag import Lag, LoopMonitor
from truedraft.server.schemas.completion import CompletionRequest
from truedraft.server.text.tokenizer import Tokenizer

SMALL, FACTOR = 4000, 8
# Linear work grows 8 times, quadratic work 64 times; a busy machine adds to both.
MOST = 24.0
# Seconds that are too little to be compared.
LITTLE_WORK = 0.004
# Seconds of processor time that the event loop may take for one event.
LONGEST = 0.05
ATTEMPTS = 6

SETTINGS: dict[str, Any] = {
    "max_texts": 100_000,
    "max_queued_sequences": 100_000,
    "max_stop_strings": 100_000,
    "max_stop_characters": 1 << 23,
}


class Watched:
    """Has the server, and the longest that its loop was held since the last look, in processor time."""

    def __init__(self, server: RunningServer, of_vectors: RunningServer) -> None:
        self.server = server
        self.of_vectors = of_vectors
        self._longest = Lag(0.0, 0.0)
        self.monitor = LoopMonitor(self._note, late_after=LONGEST, period=0.001)

    def _note(self, lag: Lag) -> None:
        if lag.cpu_seconds > self._longest.cpu_seconds:
            self._longest = lag

    def longest(self) -> Lag:
        found, self._longest = self._longest, Lag(0.0, 0.0)
        return found

    def work(self, case: Case, size: int) -> float:
        """Returns the seconds of processor time that the server takes for a request, answered or refused."""
        content = case.content(size)
        before = time.process_time() - time.thread_time()
        self.send(case, content)
        return time.process_time() - time.thread_time() - before

    def send(self, case: Case, content: bytes) -> None:
        server = self.of_vectors if case.path in OF_VECTORS else self.server
        answer = server.client.post(case.path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code != 500, answer.text


@pytest.fixture(scope="module")
def watched(
    model_folder: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    log = tmp_path_factory.mktemp("growth")
    worker = ("--max-model-len", "10000000", "--tokens-per-step", "1")
    of_vectors = tmp_path_factory.mktemp("growth_of_vectors")
    with (
        run_server(model_folder, tokenizer, log, *worker, **SETTINGS) as server,
        run_server(model_folder, tokenizer, of_vectors, *worker, "--task", "embed", **SETTINGS) as second,
    ):
        found = Watched(server, second)
        server.loop.call_soon_threadsafe(found.monitor.start)
        yield found
        found.monitor.stop()


def all_cases(server: RunningServer) -> list[Case]:
    return list(cases(server.get("/openapi.json").json()))


def test_every_field_is_tried(watched: Watched) -> None:
    found = all_cases(watched.server)
    fields = {(case.path, case.field) for case in found}
    assert len(fields) > 300
    for field in ("prompt", "stop", "n", "logit_bias", "prediction.content", "structured_outputs.regex"):
        assert ("/v1/completions", field) in fields
    for field in ("messages.0.content.0.text", "tools.0.function.parameters", "chat_template_kwargs"):
        assert ("/v1/chat/completions", field) in fields


def test_work_grows_no_faster_than_a_field(watched: Watched) -> None:
    """Every third shape of each field is tried here, and all of them in ``tests.faults``."""
    assert not faults(watched, all_cases(watched.server)[::3])


def test_work_grows_no_faster_than_an_answer(watched: Watched) -> None:
    assert not faults(watched, list(answers()))


def faults(watched: Watched, tried: Sequence[Case], small: int = SMALL) -> dict[str, str]:
    """Returns what takes too much work, or holds the loop, in each of a few attempts: what else the machine
    does can only add to one."""
    left = dict.fromkeys(tried, "")
    for _ in range(ATTEMPTS):
        left = {case: fault for case in left if (fault := fault_of(watched, case, small))}
    return {case.name: fault for case, fault in left.items()}


def fault_of(watched: Watched, case: Case, small: int) -> str:
    watched.longest()
    large_work = watched.work(case, FACTOR * small)
    lag = watched.longest()
    if lag.cpu_seconds > LONGEST:
        return f"the event loop was held for {lag.cpu_seconds:.3f} s in {lag.where}"
    if large_work <= MOST * LITTLE_WORK:
        return ""
    if (growth := large_work / max(LITTLE_WORK, watched.work(case, small))) <= MOST:
        return ""
    # Where a limit lies between the two sizes, as for a schema that is compiled again with less in it, work
    # has a step. What grows with the square does so at twice the size as well.
    small_work, large_work = watched.work(case, 2 * small), watched.work(case, 2 * FACTOR * small)
    if large_work <= MOST * max(LITTLE_WORK, small_work):
        return ""
    return f"{growth:.1f} times the work"


def quadratic(text: str) -> None:
    for place in range(len(text)):
        text[place:].count("x")


@pytest.mark.parametrize(
    ("name", "field", "plant"),
    [
        ("quadratic work in a thread", "user", "truedraft.server.routes.completions.check_request"),
        ("linear work on the loop", "user", "truedraft.server.routes.completions.start_generation"),
    ],
)
def test_planted_bugs_are_caught(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, name: str, field: str, plant: str
) -> None:
    module, _, attribute = plant.rpartition(".")
    honest = getattr(sys.modules[module], attribute)

    def planted(*arguments: Any, **options: Any) -> Any:
        body = next(each for each in arguments if isinstance(each, CompletionRequest))
        if "thread" in name:
            quadratic(str(body.user))
        else:
            for _ in range(200 * len(str(body.user))):
                pass
        return honest(*arguments, **options)

    monkeypatch.setattr(plant, planted)
    tried = [
        case
        for case in all_cases(watched.server)
        if (case.path, case.field, case.shape) == ("/v1/completions", field, "one letter")
    ]
    (fault,) = faults(watched, tried, small=2 * SMALL).values()
    assert ("times the work" if "thread" in name else "planted") in fault

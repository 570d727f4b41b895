"""Several workers: who gets which request, and what becomes of requests when one dies. Workers are played."""

from typing import Any, cast

import pytest

from tests.server.test_launch import worker as ready_message
from truedraft.engine.messages import Abort, Generate, SamplingParams, TokenOutput, ToWorker
from truedraft.server.cli.launch import thread_share
from truedraft.server.errors import NotReadyError, QueueFullError, WorkerLostError
from truedraft.server.observability.metrics import WorkerMetrics
from truedraft.server.settings import Settings
from truedraft.server.workers.engine_stream import EngineStream
from truedraft.server.workers.open_requests import QueueLimits
from truedraft.server.workers.prefix_affinity import LONGEST, MAX_HASHES, KnownPrefixes, Prefix, prefixes_of
from truedraft.server.workers.worker_client import EngineState, WorkerClient
from truedraft.server.workers.worker_pool import TOKENS_PER_SEQUENCE, WorkerFailedError, WorkerPool

LOST = WorkerLostError("It died.")
READY = EngineState("ready", "", ready_message())
RESTARTING = EngineState("restarting", "It died.")
FAILED = EngineState("failed", "It died too often.")


class PlayedWorker:
    def __init__(self) -> None:
        self.state = READY
        self.sent: list[ToWorker] = []

    def send(self, message: ToWorker) -> None:
        self.sent.append(message)

    @property
    def request_ids(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, Generate)]

    @property
    def aborted(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, Abort)]


class Played:
    """A pool and its workers."""

    def __init__(self, num_workers: int = 2, **options: Any) -> None:
        self.workers = [PlayedWorker() for _ in range(num_workers)]
        self.pool = WorkerPool(cast(list[WorkerClient], self.workers), **options)

    def submit(self, *ids: str, prompt: list[int] | None = None, n: int = 1, **fields: Any) -> EngineStream:
        params = SamplingParams(max_tokens=10, seed=5)
        return self.pool.submit([Generate(name, prompt or [1], params, n, **fields) for name in ids])

    def output(self, request_id: str, finished: bool = False) -> None:
        reason = "stop" if finished else None
        self.pool.outputs([TokenOutput(request_id, 0, [1], reason, 0, 0, queue_seconds=0.0)])

    def die(self, number: int, state: EngineState = RESTARTING) -> None:
        was_ready = self.workers[number].state.status == "ready"
        self.workers[number].state = state
        self.pool.worker_lost(number, LOST, was_ready=was_ready)

    def come_back(self, number: int) -> None:
        self.workers[number].state = READY
        self.pool.worker_ready(number)

    @property
    def received(self) -> list[list[str]]:
        return [worker.request_ids for worker in self.workers]


def prompt(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


def test_requests_go_to_the_worker_with_fewest_sequences() -> None:
    played = Played(3)
    played.submit("a", n=2)
    played.submit("b", "c", "d", "e")
    assert played.received == [["a"], ["b", "d"], ["c", "e"]]
    played.output("b", finished=True)
    played.output("d", finished=True)
    played.submit("f")
    assert played.received[1] == ["b", "d", "f"]


def test_prompts_with_the_same_beginning_go_to_the_same_worker() -> None:
    played = Played()
    shared = prompt(TOKENS_PER_SEQUENCE * 2)
    played.submit("other", prompt=prompt(64, first=5000))
    played.submit("a", prompt=[*shared, 7])
    played.submit("b", prompt=[*shared, 8])
    played.submit("c", prompt=shared)
    assert played.received == [["other"], ["a", "b", "c"]]


def test_a_much_busier_worker_does_not_keep_its_prompts() -> None:
    """512 shared tokens are worth two sequences; then the other worker computes them, and has them, too."""
    played = Played()
    shared = prompt(TOKENS_PER_SEQUENCE * 2)
    for name in "abcdef":
        played.submit(name, prompt=shared)
    assert played.received == [["a", "b", "c"], ["d", "e", "f"]]


@pytest.mark.parametrize(
    ("options", "fields"),
    [({"shares_prefixes": False}, {}), ({}, {"cache_prompt": False}), ({}, {"cache_salt": "another"})],
)
def test_what_is_not_shared_attracts_nothing(options: dict[str, Any], fields: dict[str, Any]) -> None:
    played = Played(**options)
    shared = prompt(TOKENS_PER_SEQUENCE * 4)
    played.submit("a", prompt=shared)
    played.submit("b", prompt=shared, **fields)
    assert played.received == [["a"], ["b"]]


def test_long_prompts_are_known_by_their_beginning() -> None:
    request = Generate("a", prompt(100_000), SamplingParams(max_tokens=1))
    lengths = [prefix.num_tokens for prefix in prefixes_of(request)]
    assert (lengths[0], lengths[-1], len(lengths)) == (32, LONGEST, 9)


def test_old_prefixes_are_forgotten() -> None:
    known = KnownPrefixes()
    for number in range(MAX_HASHES + 1):
        known.add([Prefix(32, number)])
    assert [known.longest([Prefix(32, number)]) for number in (0, 1)] == [0, 32]


def test_only_the_dead_workers_streams_end() -> None:
    played = Played()
    streams = {name: played.submit(name) for name in "abcd"}
    for name in streams:
        played.output(name)
    played.die(0)
    assert [name for name, stream in streams.items() if stream.has_open_sequences(name)] == ["b", "d"]


def test_requests_without_a_token_go_to_another_worker() -> None:
    played = Played()
    waiting = played.submit("a", "b")
    played.output("b")
    played.die(0)
    assert played.received == [["a"], ["b", "a"]]
    assert played.workers[1].sent[-1] == played.workers[0].sent[0], "the same request with the same seed"
    assert waiting.has_open_sequences("a")


def test_a_request_with_a_token_ends_with_all_its_prompts() -> None:
    played = Played()
    played.submit("a", "b")
    played.output("a")
    played.die(0)
    assert played.workers[1].aborted == ["b"]
    assert played.pool.num_requests == 0
    assert [played.pool.num_sequences(number) for number in (0, 1)] == [0, 0]


def test_a_request_that_two_workers_died_with_is_not_tried_again() -> None:
    played = Played(3)
    played.submit("a")
    played.die(0)
    played.die(1)
    assert played.received == [["a"], ["a"], []]
    assert played.pool.num_requests == 0


def test_requests_wait_where_no_worker_is_ready() -> None:
    played = Played()
    played.die(1)
    played.submit("a")
    played.die(0)
    with pytest.raises(NotReadyError):
        played.submit("b")
    played.come_back(1)
    assert played.received == [["a"], ["a"]]


@pytest.mark.parametrize("while_loading", [True, False])
def test_requests_do_not_wait_for_ever(while_loading: bool) -> None:
    """When a worker dies while it loads, or when none will come."""
    played = Played()
    played.die(1, FAILED)
    played.submit("a")
    played.die(0, RESTARTING if while_loading else FAILED)
    if while_loading:
        played.die(0)
    assert played.pool.num_requests == 0


def test_a_dead_workers_prompts_are_not_waited_for() -> None:
    played = Played()
    shared = prompt(TOKENS_PER_SEQUENCE * 4)
    played.submit("a", prompt=shared)
    played.output("a", finished=True)
    played.die(0)
    played.come_back(0)
    played.submit("b")
    played.submit("c", prompt=shared)
    assert played.received == [["a", "b"], ["c"]]


def test_aborts_follow_their_requests() -> None:
    played = Played()
    streams = [played.submit(name) for name in "abc"]
    streams[1].close()
    streams[2].stop("c", 0)
    assert [worker.aborted for worker in played.workers] == [["c"], ["b"]]
    assert [played.pool.num_sequences(number) for number in (0, 1)] == [1, 0]


def test_limits_are_the_servers() -> None:
    played = Played(limits=QueueLimits(max_queued_sequences=3))
    played.submit("a", "b", "c")
    with pytest.raises(QueueFullError):
        played.submit("d")


def test_the_smallest_caches_limit_requests() -> None:
    played = Played()
    small = ready_message(num_target_blocks=10)
    played.workers[1].state = EngineState("ready", "", small)
    assert played.pool.state.worker == small


def test_one_ready_worker_is_enough() -> None:
    played = Played()
    played.workers[0].state = FAILED
    assert played.pool.state.status == "ready"
    played.workers[1].state = RESTARTING
    assert played.pool.state.status == "restarting"


async def test_the_server_ends_with_its_last_worker() -> None:
    configs = Settings(workers=2).worker_configs()
    workers = [WorkerClient(config, WorkerMetrics()) for config in configs]
    pool = WorkerPool(workers)
    for worker in workers:
        worker._state = FAILED
        worker._first_load_over.set()
        worker._has_failed.set()
    with pytest.raises(WorkerFailedError, match="It died too often"):
        await pool.wait_until_ready()
    with pytest.raises(WorkerFailedError, match="It died too often"):
        await pool.wait_until_failed()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [("auto", 0, None, None)]),
        ({"workers": 2, "num_threads": 8}, [("auto", 4, None, 0.125)] * 2),
        ({"workers": 3, "num_threads": 2, "cache_memory": 300}, [("auto", 1, 100, None)] * 3),
        ({"workers": 2, "device": "cuda:0", "cache_memory_share": 0.8}, [("cuda:0", 0, None, 0.4)] * 2),
        ({"device": "cuda:0,2"}, [("cuda:0", 0, None, None), ("cuda:2", 0, None, None)]),
        (
            {"device": "cuda:0, cuda:1", "workers": 4, "cache_memory": 300},
            [("cuda:0", 0, 150, None), ("cuda:1", 0, 150, None)] * 2,
        ),
    ],
)
def test_devices_threads_and_memory_are_divided(settings: dict[str, Any], expected: list[Any]) -> None:
    configs = Settings(**settings).worker_configs()
    shares = [(c.device, c.num_threads, c.cache_memory, c.cache_memory_share) for c in configs]
    assert shares == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 3, "device": "cuda:0,1"}, "not a multiple of the 2 devices"),
        ({"device": "cuda:0,1", "device_map": "auto"}, "workers must be 1"),
        ({"device": "cpu,cpu"}, "names the same one twice"),
    ],
)
def test_workers_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**settings)


def test_processors_are_divided() -> None:
    assert thread_share(1, {}) == {}
    assert thread_share(2, {"OMP_NUM_THREADS": "6"}) == {"OMP_NUM_THREADS": "3"}
    assert int(thread_share(2, {})["OMP_NUM_THREADS"]) >= 1

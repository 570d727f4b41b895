"""What an engine tells over ZeroMQ of its cache, heard by a subscriber with vLLM's own types, written anew.

Whoever follows the events must know at any time exactly which blocks can be found.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq

from tests.engine.conftest import Models
from tests.families import save_random
from tests.hybrids import delta_net
from tests.models import make_engine, run_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.kv_events import KvEvents
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.process.connection import Connection
from truedraft.engine.process.heartbeat import Heartbeats
from truedraft.engine.process.worker import _serve_vectors

SHARED = [(7 * i + i // 3) % 16 for i in range(41)]
PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=3)
SECONDS = 60_000  # milliseconds; only a failure takes so long


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: "list[BlockStored | BlockRemoved | AllBlocksCleared]"
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class Gateway:
    """Follows the events of one worker: the tokens of each block's text, by the block's hash."""

    topic = b"kv@pod@tiny"

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.subscribe(self.topic)
        self.socket.connect(endpoint)
        self.next = 0
        self.kinds: list[str] = []
        self.texts: dict[Any, list[int]] = {}

    def read(self, num_batches: int) -> None:
        for _ in range(num_batches):
            assert self.socket.poll(SECONDS)
            topic, number, data = self.socket.recv_multipart()
            assert (topic, int.from_bytes(number, "big")) == (self.topic, self.next)
            self.next += 1
            batch = msgspec.msgpack.decode(data, type=EventBatch)
            assert batch.ts > 1e9
            for event in batch.events:
                self._hear(event)

    def _hear(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        self.kinds.append(type(event).__name__)
        if isinstance(event, AllBlocksCleared):
            self.texts.clear()
        elif isinstance(event, BlockRemoved):
            for each in event.block_hashes:
                del self.texts[each]  # was told before
        else:
            size, parent = event.block_size, event.parent_block_hash
            assert len(event.token_ids) == size * len(event.block_hashes)
            for number, each in enumerate(event.block_hashes):
                # A parent may have gone before: its text is then known no more.
                before = [] if parent is None else self.texts.get(parent, [-1] * size)
                assert each not in self.texts
                self.texts[each] = [*before, *event.token_ids[number * size : (number + 1) * size]]
                parent = each


@pytest.fixture
def endpoint(request: pytest.FixtureRequest) -> str:
    return f"inproc://{request.node.name}"


@pytest.fixture
def gateway(endpoint: str) -> Iterator[Gateway]:
    gateway = Gateway(endpoint)
    yield gateway
    gateway.socket.close()


def findable(pool: BlockPool) -> set[int]:
    return {int.from_bytes(each[-8:], "big") for each in pool._block_of}


def stored_texts(pool: BlockPool, texts: list[list[int]]) -> set[tuple[int, ...]]:
    """Returns the beginnings of the texts that a new text would find."""
    size = pool.block_size
    return {
        tuple(text[: (number + 1) * size]) for text in texts for number in range(len(pool.find(text, "")))
    }


def telling(endpoint: str) -> dict[str, str]:
    return {"kv_events_endpoint": endpoint, "kv_events_topic": Gateway.topic.decode()}


def counting(core: EngineCore) -> list[int]:
    """Counts the batches that an engine sends, each when it has something to say."""
    assert (events := core.scheduler.target_pool.events) is not None
    counts = [0]
    send = events.send

    def counted() -> None:
        counts[0] += bool(events._events)
        send()

    core.when_stepped = counted
    return counts


def test_a_gateway_knows_what_the_cache_holds(models: Models, endpoint: str, gateway: Gateway) -> None:
    core = make_engine(models.target, models.close_draft, **telling(endpoint))
    sent, texts = counting(core), []
    for last in range(3):
        prompt = [*SHARED, last, 5]
        (answer,) = run_engine(core, [prompt], PARAMS)
        texts.append([*prompt, *answer])
        gateway.read(sent[0] - gateway.next)
        pool = core.scheduler.target_pool
        assert {*gateway.texts} == findable(pool)
        assert {tuple(text) for text in gateway.texts.values()} == stored_texts(pool, texts)
    assert gateway.kinds[0] == "AllBlocksCleared"
    assert len(gateway.texts) > len(SHARED) // 4
    core.reset()
    run_engine(core, [[1, 2, 3, 4, 5]], PARAMS)
    gateway.read(sent[0] - gateway.next)
    assert "AllBlocksCleared" in gateway.kinds[1:]
    assert {*gateway.texts} == findable(core.scheduler.target_pool)


def test_nothing_is_told_of_texts_with_a_salt(models: Models, endpoint: str, gateway: Gateway) -> None:
    core = make_engine(models.target, models.close_draft, **telling(endpoint))
    sent = counting(core)
    core.add(Generate(request_id="r", prompt_token_ids=SHARED, params=PARAMS, cache_salt="secret"))
    while core.has_work:
        core.step()
    assert findable(core.scheduler.target_pool)
    gateway.read(sent[0])
    assert gateway.kinds == ["AllBlocksCleared"]


def random_texts(endpoint: str, gateway: Gateway, seed: int) -> None:
    """Blocks come and go, some texts have a salt, and of texts that are computed twice one copy is told."""
    drawn = random.Random(seed)
    pool, salted, begins = BlockPool(12, 2), set(), {}
    pool.events = KvEvents(endpoint, Gateway.topic.decode(), 2)
    texts = [[drawn.randrange(2) for _ in range(drawn.randint(2, 12))] for _ in range(6)]
    tables: list[BlockTable] = []
    for _ in range(60):
        text, salt = drawn.choice(texts), drawn.choice(("", "", "other"))
        table = BlockTable()
        if drawn.random() < 0.6 and (found := pool.find(text, salt)):
            pool.take_over(table, found)
        if pool.can_reserve(table, len(text)):
            pool.reserve(table, len(text))
            tables.append(table)
            pool.publish(table, text, salt)
            salted |= {*table.hashes} if salt else set()
            begins |= {each[-8:]: text[: 2 * end] for end, each in enumerate(table.hashes, start=1)}
        else:
            pool.release(table)
        while tables and drawn.random() < 0.5:
            pool.release(tables.pop(drawn.randrange(len(tables))))
        if drawn.random() < 0.05:
            pool, tables = pool.fresh(), []
        assert pool.events is not None
        if pool.events._events:
            pool.events.send()
            gateway.read(1)
        told = {int.from_bytes(each[-8:], "big") for each in pool._block_of.keys() - salted}
        assert {*gateway.texts} == told
    known = [(each, text) for each, text in gateway.texts.items() if -1 not in text]
    assert all(begins[each.to_bytes(8, "big")] == text for each, text in known)
    assert {"BlockStored", "BlockRemoved"} <= {*gateway.kinds}


@pytest.mark.parametrize("seed", range(20))
def test_random_texts_in_a_small_pool(endpoint: str, gateway: Gateway, seed: int) -> None:
    random_texts(endpoint, gateway, seed)


def many_random_texts(endpoint: str, gateway: Gateway) -> None:
    for seed in range(20):
        gateway.next = 0
        random_texts(endpoint, gateway, seed)


def _fresh(self: BlockPool) -> BlockPool:
    fresh = BlockPool(self.num_blocks, self.block_size)
    fresh.events = self.events
    return fresh


stored = KvEvents.stored
BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "removals are not told": lambda patch: patch.setattr(KvEvents, "removed", lambda *_: None),
    "a new pool is not told": lambda patch: patch.setattr(BlockPool, "fresh", _fresh),
    "parents are not told": lambda patch: patch.setattr(
        KvEvents, "stored", lambda self, chain, ids: stored(self, chain[-1:], ids)
    ),
    "blocks are told twice": lambda patch: patch.setattr(
        KvEvents, "stored", lambda self, chain, ids: (stored(self, chain, ids), stored(self, chain, ids))
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_noticed(
    endpoint: str, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    BUGS[bug](monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        many_random_texts(endpoint, gateway)


def test_what_cannot_be_told_is_refused(models: Models, endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="kv_events_endpoint: nonsense cannot be used"):
        make_engine(models.target, None, kv_events_endpoint="nonsense")
    core = make_engine(models.target, None, kv_events_endpoint=endpoint)
    with pytest.raises(ModelLoadError, match="Address already in use"):
        make_engine(models.target, None, kv_events_endpoint=endpoint)
    assert core.scheduler.target_pool.events is not None
    with pytest.raises(ValueError, match="prefix_caching keeps"):
        make_engine(models.target, None, kv_events_endpoint=endpoint, prefix_caching=False)
    save_random(tmp_path, "qwen3_5_text", {**delta_net(2, 2, 4), "vocab_size": 16})
    with pytest.raises(ModelLoadError, match="can begin with any blocks"):
        make_engine(str(tmp_path), None, kv_events_endpoint=f"{endpoint}-hybrid")
    with pytest.raises(ModelLoadError, match="can begin with any blocks"):
        _serve_vectors(
            EngineConfig(target=models.target, **telling(endpoint)),
            "embed",
            cast(Connection, SimpleNamespace(send=lambda message: None)),
            Heartbeats(),
        )

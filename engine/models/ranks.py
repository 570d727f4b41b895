"""Serves a target that several processes compute together: rank 0 leads, and the others follow.

Rank 0 is the engine. It schedules, drafts, adjusts, draws and judges, and before each pass of the target it
tells the others which tokens come where; they compute their share of the same pass over their own caches.
Draft models and heads are rank 0's alone. All ranks load by the same steps, each its own share.
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias
from weakref import finalize

import msgspec
import torch

from truedraft.engine.config import EngineConfig
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.machine.lifeline import PARENT_VARIABLE
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import KVCache
from truedraft.engine.models.base import ForwardOutput
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions, load_options
from truedraft.engine.native.threads import set_num_threads, usual_num_threads
from truedraft.engine.parallel.group import PASS_SECONDS, Group, RankLostError, Ranks, check_same

FOLLOWER = ("-P", "-m", "truedraft.engine.process.follower")
# A rank that has lost another one waits this long for its end, which says why.
END_SECONDS, POLL_SECONDS = 2.0, 0.05


class NewCache(msgspec.Struct, tag=True, array_like=True):
    """Asks for a cache, which later messages call by its ``number``; ``sizes`` are those of a
    ``KVCache``."""

    number: int
    sizes: list[int]


class CopyState(msgspec.Struct, tag=True, array_like=True):
    """Asks to copy one state slot to another."""

    cache: int
    source: int
    target: int


class Forget(msgspec.Struct, tag=True, array_like=True):
    """Asks to return the memory of a cache to the system."""

    cache: int


class SpanNumbers(msgspec.Struct, array_like=True):
    """Is a ``Span``; ``table`` has the attributes of its block table."""

    table: dict[str, Any]
    token_ids: list[int]
    num_logits: int
    num_certain_tokens: int | None


class Pass(msgspec.Struct, tag=True, array_like=True):
    """Asks for a pass over ``spans``. It is the pass ``number`` since the start; ``dropped`` caches are not
    needed any more."""

    number: int
    cache: int
    spans: list[SpanNumbers]
    dropped: list[int]


ToFollower: TypeAlias = NewCache | CopyState | Forget | Pass
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ToFollower).decode


class Followers:
    """Has the processes of the other ranks, as rank 0 sees them."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.size = config.tensor_parallel_size
        self._folder = tempfile.TemporaryDirectory(prefix="truedraft-ranks-")
        self._meeting = str(Path(self._folder.name) / "meeting")
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        for rank in range(1, self.size):
            ours, theirs = socket.socketpair()
            with theirs:
                self.start(rank, theirs)
            self._connections.append(Connection(ours.detach()))

    def start(self, rank: int, theirs: socket.socket) -> None:
        """Starts a process that computes as ``rank``, with its end of a connection."""
        given = {"socket": theirs.fileno(), "rank": rank, "meeting": self._meeting}
        named = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        # The kernel takes the end of the thread that starts a process for the end of its parent.
        tied = ["--tied"] if threading.current_thread() is threading.main_thread() else []
        process = subprocess.Popen(
            [sys.executable, *FOLLOWER, *named, *tied, "--config", self.config.model_dump_json()],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
        )
        self.processes.append(process)

    def meet(self, device: torch.device) -> Group:
        """Returns the group once all ranks have come to meet."""
        with _Explained(self):
            for connection in self._connections:
                while not connection.poll(POLL_SECONDS):
                    if (fault := self.fault()) is not None:
                        raise RankLostError(fault)
                connection.recv_bytes()
        # The folder stays until the end: others may still read there what they need to find each other.
        return Ranks(0, self.size, self._meeting, device)

    def send(self, message: ToFollower) -> int:
        """Sends a message to all; returns a number that tells it from others."""
        data = _encode(message)
        with _Explained(self):
            for connection in self._connections:
                connection.send_bytes(data)
        return zlib.crc32(data)

    def fault(self) -> str | None:
        """Says which rank has ended, and how, if one has."""
        for rank, process in enumerate(self.processes, start=1):
            if (code := process.poll()) is not None:
                how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
                return f"rank {rank} of {self.size} {how}"
        return None

    def lost(self, error: Exception) -> RankLostError:
        """Returns an error with the reason for ``error``, after waiting for it."""
        until = time.monotonic() + END_SECONDS
        while (fault := self.fault()) is None and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return RankLostError(fault or str(error))

    def close(self) -> None:
        """Lets the followers end, which have nothing to do without rank 0."""
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()  # It may wait for a rank that will not come; it has nothing to save.
            process.wait()
        self._folder.cleanup()


class _Explained:
    """Turns broken connections and lost ranks into a ``RankLostError`` with the reason."""

    def __init__(self, followers: Followers) -> None:
        self.followers = followers

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError | EOFError | RankLostError):
            raise self.followers.lost(error) from error


class LeadingCache(KVCache):
    """Is rank 0's part of a cache: what is done to it, is done to the others' parts."""

    def __init__(self, model: "LeadingDecoder", *sizes: int) -> None:
        self.followers = model.followers
        self.number = model.next_cache()
        self.followers.send(NewCache(self.number, [*sizes]))
        finalize(self, model.dropped.append, self.number)
        super().__init__(model.caches, *sizes)

    def shared(self, places: Sequence[int]) -> KVCache:
        raise ModelLoadError(
            "a draft that reads the target's own keys and values cannot read those of other ranks: set "
            "tensor_parallel_size to 1, or take another draft"
        )

    def copy_state(self, source: int, target: int) -> None:
        self.followers.send(CopyState(self.number, source, target))
        super().copy_state(source, target)

    def forget(self) -> None:
        self.followers.send(Forget(self.number))
        super().forget()


class LeadingDecoder(FusedDecoder):
    """Is rank 0's share of a loaded ``model``; ``followers`` compute theirs."""

    def __init__(self, model: FusedDecoder, followers: Followers, group: Group) -> None:
        super().__init__(model.facts, model.weights, model.begin)
        self.keep_cache_in(model.cache_dtype)
        self.followers = followers
        self.group = group
        self.dropped: list[int] = []
        self._num_caches = self._num_passes = 0

    def next_cache(self) -> int:
        """Returns the number of another cache."""
        self._num_caches += 1
        return self._num_caches

    def make_cache(
        self, num_blocks: int, block_size: int, num_state_slots: int, num_window_blocks: int | None = None
    ) -> KVCache:
        assert num_window_blocks is None, "layers with a window have the blocks of the others"
        return LeadingCache(self, num_blocks, block_size, num_state_slots)

    def forward(
        self,
        spans: list[Span],
        cache: KVCache,
        ids_on_device: torch.Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> ForwardOutput:
        assert isinstance(cache, LeadingCache)
        ids = [span.token_ids for span in spans]
        if ids_on_device is not None:
            drawn = torch.split(ids_on_device, [len(each) for each in ids])
            ids = [each.tolist() for each in drawn]
        numbers = [_numbers(span, of_span) for span, of_span in zip(spans, ids, strict=True)]
        dropped, self.dropped[:] = [*self.dropped], []
        self._num_passes += 1
        with _Explained(self.followers):
            told = self.followers.send(Pass(self._num_passes, cache.number, numbers, dropped))
            check_same(self.group, told, self.device)
            return super().forward(spans, cache, ids_on_device, taps)


def _numbers(span: Span, token_ids: list[int]) -> SpanNumbers:
    """Returns a span for a message. Hashes are the block pool's, which is rank 0's alone."""
    table = {name: value for name, value in vars(span.table).items() if name != "hashes"}
    return SpanNumbers(table, token_ids, span.num_logits, span.num_certain_tokens)


def _span(numbers: SpanNumbers) -> Span:
    table = BlockTable()
    vars(table).update(numbers.table)
    return Span(table, numbers.token_ids, numbers.num_logits, numbers.num_certain_tokens)


def load_ranked(
    config: EngineConfig, start: Callable[[EngineConfig], Followers] = Followers
) -> LeadingDecoder:
    """Loads the target, a share of which is in each of ``tensor_parallel_size`` processes, with this one as
    rank 0."""
    check_ranks(config)
    followers = start(config)
    try:
        options = _options(config, 0)
        with _Explained(followers):
            group = followers.meet(options.device)
            model = _load(config, options, group)
    except BaseException:
        followers.close()
        raise
    group.seconds = PASS_SECONDS
    return LeadingDecoder(model, followers, group)


def check_ranks(config: EngineConfig) -> None:
    """Raises ``ModelLoadError`` for settings that ranks cannot honour."""
    refused = {
        "lora_modules": bool(config.lora_modules),
        "allow_lora_updating": config.allow_lora_updating,
        "prefix_cache_dir": config.prefix_cache_dir is not None,
        "device_map": config.device_map is not None,
    }
    for name, is_set in refused.items():
        if is_set:
            raise ModelLoadError(
                f"tensor_parallel_size is {config.tensor_parallel_size}, and {name} is for a model in one "
                "process: leave out one of them"
            )


def follow(
    config: EngineConfig, rank: int, connection: Connection, meet: Callable[[torch.device], Group]
) -> None:
    """Loads the share of ``rank``, and computes passes until rank 0 is gone."""
    options = _options(config, rank)
    connection.send_bytes(b"")
    group = meet(options.device)
    model = _load(config, options, group)
    group.seconds = PASS_SECONDS
    caches: dict[int, KVCache] = {}
    with suppress(EOFError):
        while True:
            _obey(connection.recv_bytes(), model, group, caches)


@torch.inference_mode()
def _obey(data: bytes, model: FusedDecoder, group: Group, caches: dict[int, KVCache]) -> None:
    match message := _decode(data):
        case NewCache():
            caches[message.number] = KVCache(model.caches, *message.sizes)
        case CopyState():
            caches[message.cache].copy_state(message.source, message.target)
        case Forget():
            caches[message.cache].forget()
        case Pass():
            for number in message.dropped:
                del caches[number]
            check_same(group, zlib.crc32(data), model.device)
            model.forward([_span(numbers) for numbers in message.spans], caches[message.cache])


def _options(config: EngineConfig, rank: int) -> LoadOptions:
    """Returns the options without a group, and sets the number of threads: ranks share a machine."""
    options = load_options(config)
    set_num_threads(max(1, (config.num_threads or usual_num_threads()) // config.tensor_parallel_size))
    if options.device.type == "cuda":
        device = torch.device("cuda", (options.device.index or 0) + rank)
        torch.cuda.set_device(device)
        return replace(options, device=device)
    return options


def _load(config: EngineConfig, options: LoadOptions, group: Group) -> FusedDecoder:
    assert config.target is not None
    model = load_model(config.target, replace(options, group=group))
    assert isinstance(model, FusedDecoder)
    return model

"""Runs the ranks of a model as threads of the test's process, in place of processes that meet over gloo."""

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from truedraft.engine.config import EngineConfig
from truedraft.engine.models.ranks import Followers, follow
from truedraft.engine.parallel.group import Group, RankLostError

Result = TypeVar("Result")
# No test waits as long as this unless it fails.
SECONDS = 120


class Place:
    """Is where threads gather."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size)


class ThreadGroup:
    """Is a ``Group``."""

    def __init__(self, rank: int, place: Place) -> None:
        self.rank = rank
        self.size = place.size
        self.seconds = float(SECONDS)
        self.place = place

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        place = self.place
        try:
            place.parts[self.rank] = x
            place.barrier.wait(SECONDS)
            if len({(part.shape, part.dtype) for part in place.parts}) > 1:
                raise RankLostError("ranks gather different numbers")
            gathered = torch.cat(place.parts, 1)
            place.barrier.wait(SECONDS)
        except threading.BrokenBarrierError as error:
            raise RankLostError("a rank has ended") from error
        except RankLostError:
            place.barrier.abort()
            raise
        return gathered


def on_ranks(size: int, compute: Callable[[Group], Result]) -> list[Result]:
    """Returns what ``compute`` returns for each rank; a failing one fails all."""
    place = Place(size)

    def run(rank: int) -> Result:
        try:
            return compute(ThreadGroup(rank, place))
        except BaseException:
            place.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        failures = [failure for future in futures if (failure := future.exception()) is not None]
    for failure in sorted(failures, key=lambda failure: isinstance(failure, RankLostError)):
        raise failure
    return [future.result() for future in futures]


class ThreadFollowers(Followers):
    """Has threads in place of processes."""

    def __init__(self, config: EngineConfig) -> None:
        self.place = Place(config.tensor_parallel_size)
        self.threads: list[threading.Thread] = []
        super().__init__(config)

    def start(self, rank: int, theirs: socket.socket) -> None:
        connection = Connection(os.dup(theirs.fileno()))
        self.threads.append(threading.Thread(target=self._follow, args=(rank, connection), daemon=True))
        self.threads[-1].start()

    def _follow(self, rank: int, connection: Connection) -> None:
        try:
            follow(self.config, rank, connection, lambda device: ThreadGroup(rank, self.place))
        except Exception:  # Rank 0 notices that this one has ended, as it would of a process.
            pass
        finally:
            self.place.barrier.abort()
            connection.close()

    def meet(self, device: torch.device) -> Group:
        for connection in self._connections:
            connection.recv_bytes()
        return ThreadGroup(0, self.place)

    def close(self) -> None:
        super().close()
        for thread in self.threads:
            thread.join(SECONDS)

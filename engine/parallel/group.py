"""Connects the processes that compute one model together, its ranks.

Ranks gather, and never add: each computes some outputs of a layer whole, from all of its inputs. So the order
in which ranks answer and the way in which numbers travel change no bit, and any number of ranks computes what
one process does.
"""

import os
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# Ranks load at their own speed, and then compute pass by pass: one that takes longer than this has died or
# hangs.
LOAD_SECONDS, PASS_SECONDS = 900.0, 30.0


class RankLostError(Exception):
    """Another rank has died, has not answered in time, or has computed another pass."""


class Group(Protocol):
    """Is the ranks as one of them sees them: it has the number ``rank`` among ``size``."""

    rank: int
    size: int
    seconds: float  # the longest wait for another rank

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [rows, size * columns]: ``x`` [rows, columns] of each rank, in the order of the ranks."""
        ...


class Ranks:
    """Is the group of processes on one machine that meet at the file ``meeting``. Those of a GPU each have
    one, over NCCL, which has never run: no machine with two was at hand."""

    def __init__(self, rank: int, size: int, meeting: str, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.seconds = LOAD_SECONDS
        store, limit = dist.FileStore(meeting, size), timedelta(seconds=LOAD_SECONDS)
        if device.type == "cuda":
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._backend: c10d.ProcessGroup = c10d.ProcessGroupNCCL(store, rank, size, options)
        else:
            # The name of a container's host may have no address; ranks are on one machine.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            self._backend = c10d.ProcessGroupGloo(store, rank, size, limit)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        found = x.new_empty(self.size, rows, columns)
        if rows:
            options = c10d.AllgatherOptions()
            options.timeout = timedelta(seconds=self.seconds)
            try:
                self._backend.allgather([list(found.unbind(0))], [x.contiguous()], options).wait()
            except RuntimeError as error:
                raise RankLostError(f"a rank has ended, or was silent for {self.seconds:g} s") from error
        return found.transpose(0, 1).reshape(rows, self.size * columns)


def is_agreed(group: Group | None, said: bool, device: torch.device) -> bool:
    """Tells whether all ranks say so: what they decide alike cannot part them."""
    return said if group is None else bool(group.gather(torch.tensor([[said]], device=device)).all())


def check_same(group: Group, number: int, device: torch.device) -> None:
    """Raises ``RankLostError`` unless all ranks have the same number."""
    numbers = group.gather(torch.tensor([[number]], device=device))
    if not bool((numbers == number).all()):
        raise RankLostError("ranks have begun different passes")

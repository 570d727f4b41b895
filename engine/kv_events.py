"""Tells gateways over ZeroMQ which tokens a worker's cache holds, in the form of vLLM 0.26.

A message has three frames: a topic, its number in 8 bytes, and a batch in msgpack, ``[time, events, 0]``. An
event is a map with a ``type``. Hashes are numbers of 64 bits. Texts with a salt belong to one user alone, so
nothing is told of them.
"""

import time
import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.memory.block_table import BlockHash
from truedraft.engine.memory.identities import FIRST_IDENTITY

# Up to this many messages wait for a slow subscriber; further ones are dropped, and their numbers are
# missing.
MOST_WAITING = 100_000


class KvEvents:
    """Collects the events of a pool of blocks, and sends them once a step has ended. The first event clears
    whatever a subscriber knows of an earlier worker."""

    def __init__(self, endpoint: str, topic: str, block_size: int) -> None:
        self._block_size = block_size
        self._topic = topic.encode()
        self._socket = _socket(endpoint)
        weakref.finalize(self, self._socket.close)
        self._numbers = count()
        self._told: set[BlockHash] = set()
        self._events: list[dict[str, Any]] = []
        self.cleared()

    def stored(self, chain: Sequence[BlockHash], token_ids: Sequence[int]) -> None:
        """Notes that the last block of ``chain`` can be found from now on; it follows the one before it, or
        begins a text. Tokens of a picture mean nothing to a gateway: nothing is told of them, nor of what
        follows them."""
        if max(token_ids) >= FIRST_IDENTITY or not self._told.issuperset(chain[:-1]):
            return
        self._told.add(chain[-1])
        *before, number = map(_number, chain)
        last = self._events[-1] if self._events else {}
        if last.get("type") == "BlockStored" and before == last["block_hashes"][-1:]:
            last["block_hashes"].append(number)
            last["token_ids"] += token_ids
            return
        event = {"block_hashes": [number], "parent_block_hash": before[0] if before else None}
        event |= {"token_ids": [*token_ids], "block_size": self._block_size}
        # The medium is vLLM's word for the cache itself, whatever the device.
        self._events.append(
            {"type": "BlockStored"} | event | {"lora_id": None, "medium": "GPU", "lora_name": None}
        )

    def removed(self, block_hash: BlockHash) -> None:
        """Notes a block that cannot be found any more."""
        if block_hash in self._told:
            self._told.remove(block_hash)
            if not self._events or self._events[-1]["type"] != "BlockRemoved":
                self._events.append({"type": "BlockRemoved", "block_hashes": [], "medium": "GPU"})
            self._events[-1]["block_hashes"].append(_number(block_hash))

    def cleared(self) -> None:
        """Notes that no block can be found any more."""
        self._told.clear()
        self._events = [{"type": "AllBlocksCleared"}]

    def send(self) -> None:
        """Sends the collected events, if there are any; never waits for subscribers."""
        if self._events:
            batch = msgspec.msgpack.encode([time.time(), self._events, 0])
            self._socket.send_multipart([self._topic, next(self._numbers).to_bytes(8, "big"), batch])
            self._events = []


def _number(block_hash: BlockHash) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def _socket(endpoint: str) -> Any:
    """Binds where vLLM would bind: an address with ``*`` or ``::``, ipc and inproc; others are connected."""
    try:
        import zmq
    except ImportError as error:
        raise ModelLoadError("kv_events_endpoint needs pyzmq, of the extra 'kv-events'") from error
    socket: Any = zmq.Context.instance().socket(zmq.PUB)
    socket.set_hwm(MOST_WAITING)
    socket.linger, socket.ipv6 = 0, "::" in endpoint
    binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    try:
        (socket.bind if binds else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise ModelLoadError(f"kv_events_endpoint: {endpoint} cannot be used: {error}") from error
    return socket

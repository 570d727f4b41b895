"""Stores keys and values of every layer by slot; blocks stand for tensors here.

Slot = block id * block size + offset. The block manager decides which slots belong to whom; this module
stores and gathers. A model's layers are probed once, so any architecture's shapes fit. A cache in int8 keeps
the scale of each head after its numbers: whatever copies or saves a block's bytes has both. Layers with a
running state have no keys and values, but a state of each sequence in a slot of another kind.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TypeAlias

import torch

from truedraft.engine.memory.huge_pages import HugePages
from truedraft.engine.memory.recurrent_state import LayerState, RecurrentCache


@dataclass(frozen=True, slots=True)
class AttentionCache:
    """Describes what one layer of attention stores for each token, its type, and the layer's device.
    ``window`` is the number of tokens that a token looks at, itself included; None: all before it."""

    key: tuple[int, int]  # [kv heads, key size]
    value: tuple[int, int] | None  # [kv heads, value size], or None: the values are the keys
    dtype: torch.dtype
    device: torch.device
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        kept = self.key, self.value or NOTHING
        return sum(heads * stored_size(size, self.dtype) for heads, size in kept) * self.dtype.itemsize


# One layer stores this for each token, or for each sequence.
CacheSpec: TypeAlias = AttentionCache | RecurrentCache
NOTHING = 0, 0


# A head's numbers in int8 are multiples of its largest one's 127th part, a float32 number that follows them.
SCALE_BYTES, MOST = 4, 127


def stored_size(size: int, dtype: torch.dtype) -> int:
    """Returns how many numbers of ``dtype`` a head of ``size`` takes."""
    return size + SCALE_BYTES if dtype == torch.int8 and size else size


def quantised(x: torch.Tensor) -> torch.Tensor:
    """Returns what a cache in int8 keeps of heads [..., size]. Where one number of a head is not finite, its
    scale is not finite either, and so is no number of it that is read."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) * (1 / MOST)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    is_usual = scales.isfinite() & (scales > 0)
    numbers = torch.where(is_usual, x * scales.reciprocal(), 0.0).round().to(torch.int8)
    return torch.cat((numbers, scales.view(torch.int8)), -1)


def widened(kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns in ``dtype`` what a cache has kept."""
    if kept.dtype != torch.int8:
        return kept.to(dtype)
    numbers, scales = kept.split_with_sizes((kept.shape[-1] - SCALE_BYTES, SCALE_BYTES), -1)
    return (numbers * scales.contiguous().view(torch.float32)).to(dtype)


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds ``x``; a finite number that is too large for ``dtype`` becomes the largest that it has."""
    rounded, largest = x.to(dtype), torch.finfo(dtype).max
    return torch.where(rounded.isinf() & x.isfinite(), rounded.clamp(-largest, largest), rounded)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Holds tensors as bytes, each of which has the same ``number`` of pieces: one piece of each belong
    together."""

    number: int
    tensors: list[memoryview]

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of a piece in all tensors."""
        return sum(len(tensor) // self.number for tensor in self.tensors)

    def parts(self, piece: int) -> list[memoryview]:
        """Returns the bytes of one piece, which may be written to."""
        sizes = [len(tensor) // self.number for tensor in self.tensors]
        return [
            tensor[piece * size : (piece + 1) * size]
            for tensor, size in zip(self.tensors, sizes, strict=True)
        ]

    def store(self, piece: int, data: memoryview) -> None:
        """Writes the bytes of one piece, in the order of ``parts``."""
        start = 0
        for part in self.parts(piece):
            part[:] = data[start : start + len(part)]
            start += len(part)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


# This much of a cache on a CPU is written to at start. The system clears a page of memory when it is first
# written to, which would take the first requests milliseconds; most of a large cache is never used.
TOUCHED_BYTES = 64 << 20


class KVCache:
    """Holds keys and values of one model: for each layer two tensors [slots, kv heads, ``stored_size``], or
    one that serves as both. ``states`` are those of its recurrent layers, by their index, with
    ``num_state_slots`` each. Layers with a window have ``num_window_blocks`` of their own, or else the same
    blocks as all."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_blocks: int,
        block_size: int,
        num_state_slots: int = 0,
        num_window_blocks: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_window_blocks = num_window_blocks
        self.has_window = [isinstance(spec, AttentionCache) and spec.window is not None for spec in specs]
        # Memory is zeroed, not empty: masked slots are multiplied by zero, which does not silence a NaN.
        self._pages = HugePages()
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.states: dict[int, LayerState] = {}
        for layer, spec in enumerate(specs):
            key, dtype = NOTHING, torch.float32
            num_slots = self.blocks_of(layer) * block_size
            value: tuple[int, int] | None = NOTHING
            if isinstance(spec, AttentionCache):
                dtype = spec.dtype
                key = spec.key[0], stored_size(spec.key[1], dtype)
                value = None if spec.value is None else (spec.value[0], stored_size(spec.value[1], dtype))
            else:
                self.states[layer] = LayerState.zeros(spec, num_state_slots, self._pages)
            self.keys.append(self._pages.zeros(num_slots, *key, dtype=dtype, device=spec.device))
            if value is None:
                self.values.append(self.keys[-1])
            else:
                self.values.append(self._pages.zeros(num_slots, *value, dtype=dtype, device=spec.device))
        self._touch()
        self._by_head = [
            (keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
            for keys, values in zip(self.keys, self.values, strict=True)
        ]

    def shared(self, places: Sequence[int]) -> "KVCache":
        """Returns a cache with a layer for each of ``places``, the layers of this cache in which they are
        kept: layers with the same place overwrite each other."""
        made = copy(self)
        made.keys, made.values = (
            [self.keys[place] for place in places],
            [self.values[place] for place in places],
        )
        made._by_head = [self._by_head[place] for place in places]
        made.has_window = [self.has_window[place] for place in places]
        return made

    def has_own_blocks(self, layer: int) -> bool:
        """Tells whether a layer's blocks are those of layers with a window."""
        return self.num_window_blocks is not None and self.has_window[layer]

    def blocks_of(self, layer: int) -> int:
        """Returns the number of blocks that a layer has."""
        own = self.num_window_blocks
        return self.num_blocks if own is None or not self.has_window[layer] else own

    def _tensors(self, own_blocks: bool | None = None) -> list[torch.Tensor]:
        """Returns all keys, and the values that are not the keys, of layers that have their own blocks or of
        those that have not; None: of both."""
        found = [
            (keys, values)
            for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True))
            if own_blocks is None or own_blocks == self.has_own_blocks(layer)
        ]
        return [keys for keys, _ in found] + [values for keys, values in found if values is not keys]

    def _touch(self) -> None:
        """Writes to the first slots, which are the first to be used (``BlockPool``)."""
        tensors = [tensor for tensor in self._tensors() if tensor.device.type == "cpu"]
        size = sum(tensor.nbytes for tensor in tensors)
        for tensor in tensors:
            tensor[: -(-len(tensor) * TOUCHED_BYTES // max(size, TOUCHED_BYTES))].zero_()

    def forget(self) -> None:
        """Zeroes the caches and returns their memory to the system, after measurements. Rows that are
        measured together are stored far apart, so a few tokens of each take pages in every layer."""
        self._pages.discard()
        self._touch()

    def bytes_of_blocks(self, own_blocks: bool = False) -> "Pieces":
        """Returns what layers of attention hold, block by block: those that have their own blocks, or the
        others; on a CPU only."""
        tensors = [tensor for tensor in self._tensors(own_blocks) if tensor.nbytes]
        number = (self.num_window_blocks or 0) if own_blocks else self.num_blocks
        return Pieces(number, [_bytes_of(tensor) for tensor in tensors])

    def bytes_of_slots(self) -> "Pieces":
        """Returns what the recurrent layers hold, slot by slot; on a CPU only."""
        tensors = [tensor for layer in self.states.values() for tensor in layer.tensors if tensor.nbytes]
        return Pieces(len(tensors[0]) if tensors else 0, [_bytes_of(tensor) for tensor in tensors])

    def copy_state(self, source: int, target: int) -> None:
        """Copies one state slot to another."""
        for layer in self.states.values():
            for tensor in layer.tensors:
                tensor[target].copy_(tensor[source])

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def clear(self, block_ids: list[int], own_blocks: bool = False) -> None:
        """Writes zeros to these blocks, in layers that have their own or in the others. Memory that was never
        written to is read faster, as it is all one page."""
        for tensor in self._tensors(own_blocks):
            blocks = len(tensor) // self.block_size, self.block_size
            tensor.view(*blocks, *tensor.shape[1:])[block_ids] = 0

    def value_size(self, layer: int) -> int:
        values = self.values[layer]
        return values.shape[-1] - (SCALE_BYTES if values.dtype == torch.int8 else 0)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores ``key`` and ``value`` [tokens, kv heads, size] at ``slots`` [tokens]."""
        pairs = [(self.keys[layer], key)]
        if self.values[layer] is not self.keys[layer]:
            pairs.append((self.values[layer], value))
        for cached, new in pairs:
            if cached.dtype == torch.int8:
                new = quantised(new)
            elif new.dtype != cached.dtype:
                new = narrowed(new, cached.dtype)
            cached.index_copy_(0, slots, new)

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values [slots, kv heads, size] of ``slots`` as they are kept, contiguous."""
        return self.keys[layer].index_select(0, slots), self.values[layer].index_select(0, slots)

    def run(self, layer: int, first: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values [1, kv heads, num_slots, size] of the slots from ``first`` on, as views of
        what is kept."""
        keys, values = self._by_head[layer]
        return keys.narrow(2, first, num_slots), values.narrow(2, first, num_slots)

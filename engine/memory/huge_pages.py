"""Allocates zeros in huge pages, where Linux has them, for weights and caches that a CPU reads over and over.

The processor looks up where each page lies, and remembers some lookups: too few for pages of 4 KB, enough for
pages of 2 MB.
"""

import ctypes
import math
import mmap
from weakref import WeakSet

import torch

CPU = torch.device("cpu")
PAGE_BYTES = 2 << 20
# Tensors share chunks. Parts of a chunk that are never written to take no memory.
CHUNK_BYTES = 64 << 20
# Tensors start at cache lines.
ALIGNMENT = 64


class HugePages:
    """Makes tensors, one after the other. A chunk is given back when the last of its tensors is gone."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._start = self._end = 0
        self._chunks: WeakSet[mmap.mmap] = WeakSet()

    def zeros(self, *shape: int, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
        """Returns ``torch.zeros`` in huge pages, or ordinary ones on other devices and where huge pages are
        not available."""
        count = math.prod(shape)
        size = -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if device.type != "cpu" or count == 0 or not self._make_room(size):
            return torch.zeros(shape, dtype=dtype, device=device)
        assert self._chunk is not None
        flat = torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=self._start)
        self._start += size
        return flat.view(shape)

    def discard(self) -> None:
        """Gives back the memory of all tensors in huge pages: they are zeros again."""
        for chunk in self._chunks:
            chunk.madvise(mmap.MADV_DONTNEED)

    def _make_room(self, size: int) -> bool:
        """Tells whether this many bytes are left in the chunk, or in a new one."""
        if self._start + size <= self._end:
            return True
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return False
        length = max(size, CHUNK_BYTES) + PAGE_BYTES
        try:
            chunk = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            chunk.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return False
        self._chunks.add(chunk)
        address = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
        self._chunk, self._start, self._end = chunk, -address % PAGE_BYTES, length
        return True

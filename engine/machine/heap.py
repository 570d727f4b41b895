"""Reads how much memory the C library has handed out, and lets it return freed memory to the system."""

import ctypes
from functools import cache


class _Mallinfo(ctypes.Structure):
    """Has the fields of glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@cache
def _mallinfo() -> "ctypes._NamedFuncPointer | None":
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is not None:
        read.restype = _Mallinfo
    return read


def heap_in_use() -> int | None:
    """Returns the bytes that the main thread has allocated and not freed; None where the C library does not
    say. They bound the memory of native code whose use cannot be measured."""
    read = _mallinfo()
    if read is None:
        return None
    counts = read()
    return int(counts.uordblks) + int(counts.hblkhd)


def trim_heap() -> None:
    """Returns freed memory to the system: glibc keeps it for later allocations, gigabytes after loading a
    model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

"""Turns tensors and arrays into addresses; no other module does. C and Rust get what they read, or nothing.

They know neither how long an array is, nor its type, nor its device. A bfloat16 tensor in place of a float32
one of the same shape has half the bytes: whoever writes it destroys the heap. The caller therefore says here
which type and shape the other side assumes. That takes half a microsecond. Weights and caches never move, so
their addresses are taken once and kept with them.
"""

from array import array
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

NUMPY_TYPES = {torch.int64: np.dtype(np.int64), torch.uint8: np.dtype(np.uint8)}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TYPECODES = {torch.int64: "q", torch.int32: "i", torch.float32: "f", torch.float64: "d"}

CPU = torch.device("cpu")
Values: TypeAlias = "torch.Tensor | npt.NDArray[Any] | array[Any]"


class PointerError(TypeError):
    """A value for C does not have the type or shape that C reads. That is a defect of this package."""


def address(values: Values, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Returns the address of the first number of ``values``, which must have this type and shape and be
    row-major, aligned and in the host's memory. The address is valid for as long as the caller keeps
    ``values``; that of an empty array may be 0."""
    start = None
    if isinstance(values, torch.Tensor):
        if values.shape == shape and _is_plain(values, dtype):
            start = values.data_ptr()
    elif isinstance(values, np.ndarray):
        if values.dtype == NUMPY_TYPES.get(dtype) and values.shape == shape and values.flags.c_contiguous:
            start = int(values.ctypes.data)
    elif isinstance(values, array) and values.typecode == TYPECODES.get(dtype) and (len(values),) == shape:
        start = values.buffer_info()[0]
    # The address is 0 for a tensor that only stands for another, and for one whose memory was given back.
    if start is not None and start % dtype.itemsize == 0 and (start or 0 in shape):
        return start
    raise PointerError(f"C reads {dtype} {list(shape)}, contiguous and on the CPU, not {_in_words(values)}")


def device_address(values: torch.Tensor) -> int:
    """Returns the address of the first number on its own device, for tables that kernels in Triton read. The
    caller passes the numbers' type to the kernels, and keeps the tensor."""
    if values.layout is torch.strided and values.is_contiguous() and not values.is_neg():
        return values.data_ptr()
    raise PointerError(f"kernels read row-major numbers, not {_in_words(values)}")


def _is_plain(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tells whether the host's memory has the numbers themselves, of this type and row-major."""
    is_dense = values.layout is torch.strided and values.is_contiguous()
    return is_dense and values.dtype is dtype and values.is_cpu and not values.is_neg()


def new(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Returns a tensor for C to fill, and its address; such a tensor needs no check."""
    values = torch.empty(shape, dtype=dtype, device=CPU)
    return values, values.data_ptr()


def as_floats(values: torch.Tensor) -> torch.Tensor:
    """Returns ``values`` in float32, contiguous. Types whose numbers need a scale are refused."""
    if values.dtype not in FLOATS:
        raise PointerError(f"C computes with floats, not {_in_words(values)}")
    return values.float().contiguous()


def shape_of(values: torch.Tensor, rank: int) -> tuple[int, ...]:
    """Returns the shape of a tensor, which has this many dimensions and no empty rows."""
    shape = tuple(values.shape)
    if len(shape) != rank or not shape[-1]:
        raise PointerError(f"C reads rows of numbers in {rank} dimensions, not {_in_words(values)}")
    return shape


def _in_words(values: object) -> str:
    if isinstance(values, torch.Tensor):
        strides = values.stride() if values.layout is torch.strided else values.layout
        return f"{values.dtype} {list(values.shape)} with the strides {strides} on {values.device}"
    if isinstance(values, np.ndarray):
        return f"{values.dtype} {list(values.shape)} with the strides {values.strides} in bytes"
    if isinstance(values, array):
        return f"an array of {len(values)} numbers of the type {values.typecode!r}"
    return f"a {type(values).__name__}"

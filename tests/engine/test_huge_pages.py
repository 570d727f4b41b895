"""Tensors in huge pages: zeros of their own, and ``torch.zeros`` where there are no such pages."""

import gc
import mmap
import weakref
from typing import Any

import pytest
import torch

from truedraft.engine.memory import huge_pages
from truedraft.engine.memory.huge_pages import HugePages

has_huge_pages = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="not on Linux")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_zeros_of_their_own(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "CHUNK_BYTES", 40_000)
    pages = HugePages()
    # Odd sizes, one larger than a chunk, and more than a chunk together.
    shapes = [(3, 5, 7), (1,), (200, 33), (huge_pages.PAGE_BYTES, 2), (0, 4), (64, 64), (64, 64), (9, 9)]
    tensors = [pages.zeros(*shape, dtype=dtype) for shape in shapes]
    for i, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % huge_pages.ALIGNMENT == 0
        assert not tensor.any()
        tensor.fill_(i + 1)
    del pages
    gc.collect()
    for i, tensor in enumerate(tensors):
        assert (tensor == i + 1).all()


@has_huge_pages
def test_small_tensors_share_a_page() -> None:
    pages = HugePages()
    first, second = (pages.zeros(1000, dtype=torch.float32) for _ in range(2))
    assert first.data_ptr() % huge_pages.PAGE_BYTES == 0
    assert second.data_ptr() == first.data_ptr() + 4032


@has_huge_pages
def test_memory_is_given_back() -> None:
    pages = HugePages()
    first, second = (pages.zeros(1000, dtype=torch.float32) for _ in range(2))
    assert pages._chunk is not None
    chunk = weakref.ref(pages._chunk)
    del pages, first
    gc.collect()
    assert chunk() is not None
    del second
    gc.collect()
    assert chunk() is None


@has_huge_pages
def test_discarded_tensors_are_zeros_again() -> None:
    pages = HugePages()
    tensors = [pages.zeros(size, dtype=torch.float32) for size in (1000, huge_pages.PAGE_BYTES)]
    gone = pages.zeros(huge_pages.CHUNK_BYTES, dtype=torch.uint8)
    del gone  # Its chunk goes with it.
    for number in (1.0, 2.0):
        for tensor in tensors:
            assert not tensor.any()
            tensor.fill_(number)
        pages.discard()


class Refusing(mmap.mmap):
    def madvise(self, *arguments: int) -> None:
        raise OSError("the system was built without them")


@pytest.mark.parametrize("why", ["another system", "no memory", "refused"])
def test_without_huge_pages_it_is_torchs(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*arguments: Any, **options: Any) -> None:
        raise OSError("no memory")

    if why == "another system":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "mmap", no_memory if why == "no memory" else Refusing)
    pages = HugePages()
    tensor = pages.zeros(3, 4, dtype=torch.float16)
    assert torch.equal(tensor, torch.zeros(3, 4, dtype=torch.float16))
    assert pages._chunk is None


def test_other_devices_are_torchs() -> None:
    tensor = HugePages().zeros(2, 3, dtype=torch.float32, device=torch.device("meta"))
    assert tensor.device.type == "meta"
    assert tensor.shape == (2, 3)

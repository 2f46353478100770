"""Huge pages for large buffers in CPU memory, so that reading through them does not wait for address translation, and
their being there before they are written, since a kernel that writes to one first waits until it is found and cleared.
"""

import ctypes
import mmap

import torch

_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_POPULATE_WRITE = 23  # of Linux's mman.h, since 5.14


def use_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask for huge pages under a tensor that nothing has been written to yet, and return it.

    A wish, not a demand: where the kernel has none, or the tensor is small or on a GPU, nothing changes.
    """
    if tensor.device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(tensor, mmap.MADV_HUGEPAGE, _HUGE_PAGE_BYTES)
    return tensor


def populate(tensor: torch.Tensor) -> bool:
    """Have the memory under a tensor found and cleared where nothing has been written yet; what was written stays.
    False where the kernel cannot, or has none left."""
    return _advise(tensor, _MADV_POPULATE_WRITE, mmap.PAGESIZE)


def give_back(tensor: torch.Tensor) -> None:
    """The memory under a tensor of a CPU, and what is in it: when it is used again it is found, and cleared, anew."""
    _advise(tensor, mmap.MADV_DONTNEED, mmap.PAGESIZE)


def _advise(tensor: torch.Tensor, advice: int, page_bytes: int) -> bool:
    """Of the whole pages within the tensor."""
    start = -(-tensor.data_ptr() // page_bytes) * page_bytes
    num_bytes = (tensor.data_ptr() + tensor.nbytes - start) // page_bytes * page_bytes
    if num_bytes <= 0:
        return True
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(start, num_bytes, advice) == 0)

"""Huge pages for large buffers in CPU memory, so that reading through them does not wait for address translation."""

import ctypes
import mmap

import torch

_HUGE_PAGE_BYTES = 2 * 1024 * 1024


def use_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask for huge pages under a tensor that nothing has been written to yet, and return it.

    A wish, not a demand: where the kernel has none, or the tensor is small or on a GPU, nothing changes.
    """
    start = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    num_bytes = tensor.data_ptr() + tensor.nbytes - start
    if tensor.device.type == "cpu" and num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        advise(start, num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES, mmap.MADV_HUGEPAGE)
    return tensor

"""Collectives between the ranks of one node over memory that they share: no sockets, one copy in and one out.

A rank that waits looks a few thousand times, some tens of microseconds, and then sleeps in the kernel
(csrc/shared_memory.cpp). Measured beside gloo by `benchmarks/parallel.py` (docs/decisions/0024-one-process-a-rank.md).
"""

import ctypes
import math
from ctypes import CDLL

import torch
from torch import Tensor

from kvasir_runtime.kernels.native import DTYPE_CODES
from kvasir_runtime.parallel.counts import CollectiveCounts
from kvasir_runtime.parallel.shared_segment import BUFFER_BYTES, SharedSegment


class _Member(ctypes.Structure):
    """Member of csrc/shared_memory.cpp."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("turn", ctypes.c_uint32),
        ("buffer", ctypes.c_uint32),
    )


class SharedMemoryCollectives:
    name = "shared_memory"

    def __init__(self, library: CDLL, segment: SharedSegment, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.counts = CollectiveCounts()
        self._library = library
        self._mapped = segment.map()
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        self._member = _Member(start, rank, size, BUFFER_BYTES, 0, 0)
        self._address = ctypes.addressof(self._member)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Summed in float32 in the order of ranks, and rounded once."""
        x = x.contiguous()
        self.counts.count("all_reduce", x.nbytes)
        self._library.kvasir_shared_all_reduce(self._address, DTYPE_CODES[x.dtype], x.data_ptr(), x.numel())
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        x = x.contiguous()
        self.counts.count("all_gather", x.nbytes)
        dim = dim % x.dim()
        joined = torch.empty((*x.shape[:dim], self.size * x.shape[dim], *x.shape[dim + 1 :]), dtype=x.dtype)
        rows = math.prod(x.shape[:dim])
        if x.numel():
            self._library.kvasir_shared_all_gather(
                self._address, x.data_ptr(), joined.data_ptr(), rows, x.nbytes // rows
            )
        return joined

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        x = x.contiguous()
        self.counts.count("broadcast", x.nbytes)
        self._library.kvasir_shared_broadcast(self._address, x.data_ptr(), x.nbytes, source)
        return x

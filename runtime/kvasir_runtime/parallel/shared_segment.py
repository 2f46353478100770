"""Memory that processes of one node share. It has no name, so nothing is left behind however they end."""

import mmap
import os
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

BUFFER_BYTES = 4 * 1024 * 1024
"""Of one of a rank's two buffers, taken as far as messages reach; longer ones go in pieces, with a wait each."""
TURN_BYTES = 64


def segment_bytes(num_ranks: int) -> int:
    """A turn and two buffers for each."""
    return num_ranks * (TURN_BYTES + 2 * BUFFER_BYTES)


class SharedSegment:
    """Zeros at first. Sent to a child as an argument of its process it is the same memory there."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._descriptor = descriptor

    @classmethod
    def create(cls, num_bytes: int) -> "SharedSegment":
        """Memory is taken on first use."""
        descriptor = os.memfd_create("kvasir-collectives")
        os.ftruncate(descriptor, num_bytes)
        return cls(descriptor, num_bytes)

    def fileno(self) -> int:
        return self._descriptor

    def map(self) -> mmap.mmap:
        return mmap.mmap(self._descriptor, self.num_bytes)

    def close(self) -> None:
        """What is mapped stays."""
        os.close(self._descriptor)

    def __reduce__(self) -> tuple[Callable[..., "SharedSegment"], tuple[Any, int]]:
        return _received, (reduction.DupFd(self._descriptor), self.num_bytes)


def _received(duplicate: Any, num_bytes: int) -> SharedSegment:
    return SharedSegment(duplicate.detach(), num_bytes)

"""What ranks do together. Models call this seam and never ask what carries it: sockets, shared memory or NVLink.

Every rank of a group calls the same operations in the same order with equal shapes. A sum is the same number, bit for
bit, on all of them: what they decide from it agrees.
"""

from typing import Protocol

from torch import Tensor

from kvasir_runtime.parallel.counts import CollectiveCounts


class Collectives(Protocol):
    """One rank's end of a group."""

    @property
    def name(self) -> str:
        """What carries it, for logs and benchmarks."""

    @property
    def size(self) -> int:
        """Ranks of the group."""

    @property
    def rank(self) -> int:
        """This one's place among them."""

    @property
    def counts(self) -> CollectiveCounts: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks; it may take the place of `x`."""

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' tensors side by side along `dim`, in the order of ranks."""

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """The tensor of the rank `source`; it may take the place of `x`."""


class SingleRank:
    """A group of one, which has nothing to do."""

    name = "single"
    size = 1
    rank = 0

    def __init__(self) -> None:
        self.counts = CollectiveCounts()

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x

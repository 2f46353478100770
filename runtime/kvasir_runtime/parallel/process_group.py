"""Collectives over torch's process groups: gloo between CPUs, NCCL between GPUs.

The group's own methods are called rather than torch.distributed's functions, which keep a default group for the whole
process and cost several times as much Python a call.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroup

from kvasir_runtime.errors import CollectiveFailedError
from kvasir_runtime.kernels.native import refuse_recording
from kvasir_runtime.parallel.counts import CollectiveCounts, Operation


class ProcessGroupCollectives:
    """On CPU a call returns when it is done; on CUDA it is queued on the current stream, also in a graph's capture."""

    def __init__(self, name: str, group: ProcessGroup) -> None:
        self.name = name
        self.size: int = group.size()
        self.rank: int = group.rank()
        self.counts = CollectiveCounts()
        self._group = group

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        with self._operation("all_reduce", x):
            self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        x = x.contiguous()
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        with self._operation("all_gather", x):
            self._group._allgather_base(gathered, x).wait()
        return gathered if dim == 0 else torch.cat(gathered.chunk(self.size), dim)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        x = x.contiguous()
        options = BroadcastOptions()
        options.rootRank = source
        with self._operation("broadcast", x):
            self._group.broadcast([x], options).wait()
        return x

    @contextmanager
    def _operation(self, operation: Operation, x: Tensor) -> Iterator[None]:
        self.counts.count(operation, x.nbytes)
        refuse_recording(f"{operation} over {self.name} is not made to be called again")
        try:
            yield
        except RuntimeError as error:  # torch has no narrower one
            raise CollectiveFailedError(
                f"{operation} of {x.nbytes} bytes over {self.name} failed, mostly since another rank has ended: {error}"
            ) from error

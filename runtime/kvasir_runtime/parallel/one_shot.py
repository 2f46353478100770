"""Short sums between the GPUs of a node in one kernel: each rank maps the others' memory, reads all parts and adds them
up in the order of ranks (torch's symmetric memory), so that the sum is the same bits on all of them.

A decode's messages are short: what they cost is latency, of which NCCL's rings and trees have more. Every rank reads
every part, so long ones stay with NCCL; where the border lies is measured when the ranks have met.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.parallel.collectives import Collectives

MOST_BYTES = 4 * 1024 * 1024
SIZES = tuple(1 << power for power in range(11, 23))
"""That are measured, in bytes: 2 KiB to MOST_BYTES."""
ALIGNMENT = 16
DTYPES = (torch.float32, torch.bfloat16)
"""That torch's kernel adds."""
CALLS_OF_A_GRAPH = 50
NUM_REPLAYS = 20

Sum = Callable[[Tensor], Tensor]


class OneShotSum:
    """The thin part that needs devices. Queued on the current stream, also in a graph's capture."""

    def __init__(self, name: str, store: Store, rank: int, size: int, device: torch.device) -> None:
        """Waits for the other ranks; `name` is the group's own in this process. Raises ConfigurationError."""
        import torch.distributed._symmetric_memory as symmetric_memory  # which torch may still change: for who asks
        from torch._C._distributed_c10d import _register_process_group
        from torch.distributed.distributed_c10d import GroupName

        self._name = GroupName(name)
        _register_process_group(self._name, ProcessGroup(store, rank, size))
        try:
            self._buffer = symmetric_memory.empty(MOST_BYTES, dtype=torch.uint8, device=device)
            symmetric_memory.rendezvous(self._buffer, self._name)
        except RuntimeError as error:  # torch has no narrower one
            raise ConfigurationError(
                f"--collective-backend one_shot: use nccl, since the GPUs cannot map each other's memory: {error}"
            ) from error

    def __call__(self, x: Tensor) -> Tensor:
        """`x` is of DTYPES, contiguous and of at most MOST_BYTES, and stays as it is."""
        if x.data_ptr() % ALIGNMENT:
            x = x.clone()
        part = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(part, x, "sum", self._name)
        return total


class OneShotCollectives:
    """`plain`, but for sums of up to `limit_bytes`."""

    def __init__(self, plain: Collectives, one_shot: Sum, limit_bytes: int) -> None:
        """All ranks have the same `limit_bytes`."""
        self.name = f"{plain.name}, sums of up to {limit_bytes} bytes in one shot"
        self.size = plain.size
        self.rank = plain.rank
        self.counts = plain.counts
        self._plain = plain
        self._one_shot = one_shot
        self._limit_bytes = limit_bytes

    def all_reduce(self, x: Tensor) -> Tensor:
        # By what is the same on all ranks: each of them must choose alike.
        if not 0 < x.nbytes <= self._limit_bytes or x.nbytes % ALIGNMENT or x.dtype not in DTYPES:
            return self._plain.all_reduce(x)
        self.counts.count("all_reduce", x.nbytes)
        return self._one_shot(x.contiguous())

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self._plain.all_gather(x, dim)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._plain.broadcast(x, source)


@dataclass(frozen=True, slots=True)
class SumSeconds:
    """Of one message's size."""

    num_bytes: int
    plain: float
    one_shot: float


def limit_bytes(measured: Iterable[SumSeconds]) -> int:
    """The longest message up to which one shot is the faster at every size; 0: not even at the shortest."""
    limit = 0
    for seconds in sorted(measured, key=lambda seconds: seconds.num_bytes):
        if seconds.one_shot >= seconds.plain:
            break
        limit = seconds.num_bytes
    return limit


def agreed_collectives(
    plain: Collectives, one_shot: Sum, measured: Iterable[SumSeconds], least: Callable[[int], int]
) -> OneShotCollectives:
    """`least` is over the numbers of all ranks, whose measurements differ."""
    return OneShotCollectives(plain, one_shot, least(limit_bytes(measured)))


def measure(plain: Sum, one_shot: Sum, device: torch.device) -> list[SumSeconds]:
    """All ranks at once."""
    messages = [torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device) for num_bytes in SIZES]
    return [
        SumSeconds(x.nbytes, replayed_seconds(lambda: plain(x)), replayed_seconds(lambda: one_shot(x)))  # noqa: B023
        for x in messages
    ]


def replayed_seconds(call: Callable[[], object]) -> float:
    """Of one of many calls in a CUDA graph, as decode steps have them."""
    call()  # sets up what a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS_OF_A_GRAPH):
            call()
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / (CALLS_OF_A_GRAPH * NUM_REPLAYS)

"""How a pipeline stage hands each step's hidden states to the next one: messages of a size that both know, in order.

The plan alone gives a message's size, and every stage sends one for every step, failed or not, so that the stages stay
together whatever happens.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from kvasir_runtime.errors import CollectiveFailedError
from kvasir_runtime.parallel.counts import CollectiveCounts

MOST_UNFINISHED = 8
"""Messages that a stage holds for one that is behind."""


class StageLink:
    """One rank's end, to the stage behind it and from the one before it: point to point over torch's process groups,
    gloo or NCCL. A rank of the group is a stage."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.counts = CollectiveCounts()
        self._group = group
        self._device = device
        self._index: int = group.rank()
        self._sending: deque[tuple[Work, Tensor]] = deque()

    def send(self, message: Tensor) -> None:
        """To the next stage, which need not be there yet; nobody may change the message afterwards."""
        self.counts.count("send", message.nbytes)
        try:
            self._sending.append((self._group.send([message], self._index + 1, 0), message))
            if len(self._sending) > MOST_UNFINISHED:
                self._sending.popleft()[0].wait()
        except RuntimeError as error:  # torch has no narrower one
            raise self._gone(self._index + 1, error) from error

    def receive(self, out: Tensor) -> None:
        """The next message of the stage before, which is as large as `out`. Waits for it; on CUDA its stream does."""
        self.counts.count("receive", out.nbytes)
        try:
            self._group.recv([out], self._index - 1, 0).wait()
        except RuntimeError as error:
            raise self._gone(self._index - 1, error) from error

    def exchange(self, word: bytes) -> Sequence[bytes]:
        """The words of all stages, the first stage's first. Every stage calls it, and waits for the others."""
        own = torch.frombuffer(bytearray(word), dtype=torch.uint8).to(self._device)
        sizes = [int(size) for size in self._gather(torch.tensor([len(own)], device=self._device))]
        padded = own.new_zeros(max(sizes))
        padded[: len(own)] = own
        gathered = zip(self._gather(padded), sizes, strict=True)
        return [one[:size].cpu().numpy().tobytes() for one, size in gathered]

    def _gather(self, x: Tensor) -> list[Tensor]:
        out = [torch.empty_like(x) for _ in range(self._group.size())]
        try:
            self._group.allgather([out], [x]).wait()
        except RuntimeError as error:
            raise CollectiveFailedError(
                f"the pipeline stages cannot tell each other what they are, mostly since a rank has ended: {error}"
            ) from error
        return out

    @staticmethod
    def _gone(index: int, error: Exception) -> CollectiveFailedError:
        return CollectiveFailedError(
            f"pipeline stage {index + 1} is out of reach, mostly because a rank of it has ended: {error}"
        )

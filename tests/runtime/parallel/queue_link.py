"""The twin of a link between pipeline stages, without sockets: each stage is a thread of the test's process."""

import threading
from collections.abc import Sequence
from queue import SimpleQueue

from torch import Tensor

from kvasir_runtime.parallel.counts import CollectiveCounts


class QueueLink:
    def __init__(self, index: int, queues: Sequence["SimpleQueue[Tensor]"], words: list[bytes], met: threading.Barrier):
        self.counts = CollectiveCounts()
        self._index = index
        self._queues = queues
        self._words = words
        self._met = met

    def send(self, message: Tensor) -> None:
        self.counts.count("send", message.nbytes)
        self._queues[self._index].put(message)

    def receive(self, out: Tensor) -> None:
        message = self._queues[self._index - 1].get(timeout=10)
        assert message.shape == out.shape, "both stages know the size"
        self.counts.count("receive", out.nbytes)
        out.copy_(message)

    def exchange(self, word: bytes) -> Sequence[bytes]:
        self._words[self._index] = word
        self._met.wait()
        words = list(self._words)
        self._met.wait()  # before anybody writes the next
        return words


def queue_links(num_stages: int) -> list[QueueLink]:
    """One for each stage."""
    queues: list[SimpleQueue[Tensor]] = [SimpleQueue() for _ in range(num_stages - 1)]
    words, met = [b""] * num_stages, threading.Barrier(num_stages)
    return [QueueLink(index, queues, words, met) for index in range(num_stages)]

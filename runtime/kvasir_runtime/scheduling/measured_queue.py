"""A waiting queue that knows how much there is to compute for those in it: what a router asks an engine first.

Each sequence is measured once, when it begins to wait: its tokens less those that are cached by then, or that another
one which waits already will have computed. So a burst with one new system prompt counts that once. The figure is as old
as the wait, and too low when the other one is aborted; both last no longer than the queue. All tokens of a preempted
sequence count: its blocks may still be found then, but others take them, which is why it waits.
"""

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.kv_cache.kv_cache import KvCache
from kvasir_runtime.scheduling.policies import WaitingQueue
from kvasir_runtime.scheduling.request import Rank, Request, Sequence


class MeasuredQueue:
    """Any queue's order, with the sum of what waits in it."""

    def __init__(self, queue: WaitingQueue, kv: KvCache) -> None:
        self._queue = queue
        self._kv = kv
        self._to_compute: dict[Sequence, tuple[int, list[bytes]]] = {}
        """Tokens of each that waits, and the blocks that it is the first to need."""
        self._promised: set[bytes] = set()
        """All of those blocks."""
        self.num_uncached_tokens = 0

    def arrive(self, request: Request) -> int:
        return self._queue.arrive(request)

    def leave(self, request: Request) -> None:
        self._queue.leave(request)

    def rank(self, request: Request, number: int, index: int) -> Rank:
        return self._queue.rank(request, number, index)

    def push(self, sequence: Sequence) -> None:
        self._queue.push(sequence)
        num_tokens, promised = self._to_compute[sequence] = self._measure(sequence)
        self._promised.update(promised)
        self.num_uncached_tokens += num_tokens

    def peek(self) -> Sequence | None:
        return self._queue.peek()

    def remove(self, sequence: Sequence) -> None:
        self._queue.remove(sequence)
        num_tokens, promised = self._to_compute.pop(sequence)
        self._promised.difference_update(promised)
        self.num_uncached_tokens -= num_tokens

    def served(self, tenants: NDArray[np.int32], num_tokens: NDArray[np.int32]) -> None:
        self._queue.served(tenants, num_tokens)

    def __len__(self) -> int:
        return len(self._queue)

    def _measure(self, sequence: Sequence) -> tuple[int, list[bytes]]:
        """(tokens to compute, blocks that it promises to compute)"""
        num_tokens = len(sequence.token_ids)
        if sequence.was_admitted or sequence.request.lacks_prompt_logprobs:  # computed, cached or not
            return num_tokens, []
        hashes = self._kv.hashes_to_look_up(sequence.token_ids, sequence.blocks)
        missing = hashes[self._kv.num_cached(hashes) :]
        own = [block_hash for block_hash in missing if block_hash not in self._promised]
        return num_tokens - (len(hashes) - len(own)) * self._kv.block_size, own

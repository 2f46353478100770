"""The order in which waiting sequences are admitted, and how much there is to compute for them. No clock, no device.

A preempted sequence returns with its old rank and so to the place that it had.
"""

import heapq
import itertools
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.kv_cache.kv_cache import KvCache
from kvasir_runtime.scheduling.request import Rank, Request, Sequence

PolicyName = Literal["fcfs", "priority", "fair"]


class WaitingQueue(Protocol):
    """Sequences that hold no blocks yet."""

    def arrive(self, request: Request) -> int:
        """Count a request in, before its sequences are pushed; the number of its tenant, for `served`."""

    def leave(self, request: Request) -> None:
        """Count a request out that has ended."""

    def rank(self, request: Request, number: int, index: int) -> Rank:
        """Of sequence `index` of the request that came as the `number`-th. Lower runs first, the highest is preempted
        first."""

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether the one that waits may take the row and blocks of the one that runs. Only where its rank is lower, so
        that the other one does not come back before it."""

    def push(self, sequence: Sequence) -> None: ...

    def peek(self) -> Sequence | None:
        """The next sequence to admit, left in the queue."""

    def remove(self, sequence: Sequence) -> None: ...

    def served(self, tenants: NDArray[np.int32], num_tokens: NDArray[np.int32]) -> None:
        """Count what a step computes: so many tokens for each of its sequences, of tenants by number."""

    def __len__(self) -> int: ...


class OrderedQueue:
    """A heap by rank. Removed entries are skipped when they surface, and thrown out when they are more than the others:
    behind those that keep coming they would never surface."""

    def __init__(self, *, by_priority: bool, preemption_threshold: int = 0) -> None:
        """`preemption_threshold`: by how much better a priority preempts; 0: none does."""
        self._by_priority = by_priority
        self._preemption_threshold = preemption_threshold
        self._heap: list[tuple[Rank, int, Sequence]] = []
        self._tickets: dict[Sequence, int] = {}
        self._next_ticket = itertools.count()

    def arrive(self, request: Request) -> int:
        return 0

    def leave(self, request: Request) -> None:
        """Order does not depend on who is here."""

    def rank(self, request: Request, number: int, index: int) -> Rank:
        arrival = (request.arrival_time, number, index)
        return (request.spec.priority, *arrival) if self._by_priority else arrival

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        lead = running.request.spec.priority - waiting.request.spec.priority
        return self._by_priority and lead >= self._preemption_threshold > 0

    def push(self, sequence: Sequence) -> None:
        ticket = self._tickets[sequence] = next(self._next_ticket)
        heapq.heappush(self._heap, (sequence.rank, ticket, sequence))

    def peek(self) -> Sequence | None:
        while self._heap and self._tickets.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        del self._tickets[sequence]
        if len(self._heap) > 2 * len(self._tickets):
            self._heap = [entry for entry in self._heap if self._tickets.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def served(self, tenants: NDArray[np.int32], num_tokens: NDArray[np.int32]) -> None:
        """Order does not depend on service."""

    def __len__(self) -> int:
        return len(self._tickets)


class FairQueue:
    """Equal shares by tenant: the tenant that has been served the fewest tokens goes next, in arrival order within.

    Virtual token counters as in Sheng et al., Fairness in Serving Large Language Models (OSDI 2024): a tenant that
    comes back from idleness starts at the least counter of those that are here, waiting or running, so it cannot save
    up service. The counter of a tenant that is gone is kept while it says more than that, and dropped afterwards.
    """

    def __init__(self) -> None:
        self._queues: dict[str, OrderedQueue] = {}
        self._num_waiting = 0
        self._numbers: dict[str, int] = {}
        """Tenant -> its place in the counters, present or gone with a counter that still matters."""
        self._num_present: dict[str, int] = {}
        """Tenant -> its requests that have not ended."""
        self._served_tokens = np.zeros(16)
        self._free_numbers = list(range(15, -1, -1))

    def arrive(self, request: Request) -> int:
        tenant = request.spec.tenant
        if tenant not in self._num_present:
            floor = self._floor()
            self._drop_counters_up_to(floor)
            number = self._number_of(tenant)
            self._served_tokens[number] = max(self._served_tokens[number], floor)
        self._num_present[tenant] = self._num_present.get(tenant, 0) + 1
        return self._numbers[tenant]

    def leave(self, request: Request) -> None:
        self._num_present[request.spec.tenant] -= 1
        if not self._num_present[request.spec.tenant]:
            del self._num_present[request.spec.tenant]
        if not self._num_present:
            self._drop_counters_up_to(np.inf)

    def rank(self, request: Request, number: int, index: int) -> Rank:
        return (request.arrival_time, number, index)

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """Counters of tenants pass each other every few steps: they would preempt one another in turn."""
        return False

    def push(self, sequence: Sequence) -> None:
        self._queues.setdefault(sequence.request.spec.tenant, OrderedQueue(by_priority=False)).push(sequence)
        self._num_waiting += 1

    def peek(self) -> Sequence | None:
        if not self._queues:
            return None
        least_served = min(self._queues, key=lambda tenant: self._served_tokens[self._numbers[tenant]])
        return self._queues[least_served].peek()

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.request.spec.tenant
        self._queues[tenant].remove(sequence)
        self._num_waiting -= 1
        if not self._queues[tenant]:
            del self._queues[tenant]

    def served(self, tenants: NDArray[np.int32], num_tokens: NDArray[np.int32]) -> None:
        self._served_tokens += np.bincount(tenants, weights=num_tokens, minlength=len(self._served_tokens))

    def __len__(self) -> int:
        return self._num_waiting

    def _floor(self) -> float:
        return min((float(self._served_tokens[self._numbers[tenant]]) for tenant in self._num_present), default=0.0)

    def _drop_counters_up_to(self, floor: float) -> None:
        """Of tenants that are gone: they would start at the floor anyway."""
        for tenant, number in list(self._numbers.items()):
            if tenant not in self._num_present and self._served_tokens[number] <= floor:
                self._served_tokens[number] = 0.0
                self._free_numbers.append(self._numbers.pop(tenant))

    def _number_of(self, tenant: str) -> int:
        if tenant not in self._numbers:
            if not self._free_numbers:
                size = len(self._served_tokens)
                self._served_tokens = np.concatenate((self._served_tokens, np.zeros(size)))
                self._free_numbers = list(range(2 * size - 1, size - 1, -1))
            self._numbers[tenant] = self._free_numbers.pop()
        return self._numbers[tenant]


class UncachedTokens:
    """How many tokens are to be computed for those that wait: what a router asks first.

    Each sequence is measured once, when it begins to wait: its tokens less those that are cached by then, or that
    another one which waits already will have computed. So a burst with one new system prompt counts that once. The
    figure is as old as the wait, and too low when the other one is aborted; both last no longer than the queue. All
    tokens of a preempted sequence count: its blocks may still be found then, but others take them, which is why it
    waits.
    """

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._to_compute: dict[Sequence, tuple[int, list[bytes]]] = {}
        """Tokens of each that waits, and the blocks that it is the first to need."""
        self._promised: set[bytes] = set()
        """All of those blocks."""
        self.num_tokens = 0

    def add(self, sequence: Sequence) -> None:
        num_tokens, promised = self._to_compute[sequence] = self._measure(sequence)
        self._promised.update(promised)
        self.num_tokens += num_tokens

    def remove(self, sequence: Sequence) -> None:
        num_tokens, promised = self._to_compute.pop(sequence)
        self._promised.difference_update(promised)
        self.num_tokens -= num_tokens

    def _measure(self, sequence: Sequence) -> tuple[int, list[bytes]]:
        """(tokens to compute, blocks that it promises to compute)"""
        num_tokens = len(sequence.token_ids)
        if sequence.was_admitted or sequence.request.lacks_prompt_logprobs:  # computed, cached or not
            return num_tokens, []
        hashes = self._kv.hashes_to_look_up(sequence.token_ids, sequence.blocks)
        missing = hashes[self._kv.num_cached(hashes) :]
        own = [block_hash for block_hash in missing if block_hash not in self._promised]
        return num_tokens - (len(hashes) - len(own)) * self._kv.block_size, own


def waiting_queue(policy: PolicyName, preemption_threshold: int = 0) -> WaitingQueue:
    """`preemption_threshold`: of the policy `priority`, see `OrderedQueue`."""
    if policy == "fair":
        return FairQueue()
    return OrderedQueue(by_priority=policy == "priority", preemption_threshold=preemption_threshold)

"""The order in which waiting requests are admitted. Pure bookkeeping: no clock, no device.

A preempted request returns with its old arrival time and so to the place that it had.
"""

import heapq
import itertools
from typing import Literal, Protocol

from kvasir_runtime.scheduling.request import Request

PolicyName = Literal["fcfs", "priority", "fair"]
Rank = tuple[float, ...]


class WaitingQueue(Protocol):
    """Requests that hold no blocks yet."""

    def push(self, request: Request) -> None: ...

    def peek(self) -> Request | None:
        """The next request to admit, left in the queue."""

    def remove(self, request: Request) -> None: ...

    def rank(self, request: Request) -> Rank:
        """Lower runs first, the highest is preempted first. No two requests are equal, or a step could preempt one that
        it has just scheduled."""

    def served(self, request: Request, num_tokens: int) -> None:
        """Told of every share of a step that a request gets."""

    def __len__(self) -> int: ...


class OrderedQueue:
    """A heap by rank; removed entries are skipped when they surface."""

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._heap: list[tuple[Rank, int, Request]] = []
        self._entries: dict[str, int] = {}
        self._tickets = itertools.count()

    def push(self, request: Request) -> None:
        ticket = next(self._tickets)
        self._entries[request.request_id] = ticket
        heapq.heappush(self._heap, (self.rank(request), ticket, request))

    def peek(self) -> Request | None:
        while self._heap and self._entries.get(self._heap[0][2].request_id) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, request: Request) -> None:
        del self._entries[request.request_id]

    def rank(self, request: Request) -> Rank:
        arrival = (request.arrival_time, request.number)
        return (request.priority, *arrival) if self._by_priority else arrival

    def served(self, request: Request, num_tokens: int) -> None:
        """Order does not depend on service."""

    def __len__(self) -> int:
        return len(self._entries)


class FairQueue:
    """Equal shares by tenant: the tenant that has been served the fewest tokens goes next, in arrival order within.

    Virtual token counters as in Sheng et al., Fairness in Serving Large Language Models (OSDI 2024): a tenant that
    comes back from idleness starts at the least counter of the busy ones, so it cannot save up service.
    """

    def __init__(self) -> None:
        self._queues: dict[str, OrderedQueue] = {}
        self._served_tokens: dict[str, int] = {}

    def push(self, request: Request) -> None:
        queue = self._queues.get(request.tenant)
        if queue is None:
            floor = min((self._served_tokens[tenant] for tenant in self._queues), default=0)
            self._served_tokens[request.tenant] = max(self._served_tokens.get(request.tenant, 0), floor)
            queue = self._queues[request.tenant] = OrderedQueue(by_priority=False)
        queue.push(request)

    def peek(self) -> Request | None:
        if not self._queues:
            return None
        return self._queues[min(self._queues, key=self._served_tokens.__getitem__)].peek()

    def remove(self, request: Request) -> None:
        queue = self._queues[request.tenant]
        queue.remove(request)
        if not queue:
            del self._queues[request.tenant]

    def rank(self, request: Request) -> Rank:
        return (request.arrival_time, request.number)

    def served(self, request: Request, num_tokens: int) -> None:
        self._served_tokens[request.tenant] = self._served_tokens.get(request.tenant, 0) + num_tokens

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())


def waiting_queue(policy: PolicyName) -> WaitingQueue:
    if policy == "fair":
        return FairQueue()
    return OrderedQueue(by_priority=policy == "priority")

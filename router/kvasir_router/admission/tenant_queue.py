"""One tenant's waiting requests in the order in which they may start: by priority, then by arrival.

Requests for different models can start at different times, so there is a line for each model.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Set
from dataclasses import dataclass

# However short its prompt, a request occupies its engine to decode as well.
_MIN_COST_TOKENS = 256


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """What admission must know of a request; one object for all its attempts."""

    model: str | None  # as engines know it; None: any will do
    tenant: str
    num_tokens: int  # of its prompt
    priority: int = 0  # as vLLM's: lower is earlier
    deadline_seconds: float | None = None  # its client's own limit to the time in the queue
    has_begun: bool = False  # its client has a part of the answer
    number: int = 0  # of its arrival, given by the queue

    @property
    def cost_tokens(self) -> int:
        return max(self.num_tokens, _MIN_COST_TOKENS)


_Place = tuple[int, int, QueuedRequest]  # priority and number of the arrival, of which no two are equal


def _place(request: QueuedRequest) -> _Place:
    return (0 if request.has_begun else request.priority, request.number, request)


def _priority(place: _Place) -> int:
    return place[0]


class TenantQueue:
    """Keeps sorted lists: to move the tail of ten thousand entries costs less than the steps of a heap."""

    def __init__(self) -> None:
        self._lines: dict[str | None, list[_Place]] = {}  # by model; none is empty
        self.num_requests = 0
        self.num_tokens = 0
        self.cost_tokens = 0

    @property
    def models(self) -> Set[str | None]:
        """Those that requests wait for."""
        return self._lines.keys()

    def waits_for(self, models: Set[str | None]) -> bool:
        """For any of them."""
        return not self._lines.keys().isdisjoint(models)

    def push(self, request: QueuedRequest) -> None:
        insort(self._lines.setdefault(request.model, []), _place(request))
        self.num_requests += 1
        self.num_tokens += request.num_tokens
        self.cost_tokens += request.cost_tokens

    def remove(self, request: QueuedRequest) -> None:
        line = self._lines[request.model]
        del line[bisect_left(line, _place(request))]
        if not line:
            del self._lines[request.model]
        self.num_requests -= 1
        self.num_tokens -= request.num_tokens
        self.cost_tokens -= request.cost_tokens

    def first(self, models: Container[str | None]) -> QueuedRequest | None:
        """The next to start of those that wait for one of `models`."""
        first = min((line[0] for model, line in self._lines.items() if model in models), default=None)
        return None if first is None else first[2]

    def last(self) -> QueuedRequest:
        """The least pressing of at least one."""
        return max(line[-1] for line in self._lines.values())[2]

    def cost_tokens_before(self, priority: int) -> int:
        """Of all that start before a newcomer of that priority."""
        ends = ((line, bisect_right(line, priority, key=_priority)) for line in self._lines.values())
        return sum(place[2].cost_tokens for line, end in ends for place in line[:end])

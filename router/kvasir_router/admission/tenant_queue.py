"""One tenant's waiting requests, and which of them starts next: as their line says, by priority before all.

Requests for different models can start at different times, so there is a line for each model.
"""

from collections import OrderedDict
from collections.abc import Container, Set
from itertools import islice

from kvasir_router.admission.line import Line
from kvasir_router.admission.queued_request import QueuedRequest

# With each start, so that the work for all that wait is spread: what is cached changes while they do.
_ESTIMATES_A_START = 8


class TenantQueue:
    def __init__(self) -> None:
        self._lines: dict[str | None, Line] = {}  # by model; none is empty
        self._to_estimate: OrderedDict[QueuedRequest, None] = OrderedDict()  # all that wait, in turn
        self.num_requests = 0
        self.cost_tokens = 0

    @property
    def models(self) -> Set[str | None]:
        """Those that requests wait for."""
        return self._lines.keys()

    def waits_for(self, models: Set[str | None]) -> bool:
        """For any of them."""
        return not self._lines.keys().isdisjoint(models)

    def push(self, request: QueuedRequest) -> None:
        self._lines.setdefault(request.model, Line()).push(request)
        self._to_estimate[request] = None
        self.num_requests += 1
        self.cost_tokens += request.cost_tokens

    def remove(self, request: QueuedRequest) -> None:
        line = self._lines[request.model]
        line.remove(request)
        del self._to_estimate[request]
        if not line:
            del self._lines[request.model]
        self.num_requests -= 1
        self.cost_tokens -= request.cost_tokens

    def first(self, models: Container[str | None], now: float) -> QueuedRequest | None:
        """The next to start of those that wait for one of `models`."""
        firsts = [line.first(now) for model, line in self._lines.items() if model in models]
        return min(firsts, key=lambda one: (one.rank, -one.response_ratio(now), one.number), default=None)

    def estimate_some(self) -> None:
        """Anew, of how much work they are."""
        for each in list(islice(self._to_estimate, _ESTIMATES_A_START)):
            self._to_estimate.move_to_end(each)
            self._lines[each.model].estimated(each, each.estimate())

    def last(self) -> QueuedRequest:
        """The least pressing of at least one."""
        return max((line.last for line in self._lines.values()), key=lambda one: (one.rank, one.number))

    def cost_tokens_before(self, newcomer: QueuedRequest) -> int:
        """The least that starts before it."""
        return sum(line.cost_tokens_before(newcomer) for line in self._lines.values())

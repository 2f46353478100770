"""One tenant's waiting requests, and which of them starts next: as their line says, by priority before all.

Requests for different models can start at different times, so there is a line for each model.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Container, Set
from itertools import islice
from math import log2

from kvasir_router.admission.queued_request import QueuedRequest

# With each start, so that the work for all that wait is spread: what is cached changes while they do.
_ESTIMATES_A_START = 8


# Requests of one size differ by at most a twelfth in their work, and so in their ratio once they have waited alike.
_SIZES_PER_DOUBLING = 8

_Place = tuple[int, int, QueuedRequest]  # priority and number of the arrival, of which no two are equal
_SizePlace = tuple[float, int, QueuedRequest]  # moment and number of the arrival


def _place(request: QueuedRequest) -> _Place:
    return (request.rank, request.number, request)


def _size_place(request: QueuedRequest) -> _SizePlace:
    return (request.arrived, request.number, request)


def _size(request: QueuedRequest) -> int:
    return int(_SIZES_PER_DOUBLING * log2(request.counted_work))


def _rank(place: _Place) -> int:
    return place[0]


class Line:
    """Of one tenant and model. The next is the one with the highest response ratio (Brinch Hansen 1971) of the most
    pressing: short ones, as those are whose prefix is cached, overtake long ones, and none starves.

    Ratios grow at different speeds, so no order by them can be kept. But of requests of the same work the earliest has
    the highest: only one of each size is looked at, about a hundred however many wait.

    Keeps sorted lists: to move the tail of ten thousand entries costs less than the steps of a heap.

    What a request says of its work may change by `estimated` only.
    """

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._of_rank: dict[int, dict[int, list[_SizePlace]]] = {}  # by size; none is empty

    def __len__(self) -> int:
        return len(self._places)

    @property
    def last(self) -> QueuedRequest:
        """The latest of the least pressing, of at least one."""
        return self._places[-1][2]

    def push(self, request: QueuedRequest) -> None:
        insort(self._places, _place(request))
        self._join_size(request)

    def remove(self, request: QueuedRequest) -> None:
        del self._places[bisect_left(self._places, _place(request))]
        self._leave_size(request)

    def estimated(self, request: QueuedRequest, work: float) -> None:
        """How much work it is by now."""
        self._leave_size(request)
        request.work = work
        self._join_size(request)

    def first(self, now: float) -> QueuedRequest:
        """Of at least one; the earliest of equals."""
        sizes = self._of_rank[self._places[0][0]]
        return max(
            (places[0][2] for places in sizes.values()),
            key=lambda request: (request.response_ratio(now), -request.number),
        )

    def cost_tokens_before(self, newcomer: QueuedRequest) -> int:
        """The least that starts before it: what came earlier and is no more work keeps the higher ratio."""
        before = self._places[: bisect_right(self._places, newcomer.rank, key=_rank)]
        return sum(request.cost_tokens for *_, request in before if request.work <= newcomer.work)

    def _join_size(self, request: QueuedRequest) -> None:
        sizes = self._of_rank.setdefault(request.rank, {})
        insort(sizes.setdefault(_size(request), []), _size_place(request))

    def _leave_size(self, request: QueuedRequest) -> None:
        sizes = self._of_rank[request.rank]
        places = sizes[_size(request)]
        del places[bisect_left(places, _size_place(request))]
        if not places:
            del sizes[_size(request)]
            if not sizes:
                del self._of_rank[request.rank]


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

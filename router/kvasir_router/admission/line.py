"""Requests of one tenant for one model, in order of priority and arrival, and which of them should start next.

That is the one with the highest response ratio (Brinch Hansen 1971) of the most pressing: a request may have waited the
longer the more work it is. Short ones, as those are whose prefix is cached, overtake long ones, and none starves.

Ratios grow at different speeds, so no order by them can be kept. But of requests of the same work the earliest has the
highest: only one of each size is looked at, about a hundred however many wait.
"""

from bisect import bisect_left, bisect_right, insort
from math import log2

from kvasir_router.admission.queued_request import QueuedRequest

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
    """Keeps sorted lists: to move the tail of ten thousand entries costs less than the steps of a heap.

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

"""Requests of one tenant for one model, in order of priority and arrival, and which of them should start next.

That is the one with the highest response ratio (Brinch Hansen 1971) of the most pressing: a request may have waited the
longer the more work it is. Short ones, as those are whose prefix is cached, overtake long ones, and none starves.
"""

from bisect import bisect_left, bisect_right, insort

from kvasir_router.admission.queued_request import QueuedRequest

_Place = tuple[int, int, QueuedRequest]  # priority and number of the arrival, of which no two are equal


def _place(request: QueuedRequest) -> _Place:
    return (request.rank, request.number, request)


def _rank(place: _Place) -> int:
    return place[0]


class Line:
    """Keeps a sorted list: to move the tail of ten thousand entries costs less than the steps of a heap."""

    def __init__(self) -> None:
        self._places: list[_Place] = []

    def __len__(self) -> int:
        return len(self._places)

    @property
    def last(self) -> QueuedRequest:
        """The latest of the least pressing, of at least one."""
        return self._places[-1][2]

    def push(self, request: QueuedRequest) -> None:
        insort(self._places, _place(request))

    def remove(self, request: QueuedRequest) -> None:
        del self._places[bisect_left(self._places, _place(request))]

    def first(self, now: float) -> QueuedRequest:
        """Of at least one; the earliest of equals."""
        num_pressing = bisect_right(self._places, self._places[0][0], key=_rank)
        return max((place[2] for place in self._places[:num_pressing]), key=lambda request: request.response_ratio(now))

    def cost_tokens_before(self, newcomer: QueuedRequest) -> int:
        """The least that starts before it: what came earlier and is no more work keeps the higher ratio."""
        before = self._places[: bisect_right(self._places, newcomer.rank, key=_rank)]
        return sum(request.cost_tokens for *_, request in before if request.work <= newcomer.work)

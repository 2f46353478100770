"""The line finds about the same first as a look at everyone would, and looks at few."""

import random

import pytest

from kvasir_router.admission.queue import Line
from kvasir_router.admission.queued_request import QueuedRequest


class Watched(QueuedRequest):
    num_looks = 0

    def response_ratio(self, now: float) -> float:
        Watched.num_looks += 1
        return super().response_ratio(now)


@pytest.fixture
def waiting() -> list[QueuedRequest]:
    source = random.Random(1)
    return [
        Watched("m", "t", 1000, number=number, arrived=source.uniform(0, 60), work=source.lognormvariate(8, 2))
        for number in range(1000)
    ]


def filled(requests: list[QueuedRequest]) -> Line:
    line = Line()
    for request in requests:
        line.push(request)
    return line


def test_the_first_has_about_the_highest_ratio_of_all(waiting: list[QueuedRequest]) -> None:
    line, now = filled(waiting), 61.0
    while line:
        first = line.first(now)
        highest = max(request.response_ratio(now) for request in waiting)
        assert first.response_ratio(now) >= highest / 2 ** (1 / 8)
        line.remove(first)
        waiting.remove(first)
        now += 0.1


def test_few_are_looked_at_however_many_wait(waiting: list[QueuedRequest]) -> None:
    line = filled(waiting)
    Watched.num_looks = 0
    line.first(61.0)
    assert Watched.num_looks < 130


def test_a_new_estimate_moves_a_request_to_others_of_its_size() -> None:
    early, late = (QueuedRequest("m", "t", 1, number=n, arrived=float(n), work=5000.0) for n in range(2))
    line = filled([early, late])
    line.estimated(late, 400.0)
    assert line.first(10.0) is late
    line.estimated(late, 5000.0)
    assert line.first(10.0) is early
    for request in (early, late):
        line.remove(request)
    assert len(line) == 0


def test_only_the_most_pressing_are_looked_at() -> None:
    pressing = QueuedRequest("m", "t", 1, priority=-1, number=2, arrived=9.0, work=9000.0)
    line = filled([QueuedRequest("m", "t", 1, number=1, work=1.0), pressing])
    assert line.first(10.0) is pressing

import pytest

from kvasir_router.admission.queue import TenantQueue
from kvasir_router.admission.queued_request import QueuedRequest


def request(
    number: int, *, priority: int = 0, model: str = "m", num_tokens: int = 1000, work: float = 0.0, arrived: float = 0.0
) -> QueuedRequest:
    return QueuedRequest(
        model, "t", num_tokens, priority, number=number, estimate=lambda: work, work=work, arrived=arrived
    )


def filled(*requests: QueuedRequest) -> TenantQueue:
    queue = TenantQueue()
    for one in requests:
        queue.push(one)
    return queue


def drained(queue: TenantQueue, *models: str, now: float = 10.0) -> list[int]:
    numbers = []
    while (first := queue.first(set(models), now)) is not None:
        queue.remove(first)
        queue.estimate_some()
        numbers.append(first.number)
    return numbers


def test_the_lower_priority_value_goes_first_and_equals_by_arrival() -> None:
    queue = filled(request(1), request(2, priority=-1), request(3, priority=5), request(4, priority=-1))
    assert drained(queue, "m") == [2, 4, 1, 3]


def test_only_requests_for_the_models_asked_about_are_first() -> None:
    queue = filled(request(1, model="a"), request(2, model="b"), request(3, model="a"))
    assert drained(queue, "b") == [2]
    assert drained(queue, "a", "b") == [1, 3]


def test_the_first_over_several_models_is_the_first_of_all() -> None:
    queue = filled(request(1, model="a"), request(2, model="b", priority=-1))
    assert drained(queue, "a", "b") == [2, 1]


def test_the_last_is_the_latest_of_the_least_pressing() -> None:
    queue = filled(request(1, priority=9, model="a"), request(2, priority=9, model="b"), request(3, model="a"))
    assert queue.last().number == 2


def test_one_that_comes_back_has_its_old_place() -> None:
    first, second = request(1), request(2)
    queue = filled(first, second)
    queue.remove(first)
    queue.push(first)
    assert drained(queue, "m") == [1, 2]


def test_counts_follow_what_is_inside() -> None:
    large, small = request(1, num_tokens=1000, model="a"), request(2, num_tokens=10, model="b")
    queue = filled(large, small)
    assert (queue.num_requests, queue.cost_tokens, set(queue.models)) == (2, 1256, {"a", "b"})
    queue.remove(large)
    assert (queue.num_requests, queue.cost_tokens, set(queue.models)) == (1, 256, {"b"})


@pytest.mark.parametrize(("now", "order"), [(18.0, [1, 2]), (19.0, [2, 1])])
def test_one_of_four_times_the_work_may_have_waited_four_times_as_long(now: float, order: list[int]) -> None:
    """Their ratios are equal once they have waited for 13.3 and 3.3 s."""
    queue = filled(request(1, work=4000, arrived=5.0), request(2, work=1000, arrived=15.0))
    assert drained(queue, "m", now=now) == order
    queue = filled(request(1, work=4000, arrived=5.0, model="a"), request(2, work=1000, arrived=15.0, model="b"))
    assert drained(queue, "a", "b", now=now) == order


def test_what_is_hardly_any_work_starts_in_order_of_arrival() -> None:
    queue = filled(request(1, work=256, arrived=1.0), request(2, work=1, arrived=2.0))
    assert drained(queue, "m") == [1, 2]


def test_no_short_one_gets_past_a_more_pressing_one() -> None:
    queue = filled(request(1, work=300), request(2, work=9000, priority=-1), request(3, work=3000, priority=-1))
    assert drained(queue, "m") == [3, 2, 1]


def test_work_is_estimated_anew_while_requests_wait() -> None:
    work = dict.fromkeys(range(1, 5), 5000.0)
    requests = [QueuedRequest("m", "t", 1, number=n, estimate=lambda n=n: work[n], work=5000.0) for n in work]
    queue = filled(*requests)
    work[4] = 1000.0  # its beginning has been cached
    assert drained(queue, "m") == [1, 4, 2, 3]


def test_estimates_go_round_so_that_everyone_gets_one() -> None:
    asked: list[int] = []
    queue = filled(
        *(QueuedRequest("m", "t", 1, number=n, estimate=lambda n=n: asked.append(n) or 0.0) for n in range(30))
    )
    for _ in range(4):
        queue.estimate_some()
    assert sorted(set(asked)) == list(range(30))

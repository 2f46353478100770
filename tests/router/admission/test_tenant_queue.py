import pytest

from kvasir_router.admission.tenant_queue import QueuedRequest, TenantQueue


def request(number: int, *, priority: int = 0, model: str = "m", num_tokens: int = 1000) -> QueuedRequest:
    return QueuedRequest(model, "t", num_tokens, priority, number=number)


def filled(*requests: QueuedRequest) -> TenantQueue:
    queue = TenantQueue()
    for one in requests:
        queue.push(one)
    return queue


def drained(queue: TenantQueue, *models: str) -> list[int]:
    numbers = []
    while (first := queue.first(set(models))) is not None:
        queue.remove(first)
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
    assert (queue.num_requests, queue.num_tokens, queue.cost_tokens, set(queue.models)) == (2, 1010, 1256, {"a", "b"})
    queue.remove(large)
    assert (queue.num_requests, queue.num_tokens, queue.cost_tokens, set(queue.models)) == (1, 10, 256, {"b"})


@pytest.mark.parametrize(("priority", "tokens"), [(-2, 0), (-1, 300), (0, 800), (1, 800), (7, 1500)])
def test_before_a_newcomer_are_all_of_its_priority_and_the_more_pressing(priority: int, tokens: int) -> None:
    queue = filled(
        request(1, num_tokens=500, model="a"),
        request(2, num_tokens=300, priority=-1, model="b"),
        request(3, num_tokens=700, priority=7, model="a"),
    )
    assert queue.cost_tokens_before(priority) == tokens

"""Which request is woken, which makes way: the queue without event loop."""

from collections.abc import Callable, Collection

import pytest

from kvasir_router.admission.queue import HeldDemand, RequestQueue
from kvasir_router.admission.queued_request import QueuedRequest


def request(
    tenant: str = "t", *, model: str = "m", priority: int = 0, num_tokens: int = 1000, has_begun: bool = False
) -> QueuedRequest:
    return QueuedRequest(model, tenant, num_tokens, priority, has_begun=has_begun)


def queue_of(*requests: QueuedRequest, max_requests: int = 100) -> RequestQueue:
    queue = RequestQueue(max_requests)
    for one in requests:
        queue.push(one)
    return queue


def wake(
    queue: RequestQueue, models: Collection[str | None] = ("m",), at_limit: Collection[str] = ()
) -> QueuedRequest | None:
    return queue.wake_next(lambda model, _: model in models, lambda tenant: tenant not in at_limit, now=0.0)


def start_all(queue: RequestQueue) -> list[QueuedRequest]:
    started = []
    while (woken := wake(queue)) is not None:
        queue.started(woken)
        started.append(woken)
    return started


def test_within_a_tenant_priority_and_then_arrival_decide() -> None:
    late, early, urgent = request(), request(), request(priority=-1)
    assert start_all(queue_of(early, late, urgent)) == [urgent, early, late]


def test_no_priority_of_a_clients_own_gets_past_another_tenant() -> None:
    loud = [request("loud", priority=-100) for _ in range(10)]
    quiet = request("quiet")
    assert quiet in start_all(queue_of(*loud, quiet))[:2]


def test_streams_that_have_begun_come_before_all_tenants_in_their_order() -> None:
    urgent, first = request(priority=-9), request("b", has_begun=True)
    second = request(priority=-1, has_begun=True)
    queue = queue_of(urgent, first, second)
    assert start_all(queue) == [first, second, urgent]
    assert queue.num_begun == 0


def test_a_tenants_limit_does_not_hold_up_its_streams_that_have_begun() -> None:
    begun = request(has_begun=True)
    assert wake(queue_of(request(), begun), at_limit={"t"}) is begun


def test_what_no_endpoint_takes_is_passed_over() -> None:
    behind = request(model="b")
    assert wake(queue_of(request(has_begun=True), request(), behind), models={"b"}) is behind


def test_a_tenant_at_its_limit_is_passed_over() -> None:
    behind = request("b")
    assert wake(queue_of(request("a"), behind), at_limit={"a"}) is behind


def test_room_is_asked_for_by_the_response_ratio_of_whose_turn_it_is() -> None:
    """Not by that of a tenant at its limit, which has waited longer."""
    queue = queue_of()
    for tenant, arrived in (("a", 0.0), ("b", 2.0), ("b", 1.0)):
        one = request(tenant)
        one.arrived, one.work = arrived, 1000.0
        queue.push(one)
    ratios: list[float] = []

    def can_start(model: str | None, response_ratio: Callable[[], float]) -> bool:
        return bool(ratios.append(response_ratio()))

    queue.wake_next(can_start, lambda tenant: tenant != "a", now=3.0)
    assert ratios == [pytest.approx(2.0 / 1000)]
    queue.wake_next(can_start, lambda _: False, now=3.0)
    assert ratios[1:] == [0.0]


def test_next_in_turn_is_who_would_start_next_whatever_its_model_and_stays_where_it_is() -> None:
    begun, early, other = request(has_begun=True), request("a"), request("b", model="n")
    queue = queue_of(begun)
    assert queue.next_in_turn(lambda tenant: True, now=1.0) is None
    for one in (early, other):
        queue.push(one)
    assert queue.next_in_turn(lambda tenant: tenant != "b", now=1.0) is early
    assert queue.next_in_turn(lambda tenant: tenant != "a", now=1.0) is other
    assert queue.next_in_turn(lambda tenant: False, now=1.0) is None
    assert len(queue) == 3


def test_nobody_is_woken_where_nothing_can_start() -> None:
    assert wake(queue_of(request()), models=()) is None
    assert wake(queue_of()) is None


def test_only_one_is_woken_until_it_has_started_or_gone() -> None:
    first, second, third = request(), request(), request()
    queue = queue_of(first, second, third)
    assert wake(queue) is first
    assert wake(queue) is None
    queue.started(first)
    assert wake(queue) is second
    queue.remove(second)
    assert wake(queue) is third


def test_one_that_lost_its_place_is_first_again_and_has_paid_nothing() -> None:
    first, behind = request("a"), request("b")
    queue = queue_of(behind, first)
    for _ in range(5):
        assert wake(queue) is first
        queue.put_back(first)
    assert start_all(queue) == [first, behind]


def test_a_woken_one_pays_even_if_its_tenant_has_nothing_else_waiting_any_more() -> None:
    first, second, other = request("a"), request("a"), request("b", num_tokens=100_000)
    queue = queue_of(other, first, second)
    assert wake(queue) is first
    queue.remove(second)
    queue.started(first)
    assert wake(queue) is other


def test_a_woken_one_counts_as_waiting() -> None:
    queue = queue_of(request(), max_requests=1)
    wake(queue)
    newcomer = request()
    assert (len(queue), queue.push(newcomer)) == (1, newcomer)


def test_a_full_queue_refuses_the_tenant_that_has_the_most_there() -> None:
    flood = [request("flood") for _ in range(3)]
    queue = queue_of(*flood, max_requests=3)
    assert queue.push(request("quiet")) is flood[-1]
    newest = request("flood")
    assert queue.push(newest) is newest
    assert len(queue) == 3


def test_whoever_has_as_many_as_the_longest_is_refused_itself() -> None:
    queue = queue_of(request("a"), request("b"), max_requests=2)
    queue_newcomer, again = request("c"), request("a")
    assert queue.push(queue_newcomer) is queue_newcomer
    assert queue.push(again) is again


def test_within_a_tenant_the_least_pressing_makes_way() -> None:
    lazy = request(priority=5)
    queue = queue_of(request(), lazy, max_requests=2)
    assert queue.push(request()) is lazy


def test_a_woken_request_never_makes_way() -> None:
    woken = request(priority=5)
    queue = queue_of(woken, max_requests=1)
    wake(queue)
    urgent = request()
    assert queue.push(urgent) is urgent
    queue.put_back(woken)
    assert wake(queue) is woken


def test_streams_that_have_begun_are_never_refused_and_take_no_room() -> None:
    queue = queue_of(request(), max_requests=1)
    assert [queue.push(request(has_begun=True)) for _ in range(3)] == [None] * 3
    assert queue.num_begun == 3
    wake(queue)
    full = request()
    assert queue.push(full) is full
    roomy = queue_of(request(has_begun=True), request(has_begun=True), max_requests=2)
    assert [roomy.push(request()) for _ in range(2)] == [None] * 2


def test_removing_may_be_repeated() -> None:
    gone = request()
    queue = queue_of(gone)
    queue.remove(gone)
    queue.remove(gone)
    assert (len(queue), queue.held_demand(), wake(queue)) == (0, {}, None)


def test_held_demand_is_told_by_tenant_with_streams_that_have_begun_and_whoever_is_woken() -> None:
    queue = queue_of(request("a"), request("a"), request("b"))
    queue.push(request("b", has_begun=True))
    queue.push(request("c", has_begun=True))
    assert {name: held.num_requests for name, held in queue.held_demand().items()} == {"a": 2, "b": 2, "c": 1}
    wake(queue)
    assert sum(held.num_requests for held in queue.held_demand().values()) == 5


@pytest.mark.parametrize(("work", "tokens"), [(100.0, 100), (1000.0, 1000), (1500.0, 1000), (0.0, 0)])
def test_of_what_is_held_only_tokens_that_no_engine_has_cached_count(work: float, tokens: float) -> None:
    held = request("a", num_tokens=1000)
    held.work = work
    assert queue_of(held).held_demand() == {"a": HeldDemand(1, tokens)}


def test_waking_asks_about_each_model_once_however_many_wait() -> None:
    num_requests, num_models = 10_000, 50
    queue = RequestQueue(num_requests)
    for number in range(num_requests):
        queue.push(request(f"t{number % 100}", model=f"m{number % num_models}"))
    asked: list[str | None] = []
    queue.wake_next(lambda model, _: bool(asked.append(model)), lambda _: True, now=0.0)
    assert len(asked) == num_models

"""Waiting, waking, time limits and refusals, in virtual time."""

from collections.abc import Callable, Iterator

import pytest
from benchmarks.routing.virtual_time import VirtualTimeLoop
from tests.router.admission.places import Asked, Places

from kvasir_router.admission.admission import Admission, QueueLimits
from kvasir_router.admission.queued_request import QueuedRequest, Waiting
from kvasir_router.admission.tenant_limits import TenantLimits
from kvasir_router.errors import (
    DeadlineExceededError,
    QueueFullError,
    QueueWaitExceededError,
    RequestError,
    TenantInFlightLimitError,
)


@pytest.fixture
def loop() -> Iterator[VirtualTimeLoop]:
    loop = VirtualTimeLoop()
    yield loop
    loop.close()


def refusal(asked: Asked, kind: type[RequestError]) -> RequestError:
    assert isinstance(asked.error, kind), asked.error
    return asked.error


def test_starts_at_once_where_there_is_room(loop: VirtualTimeLoop) -> None:
    places = Places(loop, max_requests=0)
    places.give()
    assert places.ask().waited_seconds == 0.0


def test_waiting_requests_start_in_order_of_arrival_with_the_time_waited(loop: VirtualTimeLoop) -> None:
    places = Places(loop)
    asked = [places.ask() for _ in range(3)]
    loop.advance(2.0)
    places.give(3)
    assert places.started == asked
    assert [one.waited_seconds for one in asked] == pytest.approx([2.0] * 3)


def test_one_free_place_starts_one_request(loop: VirtualTimeLoop) -> None:
    places = Places(loop)
    first, second = places.ask(), places.ask()
    places.give()
    assert (places.started, places.admission.num_waiting) == ([first], 1)
    places.finish(first)
    assert places.started == [first, second]


def test_a_newcomer_cannot_slip_past_a_woken_request(loop: VirtualTimeLoop) -> None:
    places = Places(loop)
    early = places.ask()
    places.free["m"] += 1
    loop.call(places.admission.wake)  # has not run yet
    late = places.ask()
    assert places.started == [early]
    assert late.is_waiting


def test_a_full_queue_refuses_with_retry_after(loop: VirtualTimeLoop) -> None:
    places = Places(loop, max_requests=1)
    places.ask()
    refused = refusal(places.ask(), QueueFullError)
    assert (refused.status, refused.retry_after_seconds) == (429, 1)
    assert "1 requests are already waiting" in str(refused)


def test_a_flooding_tenant_makes_way_in_a_full_queue(loop: VirtualTimeLoop) -> None:
    places = Places(loop, max_requests=2)
    places.ask("flood")
    evicted = places.ask("flood")
    quiet = places.ask("quiet")
    refusal(evicted, QueueFullError)
    places.give()
    assert places.started == [quiet]


def test_when_to_try_again_is_told_by_how_fast_the_queue_drains(loop: VirtualTimeLoop) -> None:
    places = Places(loop, max_requests=8)
    for _ in range(8):
        places.ask()
    for _ in range(4):
        loop.advance(2.0)
        places.give()
    for _ in range(4):
        places.ask()
    assert refusal(places.ask(), QueueFullError).retry_after_seconds == 16


def test_nobody_is_sent_away_for_longer_than_a_minute(loop: VirtualTimeLoop) -> None:
    places = Places(loop, max_requests=8, max_wait_seconds=3600.0)
    for _ in range(8):
        places.ask()
    loop.advance(50.0)
    places.give()
    places.ask()
    assert refusal(places.ask(), QueueFullError).retry_after_seconds == 60


def test_waiting_too_long_is_refused_and_leaves_the_queue(loop: VirtualTimeLoop) -> None:
    places = Places(loop)
    asked = places.ask()
    loop.advance(59.9)
    assert asked.is_waiting
    loop.advance(0.2)
    refused = refusal(asked, QueueWaitExceededError)
    assert (refused.status, refused.retry_after_seconds) == (503, 5)
    assert "within 60 s" in str(refused)
    assert places.admission.num_waiting == 0


def test_time_waited_before_a_retry_counts(loop: VirtualTimeLoop) -> None:
    refusal(Places(loop).ask(waited_seconds=60.0), QueueWaitExceededError)


def test_a_request_whose_client_left_makes_room_for_the_next(loop: VirtualTimeLoop) -> None:
    places = Places(loop)
    gone, behind = places.ask(), places.ask()
    places.free["m"] += 1
    loop.call(places.admission.wake)
    places.cancel(gone)
    assert places.started == [behind]


def test_a_wake_in_the_moment_in_which_a_client_leaves_is_not_lost(loop: VirtualTimeLoop) -> None:
    places = Places(loop)
    gone, behind = places.ask(), places.ask()
    gone.task.cancel()
    places.give()
    assert places.started == [behind]


def test_a_request_may_make_way_in_the_moment_in_which_its_client_leaves(loop: VirtualTimeLoop) -> None:
    places = Places(loop, max_requests=2)
    places.ask("flood")
    leaving = places.ask("flood")
    loop.call_soon(leaving.task.cancel)  # in the turn in which the next one comes
    quiet = places.ask("quiet")
    assert quiet.is_waiting
    assert places.admission.num_waiting == 2


def test_a_request_that_no_endpoint_fits_does_not_block_those_behind(loop: VirtualTimeLoop) -> None:
    places = Places(loop)
    places.ask(model="away")
    behind = places.ask()
    places.give()
    newcomer = places.ask()
    assert places.started == [behind]
    places.give()
    assert places.started == [behind, newcomer]


def test_a_newcomer_starts_at_once_where_those_that_wait_cannot(loop: VirtualTimeLoop) -> None:
    places = Places(loop)
    places.ask(model="away")
    places.give()
    newcomer = places.ask()
    assert (places.started, newcomer.waited_seconds) == ([newcomer], 0.0)


def test_streams_that_have_begun_come_first_and_beyond_the_bound(loop: VirtualTimeLoop) -> None:
    places = Places(loop, max_requests=1)
    behind = places.ask()
    begun = [places.ask(has_begun=True) for _ in range(2)]
    places.give(3)
    assert places.started == [*begun, behind]


def test_a_stream_that_has_begun_takes_a_free_place_before_those_that_wait(loop: VirtualTimeLoop) -> None:
    places = Places(loop, tenant_max_in_flight=1)
    first = places.ask()
    places.give(2)
    held_up = places.ask()
    begun = places.ask(has_begun=True)
    assert places.started == [first, begun]
    assert held_up.is_waiting


def test_no_stream_that_has_begun_slips_past_another(loop: VirtualTimeLoop) -> None:
    places = Places(loop)
    first = places.ask(has_begun=True)
    places.free["m"] += 1  # nobody has been told yet
    second = places.ask(has_begun=True)
    assert places.started == [first]
    assert second.is_waiting


def test_a_woken_request_that_lost_its_place_wakes_the_next_that_fits(loop: VirtualTimeLoop) -> None:
    places = Places(loop)
    passed_over, fitting = places.ask(model="a"), places.ask(model="b")
    places.free["b"] = 1
    places.give_and_take_back("a")
    assert places.started == [fitting]
    places.give(model="a")
    assert places.started == [fitting, passed_over]


def test_a_tenant_has_no_more_in_flight_than_its_limit_and_holds_up_nobody_else(loop: VirtualTimeLoop) -> None:
    places = Places(loop, tenant_max_in_flight=1)
    places.give(9)
    first, second, other = places.ask("a"), places.ask("a"), places.ask("b")
    assert places.started == [first, other]
    places.finish(first)
    assert places.started == [first, other, second]


def test_whoever_waits_for_its_own_requests_too_long_is_told_so(loop: VirtualTimeLoop) -> None:
    places = Places(loop, tenant_max_in_flight=1)
    places.give(9)
    places.ask("a")
    late = places.ask("a")
    loop.advance(61.0)
    assert "the tenant a had as many requests in flight as it may for 60 s" in str(
        refusal(late, TenantInFlightLimitError)
    )


def test_a_deadline_ends_the_wait_earlier_and_not_later(loop: VirtualTimeLoop) -> None:
    places = Places(loop)
    short, long = places.ask(deadline_seconds=2.5), places.ask(deadline_seconds=100.0)
    loop.advance(2.6)
    assert "within the 2.5 s of its deadline" in str(refusal(short, DeadlineExceededError))
    loop.advance(60.0)
    refusal(long, QueueWaitExceededError)


def test_a_stream_that_has_begun_has_no_deadline_any_more(loop: VirtualTimeLoop) -> None:
    places = Places(loop)
    begun = places.ask(deadline_seconds=0.5, has_begun=True)
    loop.advance(1.0)
    places.give()
    assert places.started == [begun]


def draining(loop: VirtualTimeLoop) -> Places:
    """One request in two seconds, and five that wait."""
    places = Places(loop, max_requests=100)
    for _ in range(10):
        places.ask()
    for _ in range(5):
        loop.advance(2.0)
        places.give()
    return places


def test_a_missed_deadline_says_when_what_waits_will_have_started(loop: VirtualTimeLoop) -> None:
    places = draining(loop)
    late = places.ask(deadline_seconds=0.1)
    loop.advance(0.2)
    assert (
        refusal(late, DeadlineExceededError).retry_after_seconds == 13
    )  # six at one in two seconds, and nothing in the last moment


def test_what_was_measured_outlives_a_time_in_which_nothing_waits(loop: VirtualTimeLoop) -> None:
    places = draining(loop)
    places.give(5)
    loop.advance(3600.0)
    for _ in range(5):
        places.ask()
    late = places.ask(deadline_seconds=0.1)
    loop.advance(0.2)
    assert refusal(late, DeadlineExceededError).retry_after_seconds == 6  # the last five started at once


def test_time_waited_before_a_retry_is_gone_from_a_deadline(loop: VirtualTimeLoop) -> None:
    late = draining(loop).ask(deadline_seconds=5.0, waited_seconds=4.9)
    assert late.is_waiting
    loop.advance(0.2)
    refusal(late, DeadlineExceededError)


def test_new_limits_hold_for_requests_that_come_from_now_on(loop: VirtualTimeLoop) -> None:
    places = Places(loop, max_requests=1)
    places.ask()
    places.admission.configure(QueueLimits(2, 5.0))
    impatient = places.ask()
    refusal(places.ask(), QueueFullError)
    loop.advance(6.0)
    refusal(impatient, QueueWaitExceededError)
    assert places.admission.num_waiting == 1


class Foreseen:
    """Room comes with time alone, and is told beforehand."""

    def __init__(self, loop: VirtualTimeLoop, room_at: float) -> None:
        self.loop = loop
        self.room_at = room_at
        self.admission = Admission(self.seconds_to_room, QueueLimits(10, 60.0), TenantLimits(None, None, lambda: None))

    def seconds_to_room(self, model: str | None, response_ratio: Callable[[], float]) -> float:
        return max(self.room_at - self.loop.time(), 0.0)


def test_a_request_starts_by_the_ratio_that_it_has_by_then(loop: VirtualTimeLoop) -> None:
    """At once it has none; room is for what has waited 2 s for each 1,000 tokens."""
    ratios: list[float] = []

    def seconds_to_room(model: str | None, response_ratio: Callable[[], float]) -> float:
        ratios.append(response_ratio())
        return 0.0 if ratios[-1] >= 0.002 else 1.0

    admission = Admission(seconds_to_room, QueueLimits(10, 60.0), TenantLimits(None, None, lambda: None))
    request = QueuedRequest("m", "t", 1000, estimate=lambda: 1000.0)
    assert loop.run_until_complete(admission.admit(request)) == pytest.approx(2.0)
    assert ratios[0] == 0.0


def test_a_request_starts_when_time_alone_has_made_room(loop: VirtualTimeLoop) -> None:
    foreseen = Foreseen(loop, room_at=5.0)
    waited = loop.run_until_complete(foreseen.admission.admit(QueuedRequest("m", "t", 1000)))
    assert waited == pytest.approx(5.0)


def test_it_tells_how_long_the_next_to_start_has_waited(loop: VirtualTimeLoop) -> None:
    def next_waiting() -> Waiting | None:
        return loop.run_until_complete(asked())

    async def asked() -> Waiting | None:
        return places.admission.next_waiting()

    places = Places(loop)
    assert next_waiting() is None
    first = places.ask(num_tokens=100, estimate=lambda: 1000.0)
    places.ask(num_tokens=100, estimate=lambda: 4000.0)
    loop.advance(2.0)
    assert next_waiting() == Waiting(pytest.approx(2.0), 1000.0)
    places.cancel(first)
    assert next_waiting() == Waiting(pytest.approx(2.0), 4000.0)

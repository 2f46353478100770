"""What peers tell counts in the load as this router's own requests do, until they say otherwise or are forgotten."""

from collections.abc import Callable

import pytest
from tests.router.parts import a_request

from kvasir_router.admission.queued_request import Waiting
from kvasir_router.endpoints.address import Address
from kvasir_router.placement.placement import Leg, Placement
from kvasir_router.service.ledger import Ledger, Ticket
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.load_report import LoadReport
from kvasir_router.service.peer_news import Finished, News, Prefilled
from kvasir_router.service.peers import Peers
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import Endpoint, EndpointState, Registry

A, B = "http://a:8000", "http://b:8000"
REPORT = LoadReport(
    num_running=0, num_waiting=1, waiting_uncached_tokens=100, running_uncached_tokens=0, kv_used_tokens=0,
    kv_capacity_tokens=10_000, steps_per_second=0.0, prefill_tokens_per_second=None, arrived=("x",), instance="one",
)  # fmt: skip


class Router:
    """Its loads, its ledger and what it hears; not its queue, of which `waiting` is the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_room = self.num_events = 0
        self.waiting: Waiting | None = None
        fleet = FleetPrefill(1000.0)
        self.registry = Registry(lambda: EndpointLoad(8, fleet.new_member()), lambda: None, {"m"})
        self.registry.set_addresses({Address(A), Address(B)}, EndpointState.READY)
        self.peers = Peers(self.registry, lambda: self.now, lambda: self.waiting, self._count_room)
        self.peers.on_event = self._count_event
        self.ledger = Ledger(lambda: None, self.peers)

    def endpoint(self, url: str = A) -> Endpoint:
        found = self.registry.get(url)
        assert found is not None
        return found

    def dispatch(self, request_id: str = "x", num_tokens: int = 100, cached: int = 0) -> Ticket:
        leg = Leg(self.endpoint(), cached, num_tokens - cached)
        (ticket,) = self.ledger.dispatch(a_request(num_tokens, request_id=request_id), Placement(leg), self.now)
        return ticket

    def _count_room(self) -> None:
        self.num_room += 1

    def _count_event(self) -> None:
        self.num_events += 1


@pytest.fixture
def pair() -> tuple[Router, Router]:
    return Router(), Router()


def told(one: Router, other: Router, name: bytes = b"one") -> None:
    news = one.peers.take()
    assert news is not None
    other.peers.hear(name, news)


def test_a_peers_request_is_ahead_of_whatever_comes_next(pair: tuple[Router, Router]) -> None:
    one, other = pair
    one.dispatch(num_tokens=100, cached=60)
    told(one, other)
    load = other.endpoint().load
    assert load.prefill_tokens == 40
    assert load.queue_seconds(0.0) == one.endpoint().load.queue_seconds(0.0) > 0
    assert other.endpoint(B).load.prefill_tokens == 0


def test_it_takes_no_place_of_this_routers_limit_in_flight(pair: tuple[Router, Router]) -> None:
    one, other = pair
    ticket = one.dispatch()
    told(one, other)
    assert other.endpoint().load.num_in_flight == 0
    ticket.finish()
    told(one, other)
    assert other.endpoint().load.num_in_flight == 0


def test_a_peers_first_token_ends_its_prefill_and_teaches_the_rate(pair: tuple[Router, Router]) -> None:
    one, other = pair
    ticket = one.dispatch()
    told(one, other)
    one.now = other.now = 5.0
    ticket.first_token(5.0)
    told(one, other)
    load = other.endpoint().load
    assert (load.prefill_tokens, load.num_decoding) == (0, 1)
    assert load.prefill.tokens_per_second == one.endpoint().load.prefill.tokens_per_second < 1000.0


def test_a_first_token_teaches_the_peers_own_seconds_however_late_it_is_heard(pair: tuple[Router, Router]) -> None:
    """This router hears of begin and first token in one turn, after a stall."""
    one, other = pair
    one.now = 2.0
    ticket = one.dispatch()
    one.now = 7.0
    ticket.first_token(7.0)
    other.now = 30.0
    told(one, other)
    own, heard = (router.endpoint().load.prefill.tokens_per_second for router in pair)
    assert heard == pytest.approx(own)
    assert own < 1000.0


def test_a_prefill_that_is_only_taken_to_be_over_teaches_nothing(pair: tuple[Router, Router]) -> None:
    one, other = pair
    ticket = one.dispatch()
    ticket.release_prefill()
    other.now = 5.0
    told(one, other)
    assert other.endpoint().load.prefill_tokens == 0
    assert other.endpoint().load.prefill.num_observations == 0


def test_a_peers_request_counts_until_its_end(pair: tuple[Router, Router]) -> None:
    one, other = pair
    ticket = one.dispatch()
    told(one, other)
    ticket.finish()
    told(one, other)
    load = other.endpoint().load
    assert (load.prefill_tokens, load.resident_tokens, load.num_decoding) == (0, 0, 0)


@pytest.mark.parametrize("is_reported_first", [False, True])
def test_what_the_engine_has_named_is_not_counted_twice(
    pair: tuple[Router, Router], *, is_reported_first: bool
) -> None:
    one, other = pair
    one.dispatch()
    if is_reported_first:
        other.endpoint().load.report(REPORT, 0.0)
        told(one, other)
    else:
        told(one, other)
        other.endpoint().load.report(REPORT, 0.0)
    assert other.endpoint().load.prefill_tokens == 100


def test_an_own_request_of_an_id_that_the_engine_has_just_named_is_another(pair: tuple[Router, Router]) -> None:
    one, _ = pair
    one.endpoint().load.report(REPORT, 0.0)
    one.dispatch()
    assert one.endpoint().load.prefill_tokens == 200


def test_a_peer_that_is_forgotten_leaves_nothing(pair: tuple[Router, Router]) -> None:
    one, other = pair
    one.dispatch()
    one.waiting = Waiting(10.0, 1.0)
    told(one, other, b"one")
    third = Router()
    third.dispatch(num_tokens=30)
    told(third, other, b"third")
    num_room = other.num_room
    other.peers.forget(b"one")
    assert other.endpoint().load.prefill_tokens == 30
    assert other.peers.num_before(float) == 0
    assert other.num_room == num_room + 1
    other.peers.forget(b"one")


def test_tickets_of_two_peers_are_told_apart(pair: tuple[Router, Router]) -> None:
    one, other = pair
    third = Router()
    one.dispatch(num_tokens=100)
    ticket = third.dispatch(num_tokens=30)
    told(one, other, b"one")
    told(third, other, b"third")
    ticket.finish()
    told(third, other, b"third")
    assert other.endpoint().load.prefill_tokens == 100


def test_what_began_before_it_listened_is_nothing_to_it(pair: tuple[Router, Router]) -> None:
    _, other = pair
    other.peers.hear(b"one", News([Prefilled(1, 0, 1.0), Finished(1)]))
    assert other.endpoint().load.num_decoding == 0


def test_an_endpoint_that_only_the_peer_knows_is_nothing_to_it(pair: tuple[Router, Router]) -> None:
    one, other = pair
    other.registry.set_addresses({Address(B)}, EndpointState.READY)
    one.dispatch().finish()
    told(one, other)
    assert other.endpoint(B).load.num_decoding == 0


def test_there_is_something_to_tell_after_each_event_and_nothing_else(pair: tuple[Router, Router]) -> None:
    one, _ = pair
    assert one.peers.take() is None
    ticket = one.dispatch()
    ticket.first_token(1.0)
    ticket.finish()
    assert one.num_events == 3
    news = one.peers.take()
    assert news is not None
    assert [type(event).__name__ for event in news.events] == ["Dispatched", "Prefilled", "Finished"]
    assert one.peers.take() is None


def test_who_waits_is_told_for_as_long_as_anybody_does_and_once_that_nobody_does(pair: tuple[Router, Router]) -> None:
    one, _ = pair
    one.waiting = Waiting(1.0, 300.0)
    assert [one.peers.take(), one.peers.take()] == [News([], Waiting(1.0, 300.0))] * 2
    one.waiting = None
    assert [one.peers.take(), one.peers.take()] == [News([], None), None]


def test_room_is_looked_for_after_each_news(pair: tuple[Router, Router]) -> None:
    one, other = pair
    one.dispatch()
    told(one, other)
    assert other.num_room == 1


@pytest.mark.parametrize(
    ("ratio", "num_before"),
    [(0.0, 2), (0.0099, 2), (0.01, 1), (0.0199, 1), (0.02, 0), (1.0, 0)],
)
def test_a_peers_next_goes_before_by_a_higher_response_ratio(
    pair: tuple[Router, Router], ratio: float, num_before: int
) -> None:
    """They have waited 3 s for 300 and 4 s for 200 of work; a second has passed for both since the first was told."""
    one, other = pair
    for name, waiting in ((b"one", Waiting(2.0, 300.0)), (b"third", Waiting(3.0, 200.0))):
        one.waiting = waiting
        told(one, other, name)
    other.now = 1.0
    assert other.peers.num_before(lambda: ratio) == num_before


def test_nobody_is_before_once_nobody_waits(pair: tuple[Router, Router]) -> None:
    one, other = pair
    for waiting in (Waiting(2.0, 300.0), None):
        one.waiting = waiting
        told(one, other)
    not_asked: Callable[[], float] = pytest.fail  # type: ignore[assignment]
    assert other.peers.num_before(not_asked) == 0

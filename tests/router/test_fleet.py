from dataclasses import replace

import pytest

from kvasir_router.endpoints.endpoint import Address, Role
from kvasir_router.fleet import EndpointState, Fleet, Ticket
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex
from kvasir_router.request import EXPECTED_OUTPUT_TOKENS, InferenceRequest

REQUEST = InferenceRequest("/v1/completions", "m", True, 100, tuple(range(10)))
A, B = Address("http://a"), Address("http://b")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Picture:
    """A fleet of A and B, both ready, with its clock and the count of calls to on_room."""

    def __init__(self, *, own_models: frozenset[str] = frozenset({"m"}), max_in_flight: int = 4) -> None:
        self.clock = Clock()
        self.num_room_calls = 0
        self.fleet = Fleet(
            ApproximatePrefixIndex(100, 1000.0),
            self.clock,
            self._on_room,
            max_in_flight=max_in_flight,
            block_tokens=10,
            own_models=own_models,
        )
        self.fleet.set_addresses({A, B}, EndpointState.READY)

    def _on_room(self) -> None:
        self.num_room_calls += 1

    def dispatch(self, url: str = A.url) -> Ticket:
        return self.fleet.dispatch(REQUEST, self.view(url))

    def view(self, url: str = A.url):  # type: ignore[no-untyped-def]
        return next(view for view in self.fleet.snapshot(REQUEST).endpoints if view.url == url)


def test_a_dispatched_request_counts_until_its_end() -> None:
    picture = Picture()
    ticket = picture.dispatch()
    view = picture.view()
    assert (view.num_in_flight, view.prefill_tokens, view.resident_tokens) == (1, 100, 100 + EXPECTED_OUTPUT_TOKENS)
    ticket.finish()
    view = picture.view()
    assert (view.num_in_flight, view.prefill_tokens, view.resident_tokens) == (0, 0, 0)


def test_prefill_tokens_are_released_at_the_first_token() -> None:
    picture = Picture()
    ticket = picture.dispatch()
    ticket.first_token(1.0)
    assert (picture.view().prefill_tokens, picture.view().num_in_flight) == (0, 1)


def test_finishing_twice_counts_once() -> None:
    picture = Picture()
    ticket = picture.dispatch()
    ticket.finish()
    ticket.finish()
    assert picture.view().num_in_flight == 0


def test_a_prompt_is_expected_to_be_cached_right_after_dispatch() -> None:
    picture = Picture()
    picture.dispatch()
    assert (picture.view(A.url).cached_tokens, picture.view(B.url).cached_tokens) == (100, 0)


def test_only_the_uncached_part_of_a_prompt_counts_as_work() -> None:
    picture = Picture()
    picture.dispatch().finish()
    picture.dispatch()
    assert picture.view().prefill_tokens == 0


def test_first_tokens_teach_the_rate_with_the_queue_ahead() -> None:
    picture = Picture()
    before = picture.view().prefill_rate
    for _ in range(30):
        ticket = picture.dispatch()
        picture.clock.now += 5.0
        ticket.first_token(picture.clock.now)
        ticket.finish()
        picture.fleet.set_addresses({B}, EndpointState.READY)
        picture.fleet.set_addresses({A, B}, EndpointState.READY)
    assert picture.view().prefill_rate == before  # a new endpoint starts afresh
    ticket = picture.dispatch()
    ticket.first_token(picture.clock.now + 5.0)
    assert picture.view().prefill_rate < before


def test_a_requests_time_is_that_of_the_tokens_before_it_too() -> None:
    """Pairs on an engine of 1,000 tokens/s: the second waits for the first, and is no slower for that."""
    picture = Picture()
    for number in range(0, 100, 2):
        tickets = []
        for prompt in (number, number + 1):
            request = replace(REQUEST, num_prompt_tokens=1000, block_hashes=(1000 + prompt,))
            tickets.append(picture.fleet.dispatch(request, picture.view()))
        for ticket in tickets:
            picture.clock.now += 1.0
            ticket.first_token(picture.clock.now)
            ticket.finish()
    assert picture.view().prefill_rate == pytest.approx(1000, rel=0.1)


def test_no_more_is_expected_to_be_cached_than_the_engines_kv_cache_holds() -> None:
    picture = Picture()
    picture.fleet.set_kv(A.url, usage=0.0, capacity_tokens=59)
    picture.dispatch()
    assert picture.view().cached_tokens == 50


def test_room_is_announced_when_a_request_ends() -> None:
    picture = Picture()
    ticket = picture.dispatch()
    before = picture.num_room_calls
    ticket.finish()
    assert picture.num_room_calls == before + 1


def test_full_endpoints_cannot_take_more() -> None:
    picture = Picture(max_in_flight=1)
    picture.dispatch(A.url)
    assert picture.fleet.can_place("m")
    picture.dispatch(B.url)
    assert not picture.fleet.can_place("m")


def test_endpoints_that_are_not_ready_are_not_in_the_snapshot() -> None:
    picture = Picture()
    picture.fleet.set_state(A.url, EndpointState.UNREACHABLE)
    assert [view.url for view in picture.fleet.snapshot(REQUEST).endpoints] == [B.url]


def test_models_are_waited_for_when_they_are_to_be_learned() -> None:
    picture = Picture(own_models=frozenset())
    assert not picture.fleet.can_place("m")
    picture.fleet.set_models(A.url, frozenset({"m"}))
    assert picture.fleet.can_place("m")
    assert not picture.fleet.can_place("other")


def test_every_endpoint_serves_the_own_model_and_those_that_list_an_adapter_serve_that() -> None:
    picture = Picture()
    picture.fleet.set_models(A.url, frozenset({"listed-otherwise", "sql"}))
    assert picture.fleet.can_place("m")
    assert picture.fleet.can_place("m", avoid={A.url})
    assert picture.fleet.can_place("sql")
    assert not picture.fleet.can_place("sql", avoid={A.url})
    assert (picture.view(A.url).models, picture.view(B.url).models) == ({"m", "listed-otherwise", "sql"}, {"m"})


def test_what_an_endpoint_lists_after_it_is_gone_is_not_known() -> None:
    picture = Picture()
    picture.fleet.set_addresses({B}, EndpointState.READY)
    picture.fleet.set_models(A.url, frozenset({"sql"}))
    assert picture.fleet.known_models() == frozenset()


def test_models_of_an_endpoint_that_is_gone_are_no_longer_known() -> None:
    picture = Picture()
    picture.fleet.set_models(A.url, frozenset({"sql"}))
    picture.fleet.set_addresses({B}, EndpointState.READY)
    assert picture.fleet.known_models() == frozenset()
    assert not picture.fleet.can_place("sql")


def test_a_prefill_engine_gets_no_clients_requests() -> None:
    picture = Picture()
    picture.fleet.set_addresses({replace(A, role=Role.PREFILL), replace(B, role=Role.DECODE)}, EndpointState.READY)
    assert [view.url for view in picture.fleet.snapshot(REQUEST).endpoints] == [B.url]
    assert not picture.fleet.can_place("m", avoid={B.url})


def test_new_labels_of_a_pod_are_seen_and_cost_it_nothing() -> None:
    picture = Picture()
    picture.dispatch()
    picture.fleet.set_addresses({replace(A, revision="r", traffic_weight=10.0), B}, EndpointState.UNKNOWN)
    view = picture.view()
    assert (view.revision, view.traffic_weight, view.num_in_flight, view.cached_tokens) == ("r", 10.0, 1, 100)
    assert picture.fleet.revisions() == {"r", ""}


def test_a_pod_that_takes_over_an_address_inherits_nothing() -> None:
    picture = Picture()
    picture.dispatch()
    picture.fleet.set_addresses({Address(A.url, uid="new"), B}, EndpointState.READY)
    assert (picture.view().cached_tokens, picture.view().num_in_flight) == (0, 0)


def test_a_request_on_a_gone_endpoint_still_ends() -> None:
    picture = Picture()
    ticket = picture.dispatch()
    picture.fleet.set_addresses({B}, EndpointState.READY)
    ticket.finish()
    assert picture.fleet.urls() == {B.url}


def test_known_addresses_keep_their_state() -> None:
    picture = Picture()
    picture.fleet.set_state(A.url, EndpointState.UNREACHABLE)
    picture.fleet.set_addresses({A, B, Address("http://c")}, EndpointState.READY)
    assert picture.fleet.num_in_state(EndpointState.UNREACHABLE) == 1

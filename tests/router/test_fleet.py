from kvasir_router.endpoints.endpoint import Address
from kvasir_router.fleet import EndpointState, Fleet, Ticket
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex
from kvasir_router.request import EXPECTED_OUTPUT_TOKENS, InferenceRequest

REQUEST = InferenceRequest("/v1/completions", b"", "m", True, 100, tuple(range(10)))
A, B = Address("http://a"), Address("http://b")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Picture:
    """A fleet of A and B, both ready, with its clock and the count of calls to on_room."""

    def __init__(self, *, learn_models: bool = False, max_in_flight: int = 4) -> None:
        self.clock = Clock()
        self.num_room_calls = 0
        self.fleet = Fleet(
            ApproximatePrefixIndex(100, 1000.0),
            self.clock,
            self._on_room,
            max_in_flight=max_in_flight,
            block_tokens=10,
            learn_models=learn_models,
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
    picture = Picture(learn_models=True)
    assert not picture.fleet.can_place("m")
    picture.fleet.set_models(A.url, frozenset({"m"}))
    assert picture.fleet.can_place("m")
    assert not picture.fleet.can_place("other")


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

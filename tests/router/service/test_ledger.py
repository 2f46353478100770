import pytest
from tests.router.parts import a_request, an_endpoint

from kvasir_router.dialects.openai import EXPECTED_OUTPUT_TOKENS
from kvasir_router.dialects.text_prompts import Embeddings
from kvasir_router.placement.placement import Leg, Placement
from kvasir_router.service.ledger import Ledger, Ticket
from kvasir_router.service.prefill_rate import work
from kvasir_router.service.registry import Endpoint


class Room:
    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1


def dispatch(ledger: Ledger, endpoint: Endpoint, num_tokens: int = 100, *, cached: int = 0, now: float = 0.0) -> Ticket:
    leg = Leg(endpoint, cached, num_tokens - cached)
    (ticket,) = ledger.dispatch(a_request(num_tokens), Placement(leg), now)
    return ticket


def counts(endpoint: Endpoint) -> tuple[int, int, int]:
    return endpoint.load.num_in_flight, endpoint.load.prefill_tokens, endpoint.load.resident_tokens


def test_a_dispatched_request_counts_until_its_end() -> None:
    endpoint = an_endpoint("a")
    ticket = dispatch(Ledger(Room()), endpoint)
    assert counts(endpoint) == (1, 100, 100 + EXPECTED_OUTPUT_TOKENS)
    ticket.finish()
    assert counts(endpoint) == (0, 0, 0)


def test_prefill_tokens_are_released_at_the_first_token() -> None:
    endpoint = an_endpoint("a")
    dispatch(Ledger(Room()), endpoint).first_token(1.0)
    assert counts(endpoint)[:2] == (1, 0)


def test_finishing_twice_counts_once() -> None:
    endpoint = an_endpoint("a")
    ticket = dispatch(Ledger(Room()), endpoint)
    ticket.finish()
    ticket.finish()
    assert endpoint.load.num_in_flight == 0


def test_only_the_uncached_part_of_a_prompt_counts_as_work() -> None:
    endpoint = an_endpoint("a")
    dispatch(Ledger(Room()), endpoint, cached=60)
    assert counts(endpoint)[1] == 40


def test_dispatches_are_numbered_in_their_order() -> None:
    ledger, endpoints = Ledger(Room()), [an_endpoint("a"), an_endpoint("b")]
    for endpoint in endpoints:
        dispatch(ledger, endpoint)
    assert [endpoint.load.last_dispatch for endpoint in endpoints] == [1, 2]


def test_each_leg_has_a_ticket_of_its_own() -> None:
    """The decode leg computes nothing of the prompt; each ends by itself."""
    decode, prefill = an_endpoint("decode"), an_endpoint("prefill")
    placement = Placement(Leg(decode, 0, 0), prefill=Leg(prefill, 30, 70))
    tickets = Ledger(Room()).dispatch(a_request(100), placement, 0.0)
    assert [ticket.url for ticket in tickets] == ["decode", "prefill"]
    assert (decode.load.prefill_tokens, prefill.load.prefill_tokens) == (0, 70)
    tickets[1].finish()
    assert (decode.load.num_in_flight, prefill.load.num_in_flight) == (1, 0)


def test_a_first_token_teaches_the_rate() -> None:
    endpoint = an_endpoint("a", prefill_rate=8000.0)
    dispatch(Ledger(Room()), endpoint).first_token(5.0)
    assert endpoint.load.prefill.tokens_per_second < 8000.0


def test_a_prompt_that_was_cached_teaches_nothing() -> None:
    endpoint = an_endpoint("a")
    dispatch(Ledger(Room()), endpoint, cached=100).first_token(5.0)
    assert endpoint.load.prefill.num_observations == 0


def test_a_requests_time_is_that_of_the_tokens_before_it_too() -> None:
    """Pairs on an engine of 1,000 tokens/s: the second waits for the first, and is no slower for that."""
    endpoint, ledger, now = an_endpoint("a", prefill_rate=8000.0), Ledger(Room()), 0.0
    for _ in range(50):
        tickets = [dispatch(ledger, endpoint, 1000, now=now) for _ in range(2)]
        for ticket in tickets:
            now += 1.0
            ticket.first_token(now)
            ticket.finish()
    assert endpoint.load.prefill.tokens_per_second == pytest.approx(1000, rel=0.1)


def test_room_is_announced_when_a_request_ends() -> None:
    room = Room()
    ticket = dispatch(Ledger(room), an_endpoint("a"))
    assert room.num_calls == 0
    ticket.finish()
    assert room.num_calls == 1


def test_those_in_flight_at_one_endpoint_are_interrupted() -> None:
    ledger, interrupted = Ledger(Room()), []
    one, other = an_endpoint("a"), an_endpoint("b")
    for name, endpoint in (("first", one), ("second", one), ("elsewhere", other), ("over", one)):
        ticket = dispatch(ledger, endpoint)
        ticket.on_interrupt = lambda _, name=name: interrupted.append(name)  # type: ignore[misc]
        if name == "over":
            ticket.finish()
    ledger.interrupt("a")
    assert sorted(interrupted) == ["first", "second"]


def test_it_knows_where_something_is_in_flight() -> None:
    ledger = Ledger(Room())
    tickets = [dispatch(ledger, an_endpoint("a")) for _ in range(2)]
    tickets[0].finish()
    assert (ledger.has_in_flight("a"), ledger.has_in_flight("b")) == (True, False)
    tickets[1].finish()
    assert not ledger.has_in_flight("a")


def test_it_counts_what_is_in_flight_at_an_endpoint() -> None:
    ledger, endpoint = Ledger(Room()), an_endpoint("a")
    assert len(ledger.tickets("a")) == 0
    tickets = [dispatch(ledger, endpoint) for _ in range(2)]
    dispatch(ledger, an_endpoint("b"))
    assert (len(ledger.tickets("a")), len(ledger.tickets("b"))) == (2, 1)
    for left, ticket in zip((1, 0), tickets, strict=True):
        ticket.first_token(1.0)
        ticket.finish()
        ticket.finish()
        assert len(ledger.tickets("a")) == left


def test_a_stream_can_move_once_it_has_begun() -> None:
    ticket = dispatch(Ledger(Room()), an_endpoint("a"))
    assert not ticket.can_move
    ticket.first_token(1.0)
    assert ticket.can_move


@pytest.mark.parametrize(("length", "can_move"), [(256, True), (257, False)])
def test_it_can_move_if_its_engine_keeps_an_id_so_long(length: int, can_move: bool) -> None:
    request = a_request(100, request_id="i" * length)
    (ticket,) = Ledger(Room()).dispatch(request, Placement(Leg(an_endpoint("a"), 0, 100)), 0.0)
    ticket.first_token(1.0)
    assert ticket.can_move is can_move


def test_of_two_with_one_id_the_second_cannot_be_named() -> None:
    ledger, endpoint = Ledger(Room()), an_endpoint("a")
    tickets = [dispatch(ledger, endpoint) for _ in range(2)]
    for ticket in tickets:
        ticket.first_token(1.0)
    assert [ticket.can_move for ticket in tickets] == [True, False]


def test_requests_of_one_id_are_counted_apart() -> None:
    ledger, endpoint = Ledger(Room()), an_endpoint("a")
    first, second = (dispatch(ledger, endpoint, num_tokens) for num_tokens in (100, 30))
    assert endpoint.load.num_in_flight == 2
    interrupted: list[str] = []
    for ticket in (first, second):
        ticket.on_interrupt = lambda _, ticket=ticket: interrupted.append(ticket.request_id)  # type: ignore[misc]
    ledger.interrupt("a")
    assert len(set(interrupted)) == 2
    first.finish()
    assert counts(endpoint)[:2] == (1, 30)
    second.finish()
    assert counts(endpoint) == (0, 0, 0)
    assert not ledger.has_in_flight("a")


def test_the_end_of_a_prefill_is_room_for_another_and_so_is_the_end_of_a_request() -> None:
    room = Room()
    ticket = dispatch(Ledger(room), an_endpoint("a"))
    ticket.first_token(1.0)
    ticket.release_prefill()
    assert room.num_calls == 1
    ticket.finish()
    assert room.num_calls == 2


def test_what_decodes_nothing_teaches_by_its_whole_answer() -> None:
    endpoint = an_endpoint("a", prefill_rate=8000.0)
    (ticket,) = Ledger(Room()).dispatch(a_request(100, dialect=Embeddings()), Placement(Leg(endpoint, 0, 100)), 0.0)
    ticket.whole_answer(5.0)
    assert endpoint.load.prefill.num_observations == 1
    assert endpoint.load.prefill_tokens == 0


def test_an_answer_in_one_piece_that_took_long_teaches_nothing() -> None:
    endpoint = an_endpoint("a", prefill_rate=1000.0)
    ticket = dispatch(Ledger(Room()), endpoint, 1000)
    ticket.release_prefill()
    ticket.whole_answer(30.0)
    assert endpoint.load.prefill.num_observations == 0
    dispatch(Ledger(Room()), endpoint, 1000).whole_answer(0.1)
    assert endpoint.load.prefill.tokens_per_second > 1000.0


def test_a_stream_that_goes_on_has_its_tokens_computed_again() -> None:
    with_tokens, without = (an_endpoint("a", prefill_rate=1000.0) for _ in range(2))
    dispatch(Ledger(Room()), with_tokens, 1000).first_token(4.0, num_generated_tokens=3000)
    dispatch(Ledger(Room()), without, 1000).first_token(4.0)
    assert with_tokens.load.prefill.tokens_per_second > 3 * without.load.prefill.tokens_per_second


def split(decode: Endpoint, prefill: Endpoint, num_tokens: int = 1000, *, now: float = 0.0) -> tuple[Ticket, ...]:
    """Tickets of a request whose prompt is computed at `prefill`; decode has 100 tokens of it."""
    placement = Placement(Leg(decode, 100, 0, received_tokens=num_tokens - 100), prefill=Leg(prefill, 0, num_tokens))
    return Ledger(Room()).dispatch(a_request(num_tokens), placement, now)


def test_what_a_decode_leg_receives_is_kv_and_no_prefill() -> None:
    decode, prefill = an_endpoint("d", kv_capacity_tokens=10**6), an_endpoint("p", kv_capacity_tokens=10**6)
    split(decode, prefill)
    assert counts(decode) == (1, 0, 1000 + EXPECTED_OUTPUT_TOKENS)
    assert decode.load.kv_used_tokens == 900 + EXPECTED_OUTPUT_TOKENS
    assert decode.load.queue_seconds(0.0) <= 0
    assert counts(prefill) == (1, 1000, 1000)


def test_a_prefill_leg_ends_with_its_only_token_which_teaches_its_rate() -> None:
    decode, prefill = an_endpoint("d"), an_endpoint("p", prefill_rate=8000.0)
    split(decode, prefill)[1].whole_answer(5.0)
    assert (prefill.load.prefill.num_observations, prefill.load.prefill_tokens) == (1, 0)


def test_a_decode_engine_whose_partner_failed_has_the_prompt_ahead() -> None:
    decode, prefill = an_endpoint("d"), an_endpoint("p")
    ticket, _ = split(decode, prefill)
    ticket.prefill_after_all(1.0)
    ticket.prefill_after_all(1.0)
    assert counts(decode) == (1, 900, 1000 + EXPECTED_OUTPUT_TOKENS)
    assert decode.load.queue_seconds(1.0) > 0.5
    ticket.first_token(2.0)
    assert (counts(decode)[1], decode.load.prefill.num_observations) == (0, 1)
    ticket.finish()
    assert counts(decode) == (0, 0, 0)


def test_a_decode_engine_that_has_begun_needs_no_prefill() -> None:
    decode = an_endpoint("d")
    ticket, _ = split(decode, an_endpoint("p"))
    ticket.first_token(1.0)
    ticket.prefill_after_all(1.1)
    assert counts(decode)[1] == 0
    ticket.finish()
    ticket.prefill_after_all(1.2)
    assert counts(decode) == (0, 0, 0)


def fetching(endpoint: Endpoint, *, now: float = 0.0) -> Ticket:
    """Of a prompt of 1000 tokens 100 are cached and 800 come from a peer."""
    (ticket,) = Ledger(Room()).dispatch(a_request(1000), Placement(Leg(endpoint, 100, 100, 800)), now)
    return ticket


def test_what_is_fetched_from_a_peer_is_kv_and_no_prefill_but_the_rest_is() -> None:
    endpoint = an_endpoint("a", kv_capacity_tokens=10**6)
    ticket = fetching(endpoint)
    assert counts(endpoint) == (1, 100, 1000 + EXPECTED_OUTPUT_TOKENS)
    assert endpoint.load.kv_used_tokens == 900 + EXPECTED_OUTPUT_TOKENS
    assert endpoint.load.queue_seconds(0.0) == pytest.approx(work(100, 900) / 1000)
    ticket.first_token(1.0)
    assert counts(endpoint)[1] == 0
    ticket.finish()
    assert counts(endpoint) == (0, 0, 0)


def test_a_prefill_behind_a_transfer_teaches_no_rate() -> None:
    endpoint = an_endpoint("a")
    fetching(endpoint).first_token(5.0)
    fetching(endpoint).whole_answer(0.0)
    assert endpoint.load.prefill.num_observations == 0


def test_how_late_a_first_token_is_beside_its_prefill_alone() -> None:
    ticket = fetching(an_endpoint("a"), now=10.0)
    assert ticket.seconds_late(10.0 + ticket.expected_prefill_seconds + 0.5) == pytest.approx(0.5)

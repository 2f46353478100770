"""When a request may leave the router's queue: by the prefill that engines have ahead."""

from collections.abc import Callable
from math import inf

import pytest

from kvasir_router.endpoints.address import Address, Role
from kvasir_router.placement.pairing import Pairing
from kvasir_router.service.late_binding import LateBinding
from kvasir_router.service.load import EndpointLoad, InFlight
from kvasir_router.service.prefill_rate import FleetPrefill, work
from kvasir_router.service.registry import EndpointState, Registry


class Engines:
    """ "a" and "b", which prefill 1,000 tokens a second; a quarter of a second may be ahead."""

    def __init__(self, max_in_flight: int = 10, *, are_known: bool = True) -> None:
        self.now = 100.0
        fleet = FleetPrefill(prior_rate=1000.0)
        self.registry = Registry(lambda: EndpointLoad(max_in_flight, fleet.new_member()), lambda: None, {"m"})
        self.registry.set_addresses({Address("a"), Address("b")}, EndpointState.READY)
        for endpoint in self.registry if are_known else ():
            for num_tokens in (500, 1500):
                endpoint.load.prefill.observe(work(num_tokens), work(num_tokens) / 1000, self.now)
        self.num_before = 0
        self.binding = LateBinding(self.registry, 0.25, lambda: self.now, num_before=self._num_before)

    def _num_before(self, response_ratio: Callable[[], float]) -> int:
        """A request of a ratio above 1 goes before all peers'."""
        return 0 if not self.num_before or response_ratio() > 1.0 else self.num_before

    def room(self, response_ratio: float = 0.0) -> float:
        return self.binding.seconds_to_room("m", lambda: response_ratio)

    def send(self, url: str, num_tokens: int) -> InFlight:
        endpoint = self.registry.get(url)
        assert endpoint is not None
        request = InFlight("id", 0, num_tokens, 0)
        endpoint.load.begin(request, self.now)
        return request

    def first_token(self, url: str, request: InFlight) -> None:
        endpoint = self.registry.get(url)
        assert endpoint is not None
        endpoint.load.end_prefill(request, self.now)


def test_idle_engines_take_requests() -> None:
    assert Engines().room() == 0.0


def test_nothing_starts_while_all_have_enough_ahead() -> None:
    engines = Engines()
    engines.send("a", 1000)
    assert engines.room() == 0.0
    engines.send("b", 1000)
    assert engines.room() > 0


def test_a_first_token_makes_room_and_so_does_time() -> None:
    engines = Engines()
    first = engines.send("a", 1000)
    engines.send("b", 1000)
    engines.first_token("a", first)
    assert engines.room() == 0.0
    engines.send("a", 1000)
    engines.now += 0.9
    assert engines.room() == 0.0


def test_an_engine_that_is_full_takes_none_however_little_it_has_ahead() -> None:
    engines = Engines(max_in_flight=1)
    for url in "ab":
        engines.first_token(url, engines.send(url, 1000))
    assert engines.room() > 0


def test_engines_of_other_models_do_not_count() -> None:
    assert Engines().binding.seconds_to_room("unknown", float) == inf


def test_nothing_is_held_back_by_a_rate_that_nobody_has_measured() -> None:
    engines = Engines(are_known=False)
    for url in "ab":
        engines.send(url, 100_000)
    assert engines.room() == 0.0


def test_it_tells_when_time_alone_will_have_made_room() -> None:
    engines = Engines()
    for url, num_tokens in (("a", 1000), ("b", 2000)):
        engines.send(url, num_tokens)
    seconds = engines.room()
    assert seconds == pytest.approx(work(1000) / 1000 - 0.25, rel=0.03)
    engines.now += seconds
    assert engines.room() == pytest.approx(0.0)


def test_nothing_asks_for_the_ratio_where_there_is_room() -> None:
    assert Engines().binding.seconds_to_room("m", never_asked) == 0.0


def never_asked() -> float:
    raise AssertionError


def test_what_has_not_begun_is_worked_off_by_no_time_that_is_known() -> None:
    engines = Engines()
    for url in "abab":
        engines.send(url, 1000)
    assert engines.room() == inf


class SplitEngines:
    """One that decodes and one that prefills for it, of 1,000 tokens a second each."""

    def __init__(self, min_tokens: int | None = None, *, prefill_revision: str = "") -> None:
        fleet = FleetPrefill(prior_rate=1000.0)
        self.registry = Registry(lambda: EndpointLoad(2, fleet.new_member()), lambda: None, {"m"})
        addresses = {Address("d", role=Role.DECODE), Address("p", role=Role.PREFILL, revision=prefill_revision)}
        self.registry.set_addresses(addresses, EndpointState.READY)
        for endpoint in self.registry:
            for num_tokens in (500, 1500):
                endpoint.load.prefill.observe(work(num_tokens), work(num_tokens) / 1000, 0.0)
        self.binding = LateBinding(self.registry, 0.25, lambda: 0.0, Pairing(min_tokens))

    def room(self) -> float:
        return self.binding.seconds_to_room("m", float)

    def busy(self, *urls: str) -> "SplitEngines":
        for url in urls:
            endpoint = self.registry.get(url)
            assert endpoint is not None
            endpoint.load.begin(InFlight("id", 0, 1000, 0), 0.0)
        return self


def test_a_split_request_starts_where_either_engine_could_prefill_soon() -> None:
    assert SplitEngines().busy("d").room() == 0.0
    assert SplitEngines().busy("p").room() == 0.0
    assert SplitEngines().busy("d", "p").room() > 0


def test_where_prompts_must_go_elsewhere_they_wait_for_that() -> None:
    assert SplitEngines(100).busy("p").room() > 0
    assert SplitEngines(100).busy("d").room() == 0.0


def test_without_a_partner_a_decode_engine_is_as_any_other() -> None:
    assert SplitEngines(100, prefill_revision="other").busy("p").room() == 0.0
    assert SplitEngines(100, prefill_revision="other").busy("d").room() > 0
    full = SplitEngines(100).busy("p", "p")
    assert full.room() == 0.0


def test_nothing_waits_for_a_partner_that_has_just_failed() -> None:
    engines = SplitEngines(100).busy("p")
    failed = engines.registry.get("p")
    assert failed is not None
    failed.suspect_until = 1.0
    assert engines.room() == 0.0


def test_prefill_engines_alone_start_nothing() -> None:
    engines = SplitEngines()
    engines.registry.set_state("d", EndpointState.NOT_READY)
    assert engines.room() > 0


def test_nothing_is_held_back_by_answers_that_came_in_one_piece() -> None:
    """They tell that a prefill took at most so long, and nothing of what waits for what."""
    engines = Engines(are_known=False)
    for url in "ab":
        endpoint = engines.registry.get(url)
        assert endpoint is not None
        for num_tokens in (500, 1500):
            endpoint.load.prefill.observe_at_most(work(num_tokens), work(num_tokens) / 2000, engines.now)
        engines.send(url, 100_000)
    assert engines.room() == 0.0


def test_a_fixed_time_before_each_first_token_is_no_queue() -> None:
    """Half a second each, however many there are: more than may be ahead, if it were work."""
    engines = Engines(max_in_flight=1000, are_known=False)
    for _ in range(20):
        sent = [(url, engines.send(url, 50)) for _ in range(100) for url in "ab"]
        assert engines.room() == 0.0
        engines.now += 0.5
        for url, request in sent:
            endpoint = engines.registry.get(url)
            assert endpoint is not None
            endpoint.load.prefill.observe(request.work_ahead, 0.5, engines.now)
            endpoint.load.end_prefill(request, engines.now)
            endpoint.load.end(request)


class AskedLoad(EndpointLoad):
    """A second of prefill is ahead there, beyond the bound."""

    num_asked = 0

    def __init__(self) -> None:
        super().__init__(2, FleetPrefill(prior_rate=1000.0).new_member())
        self.prefill_done_at = 1.25

    @property
    def is_queue_known(self) -> bool:
        AskedLoad.num_asked += 1
        return True


def test_partners_are_asked_once_each_however_many_engines_decode() -> None:
    registry = Registry(AskedLoad, lambda: None, {"m"})
    decodes = {Address(f"d{number}", role=Role.DECODE) for number in range(10)}
    registry.set_addresses(decodes | {Address(f"p{n}", role=Role.PREFILL) for n in range(10)}, EndpointState.READY)
    assert LateBinding(registry, 0.25, lambda: 0.0, Pairing(100)).seconds_to_room("m", float) == 1.0
    assert AskedLoad.num_asked == 20


@pytest.mark.parametrize(
    ("num_before", "later"), [(0, 0.0), (1, 0.02), (3, 0.06), (6, 0.12), (7, 0.125), (1000, 0.125)]
)
def test_room_is_seen_later_for_each_peer_whose_request_goes_before(num_before: int, later: float) -> None:
    """But not later than when half the bound is left: no engine idles."""
    engines = Engines()
    for url in "ab":
        engines.send(url, 1000)
    alone = engines.room()
    engines.num_before = num_before
    assert engines.room() == pytest.approx(alone + later)
    engines.now += alone + later
    assert engines.room() == pytest.approx(0.0, abs=1e-9)


def test_who_goes_before_its_peers_sees_room_at_once() -> None:
    engines = Engines()
    for url in "ab":
        engines.send(url, 1000)
    engines.now += engines.room()
    engines.num_before = 3
    assert engines.room(response_ratio=0.5) == pytest.approx(0.06)
    assert engines.room(response_ratio=2.0) == 0.0


def test_idle_engines_take_requests_whoever_goes_before() -> None:
    engines = Engines()
    engines.num_before = 1000
    assert engines.room() == 0.0

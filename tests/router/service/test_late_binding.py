"""When a request may leave the router's queue: by the prefill that engines have ahead."""

from kvasir_router.endpoints.address import Address
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
            endpoint.load.prefill.observe(work(1000), work(1000) / 1000, self.now)
        self.binding = LateBinding(self.registry, 0.25, lambda: self.now)

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
    assert Engines().binding.can_start("m")


def test_nothing_starts_while_all_have_enough_ahead() -> None:
    engines = Engines()
    engines.send("a", 1000)
    assert engines.binding.can_start("m")
    engines.send("b", 1000)
    assert not engines.binding.can_start("m")


def test_a_first_token_makes_room_and_so_does_time() -> None:
    engines = Engines()
    first = engines.send("a", 1000)
    engines.send("b", 1000)
    engines.first_token("a", first)
    assert engines.binding.can_start("m")
    engines.send("a", 1000)
    engines.now += 0.9
    assert engines.binding.can_start("m")


def test_an_engine_that_is_full_takes_none_however_little_it_has_ahead() -> None:
    engines = Engines(max_in_flight=1)
    for url in "ab":
        engines.first_token(url, engines.send(url, 1000))
    assert not engines.binding.can_start("m")


def test_engines_of_other_models_do_not_count() -> None:
    assert not Engines().binding.can_start("unknown")


def test_nothing_is_held_back_by_a_rate_that_nobody_has_measured() -> None:
    engines = Engines(are_known=False)
    for url in "ab":
        engines.send(url, 100_000)
    assert engines.binding.can_start("m")

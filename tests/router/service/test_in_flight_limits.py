"""Ejection and slow start as endpoints feel them: by how many requests they may have in flight."""

from kvasir_router.endpoints.address import Address, Role
from kvasir_router.service.in_flight_limits import CircuitState, InFlightLimits
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import EndpointState, Registry

MAX_IN_FLIGHT = 100


class Fleet:
    """Ready endpoints "0", "1", ... and their limits, at a clock of its own."""

    def __init__(self, num_endpoints: int) -> None:
        self.now = 1000.0
        self.num_wakes = 0
        self.registry = Registry(lambda: EndpointLoad(MAX_IN_FLIGHT, FleetPrefill().new_member()), lambda: None, {"m"})
        self.limits = InFlightLimits(self.registry, MAX_IN_FLIGHT, lambda: self.now, self._wake)
        self.has(num_endpoints)

    def has(self, num_endpoints: int) -> None:
        self.registry.set_addresses({Address(str(number)) for number in range(num_endpoints)}, EndpointState.READY)
        self.limits.refresh()

    def after(self, seconds: float) -> list[int]:
        self.now += seconds
        self.limits.refresh()
        return self.now_allowed

    @property
    def now_allowed(self) -> list[int]:
        return [self.registry.get(url).load.max_in_flight for url in sorted(self.registry.urls())]  # type: ignore[union-attr]

    def busy(self, num_in_flight: int) -> None:
        for endpoint in self.registry:
            endpoint.load.num_in_flight = num_in_flight

    def fail(self, url: str, count: int) -> None:
        for _ in range(count):
            self.limits.answered(url, is_error=True)

    def _wake(self) -> None:
        self.num_wakes += 1


def test_an_endpoint_that_fails_is_out_then_tried_and_then_back() -> None:
    fleet = Fleet(2)
    fleet.fail("0", 5)
    assert fleet.now_allowed == [0, MAX_IN_FLIGHT]
    assert fleet.limits.circuit("0") is CircuitState.OPEN
    assert fleet.limits.num_ejected == 1
    assert fleet.after(5.0) == [1, MAX_IN_FLIGHT]
    for _ in range(2):
        fleet.limits.answered("0", is_error=False)
    assert fleet.now_allowed == [MAX_IN_FLIGHT, MAX_IN_FLIGHT]


def test_those_that_wait_are_woken_when_a_limit_rises_and_not_when_it_falls() -> None:
    fleet = Fleet(2)
    fleet.fail("0", 5)
    fleet.after(1.0)
    assert fleet.num_wakes == 0
    fleet.after(4.0)
    assert fleet.num_wakes == 1


def test_a_failing_endpoint_is_marked_as_suspect_until_it_answers() -> None:
    fleet = Fleet(2)
    fleet.fail("0", 1)
    endpoint = fleet.registry.get("0")
    assert endpoint is not None
    assert endpoint.suspect_until == fleet.now + 1.0
    fleet.limits.answered("0", is_error=False)
    assert endpoint.suspect_until <= fleet.now


def test_an_answer_from_an_endpoint_that_is_gone_changes_nothing() -> None:
    fleet = Fleet(2)
    fleet.fail("gone", 10)
    assert fleet.now_allowed == [MAX_IN_FLIGHT] * 2


def test_endpoints_that_all_are_new_have_no_slow_start() -> None:
    fleet = Fleet(2)
    fleet.busy(50)
    assert fleet.after(1.0) == [MAX_IN_FLIGHT] * 2


def test_a_newcomer_beside_established_endpoints_starts_slowly() -> None:
    fleet = Fleet(1)
    fleet.after(60.0)
    fleet.busy(40)
    fleet.has(2)
    assert fleet.now_allowed == [MAX_IN_FLIGHT, 1]
    assert fleet.after(5.0) == [MAX_IN_FLIGHT, 21]
    assert fleet.after(5.0) == [MAX_IN_FLIGHT, MAX_IN_FLIGHT]


def test_an_endpoint_that_returns_starts_slowly_too() -> None:
    fleet = Fleet(2)
    fleet.after(60.0)
    fleet.registry.set_state("1", EndpointState.UNREACHABLE)
    fleet.limits.refresh()
    fleet.registry.set_state("1", EndpointState.READY)
    assert fleet.after(0.0) == [MAX_IN_FLIGHT, 1]


def test_no_limit_is_above_the_configured_one() -> None:
    fleet = Fleet(1)
    fleet.after(60.0)
    fleet.busy(1000)
    fleet.has(2)
    assert fleet.after(9.0) == [MAX_IN_FLIGHT] * 2


def test_a_busy_endpoint_is_passed_over_for_a_moment_and_never_ejected() -> None:
    fleet = Fleet(2)
    for _ in range(20):
        fleet.limits.busy("0")
    endpoint = fleet.registry.get("0")
    assert endpoint is not None
    assert (endpoint.suspect_until, fleet.now_allowed) == (fleet.now + 1.0, [MAX_IN_FLIGHT] * 2)


def test_all_that_only_prefill_may_be_out_and_are_tried_one_request_at_a_time() -> None:
    """Of one that decodes and two that prefill, the first is never out, and never compared with the others."""
    fleet = Fleet(0)
    roles = {"0": Role.DECODE, "1": Role.PREFILL, "2": Role.PREFILL}
    fleet.registry.set_addresses({Address(url, role=role) for url, role in roles.items()}, EndpointState.READY)
    fleet.limits.refresh()
    for url in roles:
        fleet.fail(url, 5)
    assert fleet.now_allowed == [MAX_IN_FLIGHT, 0, 0]
    assert fleet.limits.num_ejected == 2
    assert fleet.after(5.0) == [MAX_IN_FLIGHT, 1, 1]
    fleet.fail("1", 1)
    assert fleet.now_allowed == [MAX_IN_FLIGHT, 0, 1]


def test_a_new_engine_starts_slowly_by_its_own_kind() -> None:
    fleet = Fleet(0)
    old = {Address("0", role=Role.DECODE), Address("1", role=Role.PREFILL)}
    fleet.registry.set_addresses(old, EndpointState.READY)
    fleet.limits.refresh()
    fleet.after(20.0)
    for url, num_in_flight in (("0", 60), ("1", 2)):
        endpoint = fleet.registry.get(url)
        assert endpoint is not None
        endpoint.load.num_in_flight = num_in_flight
    new = {Address("2", role=Role.DECODE), Address("3", role=Role.PREFILL)}
    fleet.registry.set_addresses(old | new, EndpointState.READY)
    fleet.limits.refresh()
    assert fleet.after(5.0)[2:] == [31, 2]

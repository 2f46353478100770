from dataclasses import replace

import pytest
from tests.router.parts import num_bytes_kept

from kvasir_router.endpoints.address import Address, Role
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import EndpointState, Registry

A, B = Address("http://a"), Address("http://b")


class Changes:
    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> None:
        self.number += 1


def registry(*, own_models: frozenset[str] = frozenset({"m"}), changes: Changes | None = None) -> Registry:
    """Of A and B, both ready, with room for one request each."""
    made = Registry(lambda: EndpointLoad(1, FleetPrefill().new_member()), changes or Changes(), own_models)
    made.set_addresses({A, B}, EndpointState.READY)
    return made


def serving(made: Registry, model: str | None = "m") -> list[str]:
    return sorted(endpoint.url for endpoint in made.serving(model))


def test_full_endpoints_cannot_take_more() -> None:
    made = registry()
    one, other = made.serving("m")
    one.load.num_in_flight = 1
    assert made.can_place("m")
    other.load.num_in_flight = 1
    assert not made.can_place("m")


@pytest.mark.parametrize("state", [state for state in EndpointState if state is not EndpointState.READY])
def test_endpoints_that_are_not_ready_serve_nothing(state: EndpointState) -> None:
    made = registry()
    assert serving(made) == [A.url, B.url]
    made.set_state(A.url, state)
    assert serving(made) == [B.url]


def test_models_are_waited_for_when_they_are_to_be_learned() -> None:
    made = registry(own_models=frozenset())
    assert not made.can_place("m")
    assert not made.can_place(None)
    made.set_models(A.url, {"m": None})
    assert made.can_place("m")
    assert not made.can_place("other")


def test_every_endpoint_serves_the_own_model_and_those_that_list_an_adapter_serve_that() -> None:
    made = registry()
    assert not made.can_place("sql")
    made.set_models(A.url, {"listed-otherwise": None, "sql": None})
    assert made.can_place("m", avoid={A.url})
    assert (serving(made), serving(made, "sql")) == ([A.url, B.url], [A.url])
    assert not made.can_place("sql", avoid={A.url})


def test_a_request_without_a_model_may_go_anywhere() -> None:
    assert serving(registry(), None) == [A.url, B.url]


def test_names_that_nobody_serves_are_not_remembered() -> None:
    made = registry()

    def ask() -> None:
        for number in range(1000):
            made.serving(f"invented-{number}")

    assert num_bytes_kept(ask) < 10_000


def test_what_an_endpoint_lists_after_it_is_gone_is_not_known() -> None:
    made = registry()
    made.set_addresses({B}, EndpointState.READY)
    made.set_models(A.url, {"sql": None})
    assert made.listed_models() == frozenset()


def test_models_of_an_endpoint_that_is_gone_are_no_longer_known() -> None:
    made = registry()
    made.set_models(A.url, {"sql": None})
    assert made.listed_models() == {"sql"}
    made.set_addresses({B}, EndpointState.READY)
    assert made.listed_models() == frozenset()
    assert not made.can_place("sql")


def test_a_prefill_engine_gets_no_clients_requests() -> None:
    made = registry()
    made.set_addresses({replace(A, role=Role.PREFILL), replace(B, role=Role.DECODE)}, EndpointState.READY)
    assert serving(made) == [B.url]


def test_new_labels_of_a_pod_are_seen_and_cost_it_nothing() -> None:
    made = registry()
    before = made.get(A.url)
    made.set_addresses({replace(A, revision="r", traffic_weight=10.0), B}, EndpointState.UNKNOWN)
    after = made.get(A.url)
    assert after is before is not None
    assert (after.revision, after.traffic_weight, after.state) == ("r", 10.0, EndpointState.READY)
    assert made.revisions() == {"r", ""}


def test_a_pod_that_takes_over_an_address_inherits_nothing() -> None:
    made = registry()
    before = made.get(A.url)
    gone = made.set_addresses({Address(A.url, uid="new"), B}, EndpointState.UNKNOWN)
    after = made.get(A.url)
    assert gone == (before,)
    assert after is not None
    assert after.load is not before.load
    assert after.state is EndpointState.UNKNOWN


def test_whoever_waits_for_an_endpoint_is_told_of_each_change_and_of_nothing_else() -> None:
    changes = Changes()
    made = registry(changes=changes)
    counts = []
    for change in (
        lambda: made.set_state(A.url, EndpointState.READY),
        lambda: made.set_state(A.url, EndpointState.NOT_READY),
        lambda: made.set_models(A.url, {"m": None}),
        lambda: made.set_models(A.url, {"m": None}),
        lambda: made.set_addresses({A}, EndpointState.READY),
        lambda: made.set_state("http://unknown", EndpointState.READY),
    ):
        before = changes.number
        change()
        counts.append(changes.number - before)
    assert counts == [0, 1, 1, 0, 1, 0]


def test_known_addresses_keep_their_state() -> None:
    made = registry()
    made.set_state(A.url, EndpointState.UNREACHABLE)
    made.set_addresses({A, B, Address("http://c")}, EndpointState.READY)
    assert made.num_in_state(EndpointState.UNREACHABLE) == 1


def test_engines_that_prefill_are_listed_apart() -> None:
    made = registry()
    assert (made.is_disaggregated, made.prefilling("m")) == (False, ())
    made.set_addresses({replace(A, role=Role.DECODE), replace(B, role=Role.PREFILL)}, EndpointState.READY)
    assert (made.is_disaggregated, serving(made), [one.url for one in made.prefilling("m")]) == (True, [A.url], [B.url])
    assert made.prefilling("adapter") == ()
    made.set_state(B.url, EndpointState.NOT_READY)
    assert made.prefilling("m") == ()

"""Who may reach engines and routers: the rendered policies, evaluated as a network plugin would."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.operator.gateways import GATEWAY

from kvasir_operator.api.defaults import GatewayDefaults, InstallationDefaults, NetworkPeer, NetworkPeers
from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources.network_policies import network_policies
from kvasir_operator.settings import OperatorSettings

MakeService = Callable[..., InferenceService]
NAMESPACE = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Pod:
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = "models"


def of_service(role: str, service: str = "llama") -> Pod:
    return Pod({"serving.kvasir.dev/service": service, "serving.kvasir.dev/role": role})


PROMETHEUS = Pod({"app.kubernetes.io/name": "prometheus"}, "monitoring")
OPERATOR = Pod({"app.kubernetes.io/component": "operator"}, "kvasir")
THE_GATEWAY = Pod({"app.kubernetes.io/component": "gateway"}, "kvasir")
IN_PLACE = NetworkPeers(operator=NetworkPeer({NAMESPACE: "kvasir"}, {"app.kubernetes.io/component": "operator"}))


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """As a LabelSelector does; empty, it selects everything."""
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def lets_in(peer: Mapping[str, Any], source: Pod) -> bool:
    if "namespaceSelector" in peer:
        is_there = selects(peer["namespaceSelector"], {NAMESPACE: source.namespace})
    else:
        is_there = source.namespace == "models"
    return is_there and selects(peer["podSelector"], source.labels)


def allows(policy: Mapping[str, Any], source: Pod, port: int) -> bool:
    return any(
        ("from" not in rule or any(lets_in(peer, source) for peer in rule["from"]))
        and ("ports" not in rule or port in [each["port"] for each in rule["ports"]])
        for rule in policy["spec"]["ingress"]
    )


def reaches(
    service: InferenceService,
    source: Pod,
    target: Pod,
    port: int,
    peers: NetworkPeers = IN_PLACE,
    gateway: GatewayDefaults | None = GATEWAY,
) -> bool:
    """A pod that no policy selects is open; one that policies select is open to what any of them allows."""
    settings = OperatorSettings(
        defaults=InstallationDefaults(network_peers=peers, gateway=gateway), gateway_secret="gateway-secret"
    )
    policies = network_policies(service, settings)
    selecting = [policy for policy in policies if selects(policy["spec"]["podSelector"], target.labels)]
    return not selecting or any(allows(policy, source, port) for policy in selecting)


@pytest.mark.parametrize("role", ["serve", "prefill", "decode"])
@pytest.mark.parametrize(
    ("source", "port", "expected"),
    [
        (of_service("router"), 8000, True),
        (of_service("router"), 5557, True),
        (of_service("router"), 5657, True),
        (of_service("router"), 5600, False),
        (of_service("router", "other"), 8000, False),
        (Pod(of_service("router").labels, "elsewhere"), 8000, False),
        (of_service("decode"), 5600, True),
        (of_service("serve"), 29500, True),
        (of_service("serve", "other"), 8000, False),
        (PROMETHEUS, 8000, True),
        (PROMETHEUS, 5600, False),
        (PROMETHEUS, 5557, False),
        (OPERATOR, 5657, False),
        (Pod(), 5557, False),
        (of_service("router", "other"), 5557, False),
        (OPERATOR, 8000, True),
        (Pod(OPERATOR.labels, "elsewhere"), 8000, False),
        (Pod({}, "kvasir"), 8000, False),
        (THE_GATEWAY, 8000, False),
        (Pod(), 8000, False),
    ],
)
def test_engines_are_reached_by_their_router_their_peers_and_observers_only(
    make_service: MakeService, role: str, source: Pod, port: int, expected: bool
) -> None:
    assert reaches(make_service(), source, of_service(role), port) is expected


@pytest.mark.parametrize(
    ("port", "expected"),
    [(5557, True), (5558, True), (5559, True), (5560, False), (5657, True), (5659, True), (5660, False)],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_routers_reach_the_kv_events_of_each_data_parallel_rank(
    make_service: MakeService, role: str, port: int, expected: bool
) -> None:
    parallelism: dict[str, Any] = {"parallelism": {"data": 3}}
    service = make_service(**parallelism)
    split = make_service(disaggregation={"prefill": {}, "decode": {}, role: parallelism})

    assert reaches(service, of_service("router"), of_service("serve"), port) is expected
    assert reaches(split, of_service("router"), of_service(role), port) is expected
    assert not reaches(service, OPERATOR, of_service("serve"), port)


@pytest.mark.parametrize("role", ["serve", "prefill", "decode"])
@pytest.mark.parametrize(
    ("source", "port", "expected"),
    [
        (THE_GATEWAY, 8000, True),
        (THE_GATEWAY, 5557, True),
        (THE_GATEWAY, 5657, True),
        (THE_GATEWAY, 29500, False),
        (Pod(THE_GATEWAY.labels, "elsewhere"), 8000, False),
        (of_service("router"), 8000, True),  # one that was there before ends its streams
        (Pod({}, "kvasir"), 8000, False),
        (PROMETHEUS, 8000, True),
        (OPERATOR, 8000, True),
        (Pod(), 8000, False),
    ],
)
def test_engines_behind_the_gateway_are_reached_by_its_pods(
    make_service: MakeService, role: str, source: Pod, port: int, expected: bool
) -> None:
    assert reaches(make_service(router={"mode": "gateway"}), source, of_service(role), port) is expected


def test_without_a_gateway_nobody_reaches_engines_in_its_place(make_service: MakeService) -> None:
    service = make_service(router={"mode": "gateway"})
    assert not reaches(service, THE_GATEWAY, of_service("serve"), 8000, gateway=None)


@pytest.mark.parametrize(
    ("source", "port", "expected"),
    [
        (Pod({}, "anywhere"), 8080, True),
        (Pod({}, "anywhere"), 9090, False),
        (of_service("serve"), 9090, False),
        (PROMETHEUS, 9090, True),
        (OPERATOR, 9090, True),
        (of_service("router"), 5559, True),
        (of_service("router"), 9090, False),
        (of_service("router", "other"), 5559, False),
        (of_service("serve"), 5559, False),
        (OPERATOR, 5559, False),
        (Pod(of_service("router").labels, "elsewhere"), 5559, False),
    ],
)
def test_routers_take_clients_from_everywhere_peers_from_their_service_and_show_observers_their_metrics(
    make_service: MakeService, source: Pod, port: int, expected: bool
) -> None:
    assert reaches(make_service(), source, of_service("router"), port) is expected


def test_a_service_does_not_touch_the_pods_of_others(make_service: MakeService) -> None:
    assert reaches(make_service(), Pod(), of_service("serve", "other"), 8000)
    assert reaches(make_service(), Pod(), Pod(), 8000)


def test_without_observers_nobody_reaches_metrics(make_service: MakeService) -> None:
    nobody = NetworkPeers(operator=None, metrics=())

    assert not reaches(make_service(), PROMETHEUS, of_service("router"), 9090, nobody)
    assert not reaches(make_service(), PROMETHEUS, of_service("serve"), 8000, nobody)
    assert reaches(make_service(), of_service("router"), of_service("serve"), 8000, nobody)


def test_an_observer_without_labels_is_everyone(make_service: MakeService) -> None:
    assert reaches(make_service(), Pod({}, "x"), of_service("serve"), 8000, NetworkPeers(metrics=(NetworkPeer(),)))


def test_an_installation_may_leave_them_out(make_service: MakeService) -> None:
    assert network_policies(make_service(), OperatorSettings(network_policies=False)) == []


def test_names_fit_however_long_the_services_is(make_service: MakeService) -> None:
    names = [policy["metadata"]["name"] for policy in network_policies(make_service(name="l" * 63), OperatorSettings())]

    assert len(set(names)) == 2
    assert all(len(name) <= 63 for name in names)

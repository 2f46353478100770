"""Which endpoints a service's slices tell of: one a pod, with what the operator wrote on its Service."""

from typing import Any

import pytest

from kvasir_router.endpoints.address import Address, Role
from kvasir_router.endpoints.slices import addresses_of, traffic_weight

DOMAIN = "serving.kvasir.dev"
IPV4, IPV6 = "10.0.0.1", "fd00::1"
URL4, URL6 = "http://10.0.0.1:8000", "http://[fd00::1]:8000"


def endpoint(ip: str, pod: str = "", **conditions: bool) -> dict[str, Any]:
    target = {"kind": "Pod", "name": pod or f"pod-{ip}", "uid": f"uid-{pod or ip}"}
    return {"addresses": [ip], "conditions": conditions, "targetRef": target}


def endpoint_slice(
    *endpoints: dict[str, Any], name: str = "s", weight: str | None = None, **labels: str
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "labels": {f"{DOMAIN}/{key}": value for key, value in labels.items()}}
    if weight is not None:
        metadata["labels"][f"{DOMAIN}/traffic-weight"] = weight
    ports = [{"name": "http", "port": 8000, "protocol": "TCP"}]
    return {"metadata": metadata, "ports": ports, "endpoints": list(endpoints)}


def found(*slices: dict[str, Any], port: str = "8000") -> list[Address]:
    return sorted(addresses_of(slices, port), key=lambda address: address.url)


def urls(*slices: dict[str, Any], port: str = "8000") -> list[str]:
    return [address.url for address in found(*slices, port=port)]


@pytest.mark.parametrize(
    ("conditions", "is_usable"),
    [
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({"ready": False, "serving": False, "terminating": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        ({"ready": True, "serving": True, "terminating": True}, False),  # publishNotReadyAddresses
        ({}, True),
    ],
)
def test_only_ready_pods_that_are_not_terminating_count(conditions: dict[str, bool], is_usable: bool) -> None:
    assert urls(endpoint_slice(endpoint(IPV4, **conditions))) == ([URL4] if is_usable else [])


def test_slices_of_one_service_are_joined() -> None:
    assert urls(endpoint_slice(endpoint(IPV4)), endpoint_slice(endpoint("10.0.0.2"))) == [URL4, "http://10.0.0.2:8000"]


@pytest.mark.parametrize(("port", "expected"), [("http", [URL6]), ("9", ["http://[fd00::1]:9"]), ("x", [])])
def test_the_port_is_a_number_or_a_name(port: str, expected: list[str]) -> None:
    assert urls(endpoint_slice(endpoint(IPV6)), port=port) == expected


def test_a_slice_without_endpoints_has_none() -> None:
    assert urls(endpoint_slice() | {"endpoints": None}) == []


@pytest.mark.parametrize("order", [(IPV4, IPV6), (IPV6, IPV4)])
def test_a_dual_stack_pod_counts_once_by_its_ipv4_address(order: tuple[str, str]) -> None:
    slices = [endpoint_slice(endpoint(ip, "pod"), name=f"s-{ip}") for ip in order]
    assert urls(*slices) == [URL4]


def test_a_pod_with_ipv6_only_is_used_by_it_beside_others() -> None:
    assert urls(endpoint_slice(endpoint(IPV6, "one")), endpoint_slice(endpoint(IPV4, "other"))) == [URL4, URL6]


def test_a_dual_stack_pod_is_ready_when_the_slice_of_its_ipv4_address_says_so() -> None:
    """Else its address would change while its slices are changed one after the other."""
    slices = [endpoint_slice(endpoint(IPV4, "pod", ready=False)), endpoint_slice(endpoint(IPV6, "pod"), name="s6")]
    assert urls(*slices) == []


def test_of_several_addresses_of_one_endpoint_the_first_counts() -> None:
    assert urls(endpoint_slice(endpoint(IPV4) | {"addresses": [IPV4, "10.0.0.9"]})) == [URL4]


def test_a_pod_is_known_by_its_name_where_no_uid_is_given() -> None:
    slices = [endpoint_slice(endpoint(ip) | {"targetRef": {"name": "pod"}}, name=ip) for ip in (IPV4, IPV6)]
    assert urls(*slices) == [URL4]


def test_endpoints_that_are_no_pods_count_each_by_their_address() -> None:
    slices = [endpoint_slice({"addresses": [ip]}, name=ip) for ip in (IPV4, IPV6)]
    assert urls(*slices) == [URL4, URL6]


@pytest.mark.parametrize("role", ["serve", "prefill", "decode"])
def test_role_and_revision_are_the_slices_labels(role: str) -> None:
    (address,) = found(endpoint_slice(endpoint(IPV4), role=role, revision="5f0c1e2d3a"))
    assert (address.role, address.revision) == (Role(role), "5f0c1e2d3a")


def test_a_slice_of_the_former_release_has_no_role_and_serves() -> None:
    (address,) = found(endpoint_slice(endpoint(IPV4)))
    assert (address.role, address.revision, address.traffic_weight) == (Role.SERVE, "", None)


@pytest.mark.parametrize("role", ["router", "planner"])
def test_pods_of_other_roles_are_no_engines(role: str) -> None:
    assert found(endpoint_slice(endpoint(IPV4), role=role)) == []


@pytest.mark.parametrize("first", [0, 1])
def test_a_pod_of_two_services_counts_once_with_the_revision_that_one_tells(first: int) -> None:
    """While a release takes over from the one before, which had one Service for all revisions."""
    slices = [endpoint_slice(endpoint(IPV4), name="a"), endpoint_slice(endpoint(IPV4), name="b", revision="new")]
    (address,) = found(slices[first], slices[1 - first])
    assert address.revision == "new"


@pytest.mark.parametrize(("text", "weight"), [("10", 10.0), ("0", 0.0), ("100", 100.0), ("0.5", 0.5), (None, None)])
def test_a_revisions_weight_is_its_slices_label(text: str | None, weight: float | None) -> None:
    (address,) = found(endpoint_slice(endpoint(IPV4), weight=text))
    assert address.traffic_weight == weight


@pytest.mark.parametrize("text", ["", "ten", "10%", "-1", "101", "nan"])
def test_a_weight_that_is_no_percentage_is_an_error_that_costs_no_endpoint(text: str) -> None:
    broken = endpoint_slice(endpoint(IPV4), weight=text)
    with pytest.raises(ValueError, match=r"could not convert|is not between 0 and 100"):
        traffic_weight(broken)
    (address,) = found(broken)
    assert address.traffic_weight is None


def test_labels_do_not_make_another_engine_of_a_pod() -> None:
    assert found(endpoint_slice(endpoint(IPV4), weight="10")) == found(endpoint_slice(endpoint(IPV4), revision="r"))

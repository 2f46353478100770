"""EndpointSlices of a service to addresses: one a pod, with its role, revision and weight. Pure.

The EndpointSlice controller copies a Service's labels onto its slices, not its annotations, so they tell of the pods
what the operator has written on the Service. Invariant: a pod never counts twice, however many slices list it: one for
each address family, one for each Service that selects it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvasir_router.endpoints.address import Address, Role

EndpointSlice = Mapping[str, Any]
"""An EndpointSlice as the API's JSON."""

SERVICE_LABEL = "serving.kvasir.dev/service"
ROLE_LABEL = "serving.kvasir.dev/role"
REVISION_LABEL = "serving.kvasir.dev/revision"
TRAFFIC_WEIGHT_LABEL = "serving.kvasir.dev/traffic-weight"
"""Percent of the requests, 0 to 100, that a revision gets."""

_ROLES = {role.value: role for role in Role}


ENGINES_SELECTOR = f"{SERVICE_LABEL},{ROLE_LABEL} notin (router)"
"""Of the engines' slices: all but the routers' own, those that carry no role among them."""


def label_selector(service_name: str) -> str:
    """Of one service's."""
    return f"{SERVICE_LABEL}={service_name},{ROLE_LABEL} notin (router)"


@dataclass(frozen=True, slots=True)
class _Listing:
    """A pod as one slice lists it."""

    pod: str
    address: Address
    is_ready: bool
    rank: tuple[bool, bool, str]  # of several the lowest tells


def addresses_of(slices: Iterable[EndpointSlice], port: str) -> frozenset[Address]:
    """Of pods that are ready and not terminating.

    Which of its slices tells of a pod does not depend on readiness, so that its address stays the same while the slices
    of a dual-stack pod change one after the other.
    """
    chosen: dict[str, _Listing] = {}
    for endpoint_slice in slices:
        for listing in _listings(endpoint_slice, port):
            known = chosen.setdefault(listing.pod, listing)
            if listing.rank < known.rank:
                chosen[listing.pod] = listing
    return frozenset(listing.address for listing in chosen.values() if listing.is_ready)


def traffic_weight(endpoint_slice: EndpointSlice) -> float | None:
    """None without the label. Raises ValueError when it is no number from 0 to 100."""
    text = (endpoint_slice["metadata"].get("labels") or {}).get(TRAFFIC_WEIGHT_LABEL)
    if text is None:
        return None
    weight = float(text)
    if not 0 <= weight <= 100:
        raise ValueError(f"{text} is not between 0 and 100")
    return weight


def _listings(endpoint_slice: EndpointSlice, port: str) -> Iterator[_Listing]:
    metadata = endpoint_slice["metadata"]
    labels = metadata.get("labels") or {}
    # Slices of the release before roles carry none.
    role = _ROLES.get(labels.get(ROLE_LABEL, Role.SERVE))
    number = _port_number(endpoint_slice, port)
    if role is None or number is None:
        return
    revision, weight = labels.get(REVISION_LABEL, ""), _weight_or_none(endpoint_slice)
    for endpoint in endpoint_slice.get("endpoints") or ():
        host = endpoint["addresses"][0]  # the API: further ones are fungible, consumers take the first
        is_ipv6 = ":" in host
        target = endpoint.get("targetRef") or {}
        url = f"http://[{host}]:{number}" if is_ipv6 else f"http://{host}:{number}"
        yield _Listing(
            pod=target.get("uid") or target.get("name") or url,
            address=Address(url, target.get("uid", ""), role, revision, weight),
            is_ready=_is_ready(endpoint.get("conditions") or {}),
            rank=(not revision, is_ipv6, metadata["name"]),
        )


def _weight_or_none(endpoint_slice: EndpointSlice) -> float | None:
    try:
        return traffic_weight(endpoint_slice)
    except ValueError:
        return None


def _is_ready(conditions: Mapping[str, bool | None]) -> bool:
    # The API defines an absent `ready` as true.
    return conditions.get("ready") is not False and not conditions.get("terminating")


def _port_number(endpoint_slice: EndpointSlice, port: str) -> int | None:
    if port.isdigit():
        return int(port)
    ports = endpoint_slice.get("ports") or ()
    return next((entry["port"] for entry in ports if entry.get("name") == port), None)

"""Where a router places requests, by what it reads of a service's real EndpointSlices."""

from collections import Counter

from tests.router.parts import a_request, an_endpoint

from kvasir_router.endpoints.slices import addresses_of, label_selector
from kvasir_router.picker import Picker
from kvasir_router.placement.pairing import Pairing
from kvasir_router.placement.policies import RoundRobin

from .control_plane import ControlPlane
from .reconciling import NAME

Revisions = tuple[str, ...]
"""Of the engine that decodes, and of the one that prefills for it where there is one."""


def placed(control_plane: ControlPlane, namespace: str, num_requests: int) -> Counter[Revisions]:
    """How many of the next requests go to engines of which revisions."""
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    items = control_plane.request("get", path, labelSelector=label_selector(NAME))["items"]
    endpoints = [
        an_endpoint(each.url, role=each.role, revision=each.revision, traffic_weight=each.traffic_weight)
        for each in sorted(addresses_of(items, "http"), key=lambda address: address.url)
    ]
    decodes = [each for each in endpoints if each.role.takes_requests]
    prefills = [each for each in endpoints if not each.role.takes_requests] or None
    picker, request = Picker(RoundRobin(), pairing=Pairing(0)), a_request(can_transfer_kv=True)
    found = (picker.pick(request, decodes, {}, 0.0, prefills=prefills) for _ in range(num_requests))
    return Counter(tuple(leg.endpoint.revision for leg in each.legs) for each in found if each is not None)

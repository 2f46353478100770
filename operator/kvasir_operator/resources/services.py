"""The Services of one service: what clients talk to, and those by which pods find one another; and the addresses.

All but the first are headless: their EndpointSlices, or their names in DNS, are what is asked for.
"""

from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.api.defaults import GatewayDefaults
from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources.metadata import metadata

PEERS_FLAG: Final = "--peers"
_DUAL_STACK: Final = {"ipFamilyPolicy": "PreferDualStack"}


def router_service(service: InferenceService) -> dict[str, Any]:
    """The one that clients talk to, in front of the router's pods."""
    wanted = service.spec.router.service
    described = metadata(service, labels.router_name(service.name), labels.ROLE_ROUTER)
    if wanted.annotations:
        described["annotations"] = dict(wanted.annotations)
    selector = labels.role_selector(service.name, labels.ROLE_ROUTER)
    return _service(described, selector, "http", labels.ROUTER_HTTP_PORT, type=wanted.type, **_DUAL_STACK)


def service_url(service: InferenceService, gateway: GatewayDefaults | None) -> str | None:
    """Base URL of the OpenAI surface inside the cluster; None where that is a gateway's which is not there."""
    if not service.is_behind_gateway:
        return _url(labels.router_name(service.name), service.namespace)
    return None if gateway is None else _url(gateway.name, gateway.namespace)


def router_peers_service(service: InferenceService) -> dict[str, Any]:
    """By which a service's routers hear one another: it names all their pods.

    They listen from their start on, ready or not: one that drains goes on telling where its streams are.
    """
    described = metadata(service, labels.router_peers_name(service.name), labels.ROLE_ROUTER)
    selector = labels.role_selector(service.name, labels.ROLE_ROUTER)
    return _headless(described, selector, "peers", labels.ROUTER_PEERS_PORT, names_unready=True)


def router_peers_flags(service: InferenceService) -> list[str]:
    host = f"{labels.router_peers_name(service.name)}.{service.namespace}.svc"
    return [PEERS_FLAG, f"{host}:{labels.ROUTER_PEERS_PORT}"]


def engine_service(
    service: InferenceService, role: str, revision: str, traffic_weight: int | None, *, is_grouped: bool
) -> dict[str, Any]:
    """Of an engine role and revision: its EndpointSlices show the router which pods are ready.

    `traffic_weight`: per cent of the requests for this revision; None: its part by the router's policy. Where replicas
    are groups of pods it has only the one of each that takes requests.

    Labels go on to the EndpointSlices, where the router reads them; annotations would not. The weight is both: without
    the label alone a revision that is weighed would pass for one that was let go on.
    """
    name = labels.workload_name(service.name, role, revision)
    leader = {labels.RANK_LABEL: "0"} if is_grouped else {}
    weight = {} if traffic_weight is None else {labels.TRAFFIC_WEIGHT: str(traffic_weight)}
    described = metadata(service, name, role, {labels.REVISION_LABEL: revision, **weight})
    described |= {"annotations": weight} if weight else {}
    selector = {**labels.revision_selector(service.name, role, revision), **leader}
    return _headless(described, selector, "http", labels.ENGINE_HTTP_PORT, names_unready=False, **_DUAL_STACK)


def rendezvous_service(service: InferenceService, role: str) -> dict[str, Any]:
    """Names the pods of all of a role's groups in DNS, before they are ready.

    Its EndpointSlices show unready pods, and followers, as ready: by its own role label routers pass them over.
    """
    described = metadata(service, labels.rendezvous_name(service.name, role), labels.ROLE_RENDEZVOUS)
    selector, port = labels.role_selector(service.name, role), labels.ENGINE_RENDEZVOUS_PORT
    return _headless(described, selector, "rendezvous", port, names_unready=True, **_DUAL_STACK)


def _headless(
    described: dict[str, Any], selector: dict[str, str], name: str, port: int, *, names_unready: bool, **more: str
) -> dict[str, Any]:
    return _service(described, selector, name, port, clusterIP="None", publishNotReadyAddresses=names_unready, **more)


def _service(described: dict[str, Any], selector: dict[str, str], name: str, port: int, **more: Any) -> dict[str, Any]:
    """Its port has the name of the pods' own that it leads to."""
    ports = [{"name": name, "port": port, "targetPort": name, "protocol": "TCP"}]
    spec = {**more, "selector": selector, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": described, "spec": spec}


def _url(name: str, namespace: str) -> str:
    return f"http://{name}.{namespace}.svc:{labels.ROUTER_HTTP_PORT}/v1"

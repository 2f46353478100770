"""The Service that clients talk to, in front of the router's pods, and the address that they use."""

from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.api.defaults import GatewayDefaults
from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources.metadata import metadata

PEERS_FLAG: Final = "--peers"


def router_service(service: InferenceService) -> dict[str, Any]:
    wanted = service.spec.router.service
    described = metadata(service, labels.router_name(service.name), labels.ROLE_ROUTER)
    if wanted.annotations:
        described["annotations"] = dict(wanted.annotations)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": described,
        "spec": {
            "type": wanted.type,
            "ipFamilyPolicy": "PreferDualStack",
            "selector": labels.role_selector(service.name, labels.ROLE_ROUTER),
            "ports": [{"name": "http", "port": labels.ROUTER_HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def service_url(service: InferenceService, gateway: GatewayDefaults | None) -> str | None:
    """Base URL of the OpenAI surface inside the cluster; None where that is a gateway's which is not there."""
    if not service.is_behind_gateway:
        return _url(labels.router_name(service.name), service.namespace)
    return None if gateway is None else _url(gateway.name, gateway.namespace)


def _url(name: str, namespace: str) -> str:
    return f"http://{name}.{namespace}.svc:{labels.ROUTER_HTTP_PORT}/v1"


def router_peers_service(service: InferenceService) -> dict[str, Any]:
    port = {"name": "peers", "port": labels.ROUTER_PEERS_PORT, "targetPort": "peers", "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(service, labels.router_peers_name(service.name), labels.ROLE_ROUTER),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels.role_selector(service.name, labels.ROLE_ROUTER),
            "ports": [port],
        },
    }


def router_peers_flags(service: InferenceService) -> list[str]:
    host = f"{labels.router_peers_name(service.name)}.{service.namespace}.svc"
    return [PEERS_FLAG, f"{host}:{labels.ROUTER_PEERS_PORT}"]

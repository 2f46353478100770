"""How a service's routers hear one another: the headless Service that names all their pods, and the flag that says so.

They listen from their start on, ready or not: one that drains goes on telling where its streams are.
"""

from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources.metadata import metadata

PEERS_FLAG: Final = "--peers"


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

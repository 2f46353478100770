"""The engine's headless Service: its EndpointSlices tell the router which pods are ready."""

from typing import Any

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources.metadata import metadata


def engine_service(service: InferenceService) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(service, labels.engine_name(service.name), labels.ROLE_SERVE),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": False,
            "selector": labels.role_selector(service.name, labels.ROLE_SERVE),
            "ports": [{"name": "http", "port": labels.ENGINE_HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }

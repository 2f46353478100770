"""The Service that clients talk to, in front of the router's pods."""

from typing import Any

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources.metadata import metadata


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


def service_url(service: InferenceService) -> str:
    """Base URL of the OpenAI surface inside the cluster."""
    return f"http://{labels.router_name(service.name)}.{service.namespace}.svc:{labels.ROUTER_HTTP_PORT}/v1"

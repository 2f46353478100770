"""ServiceAccounts: the engine's has no rights at all, the router's may watch EndpointSlices (router_access.py)."""

from typing import Any

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources.metadata import metadata


def engine_service_account_name(service: InferenceService) -> str:
    return service.spec.pod.service_account_name or labels.engine_name(service.name)


def engine_service_account(service: InferenceService) -> dict[str, Any]:
    return _service_account(service, labels.engine_name(service.name), labels.ROLE_SERVE)


def router_service_account(service: InferenceService) -> dict[str, Any]:
    return _service_account(service, labels.router_name(service.name), labels.ROLE_ROUTER)


def _service_account(service: InferenceService, name: str, role: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(service, name, role),
        "automountServiceAccountToken": False,
    }

"""ServiceAccounts: the engines' has no rights at all, the router's may see the EndpointSlices of its own namespace.

The rights themselves are the installation's (a ClusterRole, or a Role where it serves single namespaces): the operator
may only bind that one, so it needs no right to make roles, nor those that a role of its making would hold.
"""

from collections.abc import Iterable
from typing import Any

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import EngineRole, RouterRole
from kvasir_operator.resources.metadata import metadata
from kvasir_operator.settings import OperatorSettings

_RBAC = "rbac.authorization.k8s.io"


def engine_service_account_name(service: InferenceService, role: EngineRole) -> str:
    return role.pod.service_account_name or labels.engine_name(service.name)


def router_service_account_name(service: InferenceService, role: RouterRole) -> str:
    return role.pod.service_account_name or labels.router_name(service.name)


def engine_service_account(service: InferenceService, roles: Iterable[EngineRole]) -> dict[str, Any] | None:
    """One for all engine roles; None where each of them names an account of somebody else's."""
    if all(role.pod.service_account_name for role in roles):
        return None
    return own_engine_service_account(service)


def own_engine_service_account(service: InferenceService) -> dict[str, Any]:
    return _service_account(service, labels.engine_name(service.name), role=None)


def router_service_account(service: InferenceService, role: RouterRole) -> dict[str, Any] | None:
    """None where the manifest names an account of somebody else's."""
    if role.pod.service_account_name:
        return None
    return _service_account(service, labels.router_name(service.name), labels.ROLE_ROUTER)


def _service_account(service: InferenceService, name: str, role: str | None) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(service, name, role),
        "automountServiceAccountToken": False,
    }


def router_role_binding(service: InferenceService, role: RouterRole, settings: OperatorSettings) -> dict[str, Any]:
    subject = {
        "kind": "ServiceAccount",
        "name": router_service_account_name(service, role),
        "namespace": service.namespace,
    }
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": metadata(service, labels.router_name(service.name), labels.ROLE_ROUTER),
        "roleRef": {
            "apiGroup": _RBAC,
            "kind": "Role" if settings.namespace else "ClusterRole",
            "name": settings.router_cluster_role,
        },
        "subjects": [subject],
    }

"""The router's rights: to see the EndpointSlices of its own namespace, nothing else.

The rights themselves are the installation's (a ClusterRole, or a Role where it serves single namespaces): the operator
may only bind that one, so it needs no right to make roles, nor those that a role of its making would hold.
"""

from typing import Any

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import RouterRole
from kvasir_operator.resources.metadata import metadata
from kvasir_operator.resources.service_accounts import router_service_account_name
from kvasir_operator.settings import OperatorSettings

_RBAC = "rbac.authorization.k8s.io"


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

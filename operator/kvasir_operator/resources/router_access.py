"""The router's rights: to see the EndpointSlices of its own namespace, nothing else."""

from typing import Any

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources.metadata import metadata

_RBAC = "rbac.authorization.k8s.io"


def router_role(service: InferenceService) -> dict[str, Any]:
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "Role",
        "metadata": metadata(service, labels.router_name(service.name), labels.ROLE_ROUTER),
        "rules": [rule],
    }


def router_role_binding(service: InferenceService) -> dict[str, Any]:
    name = labels.router_name(service.name)
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": metadata(service, name, labels.ROLE_ROUTER),
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": service.namespace}],
    }
